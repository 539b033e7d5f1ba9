"""These messages pass between rank 0 of a run and its workers. There are no
others, and each has the fields that it has here, of these types
(`engine.runtime.distributed.codec`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from msgspec import Struct

from engine.config.adapters import Adapters
from engine.config.optimizers import Optimizer, OptimizerSettings
from engine.config.regularization import Regularization
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.data.batches.rows import MicroBatch
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.stalls import RanOp, Wait
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed.rendezvous import Rendezvous
from engine.runtime.host.cross_node_planes import NodeShard
from engine.runtime.host.ram_planes import Key, Wanted
from engine.runtime.host.shared_chunk import InSharedBuffer
from engine.runtime.host.shared_memory import SharedPlanes
from engine.runtime.step.step import StepShard


class Message(Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Message between two processes, which begins with the name of its kind."""


class Beat(Message, frozen=True):
    """A sign of life. Both sides send it, and nobody answers."""


# ---------------------------------------------------------------- from rank 0


class Open(Message, frozen=True):
    """A worker opens its device and joins the process group. It answers `Done`."""

    device: str
    """`cpu` or `cuda`."""
    place: RankInfo
    rendezvous: Rendezvous
    threads: int
    """Number of cores that a rank may use."""
    memory_limit: int | None
    """Bytes that the device's allocator may take; None where there is no limit."""


class Gather(Message, frozen=True):
    """A worker takes part in a measurement, in which all ranks gather `size` bytes. It answers
    `Done`.
    """

    size: int


class PlanesSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of the planes, and the model they belong to."""

    model: ModelConfig
    config: str
    """The model's configuration, of transformers, as rank 0 changed it
    (`engine.runtime.distributed.codec.config_text`).
    """
    parts: Parts | None
    """Parts that are trained; None for the whole model, and where adapters are."""
    adapters: Adapters | None
    """Adapters that are trained; None where there are none."""
    optimizer: Optimizer
    has_gradients: bool
    """The planes include gradients."""
    gpu_resident: tuple[str, ...]
    """Units that live on the devices."""
    nodes_per_replica: int = 1
    """Number of nodes over which the planes are sharded."""


class MakePlanes(Message, frozen=True):
    """The first rank of another node than rank 0's makes the planes of its node. It answers
    `PlanesMade`.
    """

    held: PlanesSpec


class RequestPlanes(Message, frozen=True):
    """The first rank of a node tells where its part of planes is. It answers `PlanesMade`."""


class Build(Message, frozen=True):
    """A worker builds its engine over the planes of its node. Copies on other nodes than the
    rank 0's are filled before. It answers `Done`.
    """

    held: PlanesSpec
    planes: SharedPlanes
    optimizer: OptimizerSettings
    choices: PlanChoices
    tokens: int
    """As in `EngineSettings`, like what follows."""
    loss_chunk: int
    max_grad_norm: float | None
    seed: int
    regularization: Regularization
    torch_threads: int
    """Number of threads with which blocks compute on a CPU."""


class CloseEngine(Message, frozen=True):
    """A worker frees its engine and its planes. It answers `Done`."""


class Train(Message, frozen=True):
    """A worker submits a step. Once it has applied it, it answers `OptimizerStep`."""

    number: int
    shard: StepShard
    learning_rate: float
    skipped: tuple[int, ...]
    """Earlier steps that were taken without an update."""
    has_timeline: bool = False
    """The answer tells when the ops of the step ran."""


class Go(Message, frozen=True):
    """A worker may change the planes: step `number` will be applied."""

    number: int


class DryRun(Message, frozen=True):
    """A worker makes a dry run. It answers `Done`."""

    shard: StepShard


class Evaluate(Message, frozen=True):
    """A worker computes the losses of micro-batches. It answers `Losses`."""

    batches: Sequence[MicroBatch]


class Accompany(Message, frozen=True):
    """A worker takes part in a pass of rank 0 over the units, which are gathered once for
    each of `groups` of micro-batches. It answers `Done`.
    """

    groups: int


class Drain(Message, frozen=True):
    """A worker waits until every submitted step is applied. It answers `Done`."""


class End(Message, frozen=True):
    """A worker is to end, with this exit code."""

    code: int = 0


# ---------------------------------------------------------------- shards elsewhere


class AllocateShards(Message, frozen=True):
    """A worker allocates planes of units that live on the devices. It answers `ShardReply`, as it
    does to the other messages about shards.
    """

    wanted: dict[Key, Wanted]


class AllocateNodeShards(Message, frozen=True):
    """The first rank of a node allocates the node's part of planes, in its RAM."""

    parts: dict[Key, NodeShard]


