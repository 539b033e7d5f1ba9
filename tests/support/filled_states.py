"""Host states with random contents, which checkpoints are made of."""

from __future__ import annotations

import numpy as np

from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.host_states import HostStates


def layouts(blocks: int = 3, width: int = 24, prefix: str = "model"):
    def unit(name: str, *shapes: tuple[str, tuple[int, ...]]):
        return lay_out(
            name,
            [
                ParameterSpec(key, f"{prefix}.{name}.{key}", shape, decay=len(shape) > 1)
                for key, shape in shapes
            ],
        )

    return [
        unit("embed", ("weight", (50, width))),
        *(
            unit(
                f"block.{n}",
                ("norm", (width,)),
                ("up", (4 * width, width)),
                ("down", (width, 4 * width)),
            )
            for n in range(blocks)
        ),
        unit("head", ("norm", (width,))),
    ]


def planes_of(states) -> list[str]:
    return [plane for plane in states.planes if plane != "grad"]


def fill(states: HostStates, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for unit in states.layouts:
        for plane in states.planes:
            array = states.array(unit, plane)
            array[:] = np.frombuffer(rng.bytes(array.nbytes), array.dtype)


def content(states: HostStates) -> dict[tuple[str, str], bytes]:
    return {
        (unit, plane): states.array(unit, plane).tobytes()
        for unit in states.layouts
        for plane in planes_of(states)
    }


def names(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())
