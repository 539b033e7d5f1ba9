"""`PlanBuilder` appends ops and derives what each must wait for from what it reads and writes. No torch."""

from __future__ import annotations

from engine.plan.ops import Op


class PlanBuilder:
    """Appends ops and derives their waits from what they read and write (read after write, write after read, write
    after write), keeping only waits that lane order and other waits do not already imply."""

    def __init__(self) -> None:
        self._ops: list[Op] = []
        self._writer: dict[str, int] = {}
        self._readers: dict[str, list[int]] = {}
        self._lanes: list[str] = []
        self._clocks: list[dict[str, int]] = []
        self._lane_last: dict[str, int] = {}
        self._base: int | None = None

    def start_step(self) -> None:
        """The step that is wanted begins. What was emitted before was the step before it: of that only counts who touched
        what last."""
        self._base = len(self._lanes)

    def emit(self, kind: str, lane: str, unit: str, reads: dict[str, str] | None = None,
             writes: dict[str, str] | None = None, **attributes) -> None:
        reads, writes = reads or {}, writes or {}
        index, lanes, writer, readers = len(self._lanes), self._lanes, self._writer, self._readers
        needs = {writer[resource] for resource in reads if resource in writer}
        for resource in writes:
            if resource in writer:
                needs.add(writer[resource])
            needs.update(readers.get(resource, ()))
        clock = self._clocks[self._lane_last[lane]].copy() if lane in self._lane_last else {}
        waits = []
        for need in sorted(needs, reverse=True):
            if clock.get(lanes[need], -1) >= need:
                continue
            waits.append(need)
            for name, value in self._clocks[need].items():
                if value > clock.get(name, -1):
                    clock[name] = value
        clock[lane] = index
        self._clocks.append(clock)
        lanes.append(lane)
        self._lane_last[lane] = index
        for resource in reads:
            readers.setdefault(resource, []).append(index)
        for resource in writes:
            writer[resource] = index
            readers[resource] = []
        base = self._base
        if base is not None:
            waits.sort()
            self._ops.append(Op(index - base, kind, lane, unit, reads=tuple(reads.items()), writes=tuple(writes.items()),
                                waits=tuple(wait - base for wait in waits if wait >= base),
                                waits_previous=tuple(wait for wait in waits if wait < base), **attributes))

    def step_ops(self) -> tuple[Op, ...]:
        return tuple(self._ops)
