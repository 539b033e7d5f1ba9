"""Each optimizer (`train.optimizer`) is described here, once. The layout of planes, the planner,
the fit report, checkpoints, a resume, the form and the page Hardware all read the description; only
the arithmetic of an update is elsewhere (`engine.runtime.optimizer`). No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from engine.text import MIB

Optimizer = Literal["adamw", "adamw_bf16", "adamw_8bit"]
"""Name of an optimizer in settings, checkpoints and stored rates."""
ADAMW: Final = "adamw"
"""The usual optimizer, whose states are all in fp32. Weights alone are the same with each."""
BLOCK = 256
"""Number of elements of a block of codes (`engine.planning.layout.optimizer_states`)."""


class StateFormat(StrEnum):
    """How a state of a range of elements is kept. Reports show the values."""

    FP32 = "fp32"
    BF16 = "bf16"
    CODES = "8 bits"


@dataclass(frozen=True)
class OptimizerState:
    """A state that an optimizer keeps for each element of a parameter. Each unit has a plane for
    it.
    """

    name: str
    """Name of the plane, which is the name of the state in `torch.optim`."""
    words: str
    """What it is, as in "AdamW's first moment"."""
    format: StateFormat
    """How it is kept, except where it is kept more exactly
    (`engine.planning.layout.optimizer_states`).
    """


@dataclass(frozen=True)
class OptimizerSpec:
    """What is to be known of an optimizer besides the arithmetic of its updates."""

    label: str
    """Text of the choice in the form."""
    states: tuple[OptimizerState, ...]
    keeps: str
    """Words for its states together."""
    update_bytes: float
    """Bytes of host memory that an update reads and writes for each parameter, with bf16
    weights.
    """
    thread_rate: float
    """Parameters per second that one thread of the host updates if it has host memory to itself.
    """
    on_resume: str
    """Sentence on what becomes of the states of another optimizer when a run is resumed."""
    resumes: tuple[Optimizer, ...]
    """Optimizers whose states can be converted to those of this one."""
    smaller: tuple[Optimizer, ...] = ()
    """Optimizers that do the same with smaller states, from the most exact one on: the fit report
    suggests them where RAM is short.
    """
    grain: int = 1
    """Elements at whose multiples the states of a unit can be cut in two."""
    device_bytes: int = 0
    """Bytes of temporaries that an update on the device takes."""
    has_two_passes: bool = False
    """Whether the host can update the weights of all units before the states of any."""

    @property
    def planes(self) -> tuple[str, ...]:
        """Names of the planes that hold its states."""
        return tuple(state.name for state in self.states)

    @property
    def format(self) -> StateFormat:
        """How it keeps its states."""
        return self.states[0].format

    @property
    def is_rounded(self) -> bool:
        """Whether not all of its states are in fp32. Their planes are rows of bytes then."""
        return self.format != StateFormat.FP32

    @property
    def states_text(self) -> str:
        """What it keeps and how, as in "AdamW's moments in fp32"."""
        return f"{self.keeps} in {self.format}"


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Planes that hold the moments of AdamW."""


def _moments(format_: StateFormat) -> tuple[OptimizerState, ...]:
    """Returns both moments of AdamW."""
    words = ("AdamW's first moment", "AdamW's second moment")
    return tuple(OptimizerState(*named, format_) for named in zip(MOMENTS, words))


_ROUNDING_BYTES = 150 * MIB
"""Bytes that moments in bf16 or in 8 bits take in fp32 where no kernel updates them in one pass."""
_WITH_MOMENTS: tuple[Optimizer, ...] = ("adamw", "adamw_bf16", "adamw_8bit")

OPTIMIZERS: dict[Optimizer, OptimizerSpec] = {
    "adamw": OptimizerSpec(
        label="AdamW, moments in fp32",
        states=_moments(StateFormat.FP32),
        keeps="AdamW's moments",
        update_bytes=26,
        thread_rate=1e9,
        on_resume="AdamW's moments are read as they were kept, and from now on they are in fp32.",
        resumes=_WITH_MOMENTS,
        smaller=("adamw_bf16", "adamw_8bit"),
        has_two_passes=True,
    ),
    "adamw_bf16": OptimizerSpec(
        label="AdamW, moments in bf16",
        states=_moments(StateFormat.BF16),
        keeps="AdamW's moments",
        update_bytes=18,
        thread_rate=0.6e9,
        on_resume="AdamW's moments are rounded to bf16 once, and kept so from now on.",
        resumes=_WITH_MOMENTS,
        smaller=("adamw_8bit",),
        device_bytes=_ROUNDING_BYTES,
    ),
    "adamw_8bit": OptimizerSpec(
        label="AdamW, moments in 8 bits",
        states=_moments(StateFormat.CODES),
        keeps="AdamW's moments",
        update_bytes=14.06,
        thread_rate=0.27e9,
        on_resume="AdamW's moments are rounded to 8 bits once, and kept so from now on.",
        resumes=_WITH_MOMENTS,
        grain=BLOCK,
        device_bytes=_ROUNDING_BYTES,
    ),
}
"""The description of each optimizer."""
