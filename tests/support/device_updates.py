"""Plans with the states of some units at home on the device, for tests of what they compute."""

from __future__ import annotations

import torch

from engine.config.optimizers import ADAMW
from engine.planning.layout.layout import ParameterSpec, lay_out, planes_of
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import UPDATE_LANES, Lane
from engine.runtime.host.host_states import HostStates
from tests.support.same_bits import BASE

MAIN_GRAD_PLANS = {
    "vertical": {},
    "device": dict(rounds=2, main_grad="device"),
    "host": dict(rounds=2, main_grad="host"),
}


DEVICE_UPDATES = {
    "some": ("embed", "block 0"),
    "others": ("block 1", "head"),
    "all": ("embed", "block 0", "block 1", "block 2", "head"),
}


LATE = [
    UPDATE_LANES,
    (Lane.H2D,),
    (Lane.D2H, Lane.HOST),
    (Lane.COMPUTE,),
    (*UPDATE_LANES, Lane.H2D),
    *((lane,) for lane in UPDATE_LANES),
    (*UPDATE_LANES, Lane.HOST),
    Lane,
]


def updated_on_device(
    device_updates: tuple[str, ...], buffers: int, main_grad: str = "vertical", **changes
) -> PlanChoices:
    return BASE.changed(
        device_updated_units=device_updates,
        update_buffers=buffers,
        **MAIN_GRAD_PLANS[main_grad],
        **changes,
    )


def states_of(planes: list[torch.Tensor], dtype: str) -> list[dict[str, torch.Tensor]]:
    """For each unit its fp32 masters and both moments."""
    names, found = planes_of(dtype, ADAMW), []
    for start in range(0, len(planes), len(names)):
        unit = dict(zip(names, planes[start : start + len(names)]))
        master = unit["weight_high"]
        if dtype == "bfloat16":
            bits = (master.view(torch.int16).to(torch.int32) << 16) + unit["weight_low"].to(
                torch.int32
            )
            master = bits.view(torch.float32)
        found.append(
            {"master": master, "exp_avg": unit["exp_avg"], "exp_avg_sq": unit["exp_avg_sq"]}
        )
    return found


def one_unit(dtype: str) -> HostStates:
    layout = lay_out(
        "unit",
        [
            ParameterSpec("weight", "weight", (70, 64), True),
            ParameterSpec("norm", "norm", (640,), False),
        ],
    )
    states = HostStates([layout], dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    return states
