"""`build_step_plan`: from units and choices to the ops of one step. Policy lives in `choose`; nothing here runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine.plan.builder import PlanBuilder
from engine.plan.choices import PlanChoices
from engine.plan.device_updates import DeviceUpdates
from engine.plan.ops import COMPUTE, D2H, EMBED, H2D, HEAD, HOST, StepPlan


def build_step_plan(blocks: list[str], tied: bool, choices: PlanChoices,
                    numel: Mapping[str, int] | None = None, state_bytes: int = 14, updates: bool = True) -> StepPlan:
    """The plan of one training step over `blocks` (unit names in forward order) between the embed and head units.

    `tied`: the head also uses the embed unit's weights, so its slot is held and its gradient is summed all step. `numel`:
    elements of each unit's planes, and `state_bytes`: bytes of all planes for an element, both needed where an optimizer runs
    on the device. updates: False for a dry run, the same step up to its summary: no op of it writes weights or moments.
    Raises ValueError for choices that contradict each other.
    """
    c = choices
    if c.micro_batches % c.rounds:
        raise ValueError(f"{c.rounds} rounds do not divide {c.micro_batches} micro-batches")
    if (c.gradient_sum == "vertical") != (c.rounds == 1):
        raise ValueError("gradient_sum is 'vertical' exactly when there is one round")
    if c.kept_blocks > len(blocks):
        raise ValueError(f"{c.kept_blocks} of {len(blocks)} blocks cannot keep their activations")
    if not set(c.device_homes) <= {EMBED, *blocks, HEAD} or (c.device_homes and c.update_buffers < 1):
        raise ValueError(f"{c.update_buffers} buffers for the optimizers of {c.device_homes}")
    if (c.spare_buffers or c.spare_blocks) and not (
            c.device_homes and 0 < c.spare_buffers < c.update_buffers and 0 < c.spare_blocks <= c.kept_blocks):
        raise ValueError(f"{c.spare_buffers} of {c.update_buffers} buffers in the place of {c.spare_blocks} blocks of "
                         f"{c.kept_blocks}")
    writer = _StepWriter(blocks, tied, c, numel or {}, state_bytes)
    # The first pass leaves behind who touched each buffer last; the second is the steady-state step.
    writer.write(updates=updates)
    writer.builder.start_step()
    writer.write(updates=updates)
    return StepPlan(ops=writer.builder.step_ops(), slots=writer.slot_units(), grads=writer.grad_units(),
                    stagings=writer.staging_units(), rings=writer.ring_names(),
                    kept_units=frozenset(writer.kept), host_boundaries=c.host_boundaries, rounds=c.rounds,
                    micro_batches=c.micro_batches, gradient_sum=c.gradient_sum, compiled=c.compiled,
                    device_homes=c.device_homes,
                    placed=tuple((unit, slot) for unit in c.device_homes if (slot := writer.updates.placed(unit))),
                    update_buffers=tuple(writer.updates.buffers), spare_buffers=tuple(writer.updates.spare),
                    piece_numel=writer.updates.piece_numel,
                    arena=tuple(writer.updates.arena))


def build_forward_plan(blocks: list[str], tied: bool, micro_batches: int, slots: int, prefetch_depth: int = 1,
                       resident_blocks: int = 0) -> StepPlan:
    """A pass without gradients, for evaluation and sampling; `loss` ops end it."""
    choices = PlanChoices(micro_batches=micro_batches, slots=slots, prefetch_depth=prefetch_depth,
                          resident_blocks=resident_blocks)
    writer = _StepWriter(blocks, tied, choices)
    writer.write(training=False)
    writer.builder.start_step()
    writer.write(training=False)
    return StepPlan(ops=writer.builder.step_ops(), slots=writer.slot_units(), micro_batches=micro_batches)


@dataclass
class _Use:
    """A stretch of COMPUTE ops that needs one block's weights."""

    unit: str
    phase: str
    slot: str = ""
    fetch: bool = False


@dataclass
class _Boundaries:
    """Of one block on the host: micro-batches whose boundaries are not fetched yet, and the rings of the others."""

    ahead: Iterator[int]
    rings: dict[int, str] = field(default_factory=dict)


