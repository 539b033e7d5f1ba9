"""These messages pass between the process that leads a run and those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from engine.config.adapters import Adapters
from engine.config.regularisation import Regularisation
from engine.config.settings import ModelConfig, Optimizer
from engine.config.trained_parts import Parts
from engine.exchange.place import Place
from engine.host.divided_planes import HostPart
from engine.host.host_adamw import AdamWSettings
from engine.host.ram_planes import Key, Wanted
from engine.host.shared_memory import SharedPlanes
from engine.host.shared_piece import InPiece
from engine.plan.choices import PlanChoices
from engine.plan.step_plan import Span
from engine.plan.waits import Wait
from engine.ranks.meeting import Meeting
from engine.runtime.step import StepShare

# ---------------------------------------------------------------- from the leader


@dataclass(frozen=True)
class Open:
    """A follower opens its device and joins the process group. It answers `Done`."""

    device: str
    """It is `cpu` or `cuda`."""
    place: Place
    meeting: Meeting
    threads: int
    """A rank may use this many cores."""
    memory_limit: int | None
    """The device's allocator may take this many bytes; None where there is no limit."""


@dataclass(frozen=True)
class Gather:
    """A follower takes part in a measurement, in which all ranks gather `size` bytes. It answers
    `Done`.
    """

    size: int


@dataclass(frozen=True)
class Held:
    """A `Held` says what the planes hold, and of which model."""

    model: ModelConfig
    config: Any
    """It is the model's configuration, of transformers, as the leader changed it."""
    parts: Parts | Adapters | None
    """These are trained; None for the whole model."""
    optimizer: Optimizer
    has_gradients: bool
    """The planes include gradients."""
    settled: tuple[str, ...]
    """These units live on the devices."""
    span: int = 1
    """The planes are divided among so many hosts."""


@dataclass(frozen=True)
class Hold:
    """The first rank of another host than the leader's makes the planes of its host. It answers
    `Holds`.
    """

    held: Held


@dataclass(frozen=True)
class TellPlanes:
    """The first rank of a host tells where its part of planes is. It answers `Holds`."""


@dataclass(frozen=True)
class Build:
    """A follower builds its engine over the planes of its host. Copies on other hosts than the
    leader's are filled before. It answers `Done`.
    """

    held: Held
    planes: SharedPlanes
    adamw: AdamWSettings
    choices: PlanChoices
    tokens: int
    """This and what follows is as in `EngineSettings`."""
    loss_chunk: int
    max_grad_norm: float | None
    seed: int
    regularisation: Regularisation
    torch_threads: int
    """Blocks compute with this many threads on a CPU."""


@dataclass(frozen=True)
class CloseEngine:
    """A follower frees its engine and its planes. It answers `Done`."""


@dataclass(frozen=True)
class Train:
    """A follower submits a step. Once it has applied it, it answers `Applied`."""

    number: int
    share: StepShare
    learning_rate: float
    skipped: tuple[int, ...]
    """These earlier steps were taken without an update."""
    has_timeline: bool = False
    """The answer tells when the ops of the step ran."""


@dataclass(frozen=True)
class Go:
    """A follower may change the planes: step `number` will be applied."""

    number: int


@dataclass(frozen=True)
class DryRun:
    """A follower makes a dry run. It answers `Done`."""

    share: StepShare


@dataclass(frozen=True)
class Evaluate:
    """A follower computes the losses of micro-batches. It answers `Losses`."""

    batches: Sequence[Any]


@dataclass(frozen=True)
class Accompany:
    """A follower takes part in a pass of the leader over the units, which are gathered once for
    each of `groups` of micro-batches. It answers `Done`.
    """

    groups: int


@dataclass(frozen=True)
class Drain:
    """A follower waits until every submitted step is applied. It answers `Done`."""


@dataclass(frozen=True)
class End:
    """A follower is to end, with this exit code."""

    code: int = 0


# ---------------------------------------------------------------- shards elsewhere


@dataclass(frozen=True)
class AllocateShards:
    """A follower allocates planes of units that live on the devices. It answers `ShardReply`, as it
    does to the other messages about shards.
    """

    wanted: dict[Key, Wanted]


@dataclass(frozen=True)
class AllocateParts:
    """The first rank of a host allocates the host's part of planes, in its RAM."""

    parts: dict[Key, HostPart]


@dataclass(frozen=True)
class ReleaseShards:
    """A follower lets go of planes."""

    keys: tuple[Key, ...]
    in_ram: bool = False
    """They are in the RAM of its host, not on its device."""


@dataclass(frozen=True)
class ReadShard:
    """A follower reads the bytes between two places of a plane, as far as it holds the plane. They
    count from the first that it holds on its device, or from the first of a plane in RAM.
    """

    key: Key
    begin: int
    end: int
    in_ram: bool = False
    into: InPiece | None = None
    """The bytes go there, and not into the answer."""


@dataclass(frozen=True)
class WriteShard:
    """A follower writes `content`, uint8 [bytes], from the byte `begin` on, which counts as in
    `ReadShard`.
    """

    key: Key
    begin: int
    content: np.ndarray | InPiece
    in_ram: bool = False


ShardMessage: TypeAlias = AllocateShards | AllocateParts | ReleaseShards | ReadShard | WriteShard


@dataclass(frozen=True)
class ShardReply:
    """What the leader has asked of shards is done."""

    content: np.ndarray | None = None
    """These bytes, uint8 [bytes], were asked for."""


# ---------------------------------------------------------------- from a follower


@dataclass(frozen=True)
class Done:
    """What the leader has asked for is done."""


@dataclass(frozen=True)
class Holds:
    """The planes of a host are there. Its other ranks find them where this says."""

    planes: SharedPlanes


@dataclass(frozen=True)
class Timeline:
    """The ops of a step ran at these times on a rank, and its COMPUTE lane waited in these. Times
    are those of `time.perf_counter`, a clock that all processes of a machine share.
    """

    spans: Sequence[Span]
    waits: Sequence[Wait]


@dataclass(frozen=True)
class DeviceMemory:
    """A rank holds so many bytes of its device, as `Backend.memory` says; zeros on a CPU."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    peak_reserved: int = 0
    in_use: int = 0
    """All programs on the card together use this."""
    total: int = 0
    host: int = 0
    """The process has this many bytes of RAM for itself. Only those on other hosts tell."""


@dataclass(frozen=True)
class Applied:
    """All updates of step `number` are in the planes."""

    number: int
    timeline: Timeline | None = None
    """It is there where the leader has asked for it."""
    memory: DeviceMemory | None = None
    """It is there about once a second."""


@dataclass(frozen=True)
class Losses:
    """These are the losses of the micro-batches that were asked for, in order."""

    totals: tuple[float, ...]
    positions: tuple[np.ndarray, ...]
    """Each is float32 [n]: the cross-entropies of the positions with a label."""


@dataclass(frozen=True)
class Failed:
    """Something went wrong in a follower, which ends now."""

    sentence: str
    """It says what, without naming the rank."""
    trace: str
    """The traceback is for the log."""
    by_others: bool = False
    """It could not reach other ranks, one of which may be the cause."""