class ReleaseShards(Message, frozen=True):
    """A worker lets go of planes."""

    keys: tuple[Key, ...]
    in_ram: bool = False
    """Whether they are in the RAM of its node, not on its device."""


class ReadShard(Message, frozen=True):
    """A worker reads the bytes between two places of a plane, as far as it holds the plane. They
    count from the first that it holds on its device, or from the first of a plane in RAM.
    """

    key: Key
    begin: int
    end: int
    in_ram: bool = False
    into: InSharedBuffer | None = None
    """The bytes go there, and not into the answer."""


class WriteShard(Message, frozen=True):
    """A worker writes bytes from the byte `begin` on, which counts as in `ReadShard`. They are
    `content`, uint8 [bytes], or, where that is None, those in `in_buffer`.
    """

    key: Key
    begin: int
    content: np.ndarray | None = None
    in_buffer: InSharedBuffer | None = None
    in_ram: bool = False


ShardMessage: TypeAlias = (
    AllocateShards | AllocateNodeShards | ReleaseShards | ReadShard | WriteShard
)


class ShardReply(Message, frozen=True):
    """What rank 0 has asked of shards is done."""

    content: np.ndarray | None = None
    """Bytes that were asked for, uint8 [bytes]."""


# ---------------------------------------------------------------- from a worker


class Done(Message, frozen=True):
    """What rank 0 has asked for is done."""


class PlanesMade(Message, frozen=True):
    """The planes of a node are there. Its other ranks find them where this says."""

    planes: SharedPlanes


class Timeline(Struct, frozen=True, forbid_unknown_fields=True):
    """The ops of a step ran at these times on a rank, and its COMPUTE lane waited in these. Times
    are those of `time.perf_counter`, a clock that all processes of a machine share.
    """

    ops: Sequence[RanOp]
    waits: Sequence[Wait]


class DeviceMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes that a rank holds of its device, as `Backend.memory` says; zeros on a CPU."""

    allocated: int = 0
    reserved: int = 0
    peak: int = 0
    peak_reserved: int = 0
    in_use: int = 0
    """Bytes of the card that all programs together use."""
    total: int = 0
    host: int = 0
    """Bytes of RAM that the process has for itself; told only on other nodes than that of rank
    0.
    """


class OptimizerStep(Message, frozen=True):
    """All updates of step `number` are in the planes."""

    number: int
    timeline: Timeline | None = None
    """Timeline, where rank 0 has asked for it."""
    memory: DeviceMemory | None = None
    """Memory of the device, about once a second."""


class Losses(Message, frozen=True):
    """These are the losses of the micro-batches that were asked for, in order."""

    totals: tuple[float, ...]
    positions: tuple[np.ndarray, ...]
    """Cross-entropies of the positions with a label, each float32 [n]."""


class Failed(Message, frozen=True):
    """Something went wrong in a worker, which ends now."""

    sentence: str
    """What went wrong, in a sentence that does not name the rank."""
    trace: str
    """The traceback is for the log."""
    by_others: bool = False
    """Whether it could not reach other ranks, one of which may be the cause."""


# ---------------------------------------------------------------- before the first


class Handshake(Message, frozen=True):
    """Identity of a process."""

    place: RankInfo
    host_name: str
    pid: int
    program: str
    """A digest of the program's sources."""
    versions: dict[str, str]
    settings: dict[str, Any]
    """Its command line gives these settings, by dotted name. They are plain data, as in JSON."""
    problem: str = ""
    """Why its command line cannot be used, if so."""


class Welcome(Message, frozen=True):
    """The process may follow."""


class Refused(Message, frozen=True):
    """The process may not follow, and no run is started."""

    sentence: str