class _StepWriter:
    """Writes one step's ops in program order."""

    def __init__(self, blocks: list[str], tied: bool, choices: PlanChoices, numel: Mapping[str, int] | None = None,
                 state_bytes: int = 14):
        self.blocks, self.tied, self.c = blocks, tied, choices
        self.above = dict(zip(blocks, [*blocks[1:], HEAD]))
        self.below = dict(zip(blocks[1:], blocks))
        self.builder = PlanBuilder()
        self.resident = blocks[len(blocks) - choices.resident_blocks:] if choices.resident_blocks else []
        self.kept = set(blocks[len(blocks) - choices.kept_blocks:]) if choices.kept_blocks else set()
        self.streamed = [b for b in blocks if b not in self.resident]
        # Backward ends with the first blocks, and nothing takes their slots before the next step does.
        lasting = {unit: unit for unit in self.resident} | {unit: f"slot {k}" for k, unit in
                                                            enumerate(self.streamed[:choices.slots])}
        self.updates = DeviceUpdates(self.builder, blocks, lasting, choices.device_homes, choices.update_buffers,
                                     numel or {}, state_bytes, choices.gradient_sum == "device", self._host_gradient,
                                     choices.spare_buffers, choices.spare_blocks)

    # ------------------------------------------------------------------ buffers

    def slot_units(self) -> dict[str, tuple[str, ...]]:
        slots: dict[str, tuple[str, ...]] = {EMBED: (EMBED,), HEAD: (HEAD,)}
        slots |= {f"slot {k}": tuple(self.streamed) for k in range(min(self.c.slots, len(self.streamed)))}
        return slots | {unit: (unit,) for unit in self.resident}

    def grad_name(self, unit: str) -> str:
        if self.c.gradient_sum == "device" or (unit in (EMBED, HEAD) and self.tied):
            return f"grad {unit}"
        return "grad outer" if unit in (EMBED, HEAD) else "grad block"

    def grad_units(self) -> dict[str, tuple[str, ...]]:
        grads: dict[str, tuple[str, ...]] = {}
        for unit in [EMBED, *self.blocks, HEAD]:
            grads[self.grad_name(unit)] = (*grads.get(self.grad_name(unit), ()), unit)
        return grads

    def staging_units(self) -> dict[str, tuple[str, ...]]:
        return {"staging 0": tuple(self.blocks), "staging 1": tuple(self.blocks), "staging outer": (EMBED, HEAD)}

    def ring_names(self) -> tuple[str, ...]:
        if not self.c.host_boundaries:
            return ()
        return tuple(f"{way} {k}" for way in ("store", "fetch") for k in range(self.c.boundary_rings))

    def _next_ring(self, way: str) -> str:
        turn = self.ring_turn[way]
        self.ring_turn[way] = (turn + 1) % self.c.boundary_rings
        return f"{way} {turn}"

    def _staging(self, unit: str) -> str:
        if unit in (EMBED, HEAD):
            return "staging outer"
        self.staging_turn ^= 1
        return f"staging {self.staging_turn}"

    # ------------------------------------------------------------------ the step

    def write(self, training: bool = True, updates: bool = True) -> None:
        c = self.c
        self.staging_turn = 0
        self.updates.start_step()
        self.ring_turn = {"store": 0, "fetch": 0}
        per_round = c.micro_batches // c.rounds
        self.uses = self._assign_slots(training)
        self.next_fetch = 0
        use = 0
        for round_ in range(c.rounds):
            batches = list(range(round_ * per_round, (round_ + 1) * per_round))
            if round_ == 0 and not self.updates.placed(EMBED):
                self._prefetch(EMBED, EMBED)
            self._fetch_ahead(use)
            for mb in batches:
                self._emit("embed", mb, EMBED, reads=self._weights(EMBED, EMBED),
                           writes={f"hidden {mb}": f"in {round_}"}, round_=round_, slot=EMBED)
            for block in self.blocks:
                self._fetch_ahead(use)
                if round_ == 0 and block == self.blocks[-1] and not self.updates.placed(HEAD):
                    # Not earlier: the head's update comes last, and a prefetch that waits holds the lane up.
                    self._prefetch(HEAD, HEAD)
                if training and round_ == 0 and self.updates.lenders[:1] == [block]:
                    self.updates.reclaim()
                for mb in batches:
                    self._forward(block, mb, round_, self.uses[use], training)
                use += 1
            self._fetch_ahead(use)
            for mb in batches:
                self._loss(mb, round_, mb == batches[0], training)
            if not training:
                continue
            self._finish_gradient(HEAD, round_)
            finished: set[str] = set()
            boundaries = self._fetch_boundaries(self.blocks[-1], batches, round_)
            for block, following in zip(reversed(self.blocks), [*reversed(self.blocks[:-1]), None]):
                self._fetch_ahead(use)
                self._backward_unit(block, batches, round_, self.uses[use], boundaries)
                if following is not None:
                    # Before the next prefetch, which waits for a slot: its first backward would have to wait for both.
                    boundaries = self._fetch_boundaries(following, batches, round_)
                use += 1
                self._fetch_ahead(use)
                self._finish_gradient(block, round_)
                finished.add(block)
                if round_ == c.rounds - 1:
                    if self.updates.lenders[:1] == [block]:
                        self.updates.lend()
                    self.updates.fetch_first(finished)
            for mb in batches:
                self._embed_backward(mb, round_, mb == batches[0])
            self._finish_gradient(EMBED, round_)
        if training:
            self._finish_step(updates)

    def _assign_slots(self, training: bool) -> list[_Use]:
        """Streamed blocks take the slots in turn, the same one in forward and backward: what a kept block saved are views
        into its slot. At each turn of direction the slots still hold what is used next, which is not fetched again; no
        other assignment fetches less."""
        one_round = [_Use(b, "forward") for b in self.blocks]
        if training:
            one_round += [_Use(b, "backward") for b in reversed(self.blocks)]
        uses = [_Use(u.unit, u.phase) for _ in range(self.c.rounds) for u in one_round]
        slots = {unit: f"slot {k % self.c.slots}" for k, unit in enumerate(self.streamed)}
        content = {slot: unit for unit in self.blocks if (slot := self.updates.placed(unit))}
        for use in uses:
            use.slot = slots.get(use.unit, use.unit)
            use.fetch = content.get(use.slot) != use.unit
            content[use.slot] = use.unit
        return uses

    def _fetch_ahead(self, current: int) -> None:
        """Issue the prefetches of uses up to `prefetch_depth` ahead, in order, once their slot is no longer needed."""
        while self.next_fetch < len(self.uses) and self.next_fetch <= current + self.c.prefetch_depth:
            use = self.uses[self.next_fetch]
            if use.fetch:
                needed = any(u.slot == use.slot for u in self.uses[current:self.next_fetch])
                if needed:
                    return
                self._prefetch(use.unit, use.slot)
            self.next_fetch += 1

    def _prefetch(self, unit: str, slot: str) -> None:
        self.builder.emit("prefetch", H2D, unit, reads=self.updates.planes(unit), writes={f"slot:{slot}": unit}, slot=slot)

    def _weights(self, unit: str, slot: str) -> dict[str, str]:
        return self.updates.slot(unit, slot)

    def _host_gradient(self, unit: str) -> dict[str, str]:
        return {f"plane:grad {unit}": f"round {self.c.rounds - 1}"}

    def _emit(self, kind: str, mb: int | None, unit: str, *, reads=None, writes=None, round_=0, **attributes) -> None:
        self.builder.emit(kind, COMPUTE, unit, reads=reads, writes=writes, micro_batch=mb, round=round_, **attributes)

    def _forward(self, block: str, mb: int, round_: int, use: _Use, training: bool) -> None:
        source = f"{self.below.get(block, 'in')} {round_}"
        reads = self._weights(block, use.slot) | {f"hidden {mb}": source} | (self.updates.room(block) if training else {})
        writes = {f"hidden {mb}": f"{block} {round_}"}
        store = training and self.c.host_boundaries and block not in self.kept
        ring = self._next_ring("store") if store else None
        if store:
            writes[f"ring {ring}"] = f"{block} {mb}"
        elif training:
            writes[f"saved {block} {mb}"] = f"round {round_} in {use.slot}" if block in self.kept else f"round {round_}"
        self._emit("forward", mb, block, reads=reads, writes=writes, round_=round_, slot=use.slot, ring=ring)
        if store:
            self.builder.emit("store_boundary", D2H, block, reads={f"ring {ring}": f"{block} {mb}"},
                              writes={f"host boundary {block} {mb}": f"round {round_}"}, micro_batch=mb, round=round_,
                              ring=ring)

    def _loss(self, mb: int, round_: int, first: bool, training: bool) -> None:
        final = f"{self.blocks[-1]} {round_}"
        reads = self._weights(HEAD, HEAD) | {f"hidden {mb}": final}
        writes = {"loss": "sum"}
        if self.tied:
            reads |= self._weights(EMBED, EMBED)
        if training:
            writes |= {f"hidden {mb}": f"gradient {HEAD} {round_}", f"grad:{self.grad_name(HEAD)}": HEAD}
            if self.tied:
                writes[f"grad:{self.grad_name(EMBED)}"] = EMBED
        self._emit("loss", mb, HEAD, reads=reads, writes=writes, round_=round_, slot=HEAD, grad=self.grad_name(HEAD),
                   first=first and self._starts_sum(round_))

    def _starts_sum(self, round_: int) -> bool:
        return round_ == 0 or self.c.gradient_sum != "device"

    def _fetch_boundaries(self, block: str, batches: list[int], round_: int) -> _Boundaries:
        """The first of the block's boundaries on the host; the others follow one by one as rings become free."""
        found = _Boundaries(iter(batches if self.c.host_boundaries and block not in self.kept else []))
        for _ in range(max(1, self.c.boundary_rings - 1)):
            self._fetch_boundary(block, round_, found)
        return found

    def _fetch_boundary(self, block: str, round_: int, boundaries: _Boundaries) -> None:
        mb = next(boundaries.ahead, None)
        if mb is not None:
            ring = boundaries.rings[mb] = self._next_ring("fetch")
            self.builder.emit("fetch_boundary", H2D, block, reads={f"host boundary {block} {mb}": f"round {round_}"},
                              writes={f"ring {ring}": f"{block} {mb}"}, micro_batch=mb, round=round_, ring=ring)

    def _backward_unit(self, block: str, batches: list[int], round_: int, use: _Use, boundaries: _Boundaries) -> None:
        above = self.above[block]
        rings = boundaries.rings
        for mb in batches:
            reads = self._weights(block, use.slot) | {f"hidden {mb}": f"gradient {above} {round_}"} | \
                self.updates.room(block)
            if mb in rings:
                reads[f"ring {rings[mb]}"] = f"{block} {mb}"
            else:
                # What is kept points into the slot, so it must be the same one.
                reads[f"saved {block} {mb}"] = f"round {round_} in {use.slot}" if block in self.kept else f"round {round_}"
            first = mb == batches[0] and self._starts_sum(round_)
            writes = {f"hidden {mb}": f"gradient {block} {round_}", f"grad:{self.grad_name(block)}": block}
            self._emit("backward", mb, block, reads=reads, writes=writes | (self.updates.sums_under(block) if first else {}),
                       round_=round_, slot=use.slot, grad=self.grad_name(block), ring=rings.get(mb), first=first)
            self._fetch_boundary(block, round_, boundaries)

    def _embed_backward(self, mb: int, round_: int, first: bool) -> None:
        self._emit("embed_backward", mb, EMBED, slot=EMBED, grad=self.grad_name(EMBED), round_=round_,
                   reads=self._weights(EMBED, EMBED) | {f"hidden {mb}": f"gradient {self.blocks[0]} {round_}"},
                   writes={f"grad:{self.grad_name(EMBED)}": EMBED},
                   first=first and self._starts_sum(round_) and not self.tied)

    def _finish_gradient(self, unit: str, round_: int) -> None:
        last = round_ == self.c.rounds - 1
        if self.c.gradient_sum == "device" and not last:
            return
        grad, staging = self.grad_name(unit), self._staging(unit)
        reads = {f"grad:{grad}": unit} | self.updates.sums_under(unit)
        adds = self.c.gradient_sum == "host" and round_ > 0
        if adds:
            self.builder.emit("fetch_grad", H2D, unit, reads={f"plane:grad {unit}": f"round {round_ - 1}"},
                              writes={staging: f"{unit} so far"}, staging=staging, round=round_)
            reads[staging] = f"{unit} so far"
        writes = {staging: f"{unit} sum"} | ({f"norm {unit}": "ready"} if last else {})
        self._emit("reduce", None, unit, reads=reads, writes=writes, round_=round_, grad=grad, staging=staging,
                   first=not adds, last=last)
        if last and self.updates.keep_staged(unit, staging):
            return
        self.builder.emit("offload", D2H, unit, reads={staging: f"{unit} sum"},
                          writes={f"plane:grad {unit}": f"round {round_}"}, staging=staging, round=round_)

    def _finish_step(self, updates: bool) -> None:
        units = [EMBED, *self.blocks, HEAD]
        norms = {f"norm {unit}": "ready" for unit in units}
        self._emit("summary", None, "step", reads=norms | {"loss": "sum"}, writes={"summary": "ready"})
        if not updates:
            return
        self.builder.emit("clip", HOST, "step", reads={"summary": "ready"}, writes={"clip": "ready"})
        self.updates.write()
        for unit in units:
            if unit not in self.c.device_homes:
                self.builder.emit("update", HOST, unit, reads={"clip": "ready"} | self._host_gradient(unit),
                                  writes={f"plane:weight {unit}": "ready"})
        if self.c.device_homes:
            self.builder.emit("home", HOST, "step", reads=self.updates.home())
