"""Each optimizer (`train.optimizer`) is described here, once. The layout of planes, the planner,
the fit report, checkpoints, a resume, the form and the page Hardware all read the description; only
the arithmetic of an update is elsewhere (`engine.runtime.optimizer`). No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from engine.text import MIB

Optimizer = Literal["adamw", "adamw_bf16", "adamw_8bit", "muon"]
"""Name of an optimizer in settings, checkpoints and stored rates."""
ADAMW: Final = "adamw"
"""The usual optimizer, whose states are all in fp32. Weights alone are the same with each."""
BLOCK = 256
"""Number of elements of a block of codes (`engine.planning.layout.optimizer_states`)."""


SMALL = 4096
"""Number of elements below which parameters keep their states in fp32."""
UnitKind = Literal["embed", "block", "head"]
"""Kind of a unit of the model."""


@dataclass(frozen=True)
class OptimizerSettings:
    """Hyperparameters of a run's optimizer. The defaults are torch's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    seed: int = 0
    """States in bf16 are rounded with random bits that depend on this seed."""


class StateFormat(StrEnum):
    """How a state of a range of elements is kept. Reports show the values."""

    FP32 = "fp32"
    BF16 = "bf16"
    CODES = "8 bits"
    NONE = "no state"

    @property
    def item_bytes(self) -> int:
        """Bytes of an element, not counting those of its block."""
        return {
            StateFormat.FP32: 4,
            StateFormat.BF16: 2,
            StateFormat.CODES: 1,
            StateFormat.NONE: 0,
        }[self]


def is_matrix_of_block(shape: tuple[int, ...], kind: UnitKind) -> bool:
    """Returns whether Muon orthogonalizes the updates of a parameter in a unit of this kind.
    Stacked experts, which have three dimensions, are not among these.
    """
    return kind == "block" and len(shape) == 2


MEASURED_SIDE = 512
"""Rows and columns of the matrix with which the rate of such an optimizer is measured."""


def orthogonalization_flops(shape: tuple[int, int]) -> float:
    """Returns the FLOPs of orthogonalizing an update of a matrix: in each of five iterations, two
    products of the matrix and one of its small side. A square matrix takes 30 times its side for
    each parameter.
    """
    small, large = sorted(shape)
    return 5.0 * (4 * small * small * large + 2 * small**3)


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
    """How it is kept, except where `format_of` says otherwise."""
    of_matrices: bool = True
    """Whether matrices of blocks have the state."""

    def format_of(self, shape: tuple[int, ...], kind: UnitKind) -> StateFormat:
        """Returns how the state of a parameter in a unit of this kind is kept. Small parameters,
        and the embedding where the rest is in 8 bits, are kept more exactly: there small states
        hurt first and save least.
        """
        if not self.of_matrices and is_matrix_of_block(shape, kind):
            return StateFormat.NONE
        if self.format == StateFormat.FP32 or math.prod(shape) < SMALL:
            return StateFormat.FP32
        return StateFormat.BF16 if kind == "embed" else self.format


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
    grain: int | None = 1
    """Elements at whose multiples a unit can be cut in two, so that it is updated in chunks or by
    several ranks; None where an update needs it whole.
    """
    device_bytes: int = 0
    """Bytes of temporaries that an update on the device takes."""
    orthogonalizes: bool = False
    """Whether updates of the matrices of blocks are orthogonalized (`orthogonalization_flops`). The
    rate of the host is then that of a matrix of `MEASURED_SIDE`.
    """
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
_OF_MUON = (
    OptimizerState(MOMENTS[0], "Muon's momentum and AdamW's first moment", StateFormat.FP32),
    OptimizerState(MOMENTS[1], "AdamW's second moment", StateFormat.FP32, of_matrices=False),
)
"""The states of Muon. Its momentum is an exponential average of gradients, as AdamW's first moment
is, and has the same plane. Parameters that AdamW updates have a second moment.
"""

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
    "muon": OptimizerSpec(
        label="Muon for the matrices of blocks, AdamW for the rest",
        states=_OF_MUON,
        keeps="Muon's momentum and AdamW's moments",
        update_bytes=26,
        thread_rate=1e6,  # 15 GFLOPs a second
        on_resume="Muon continues with the states that it kept.",
        resumes=("muon",),
        grain=None,
        device_bytes=_ROUNDING_BYTES,
        orthogonalizes=True,
    ),
}
"""The description of each optimizer."""
