"""A `Requirements` lists the host memory, GPU memory and disk space that one job takes, item by
item. No torch.

The plan is one that `engine.planning.fit.choose` has chosen: the one that the run will use, or for
suggestions and tables the one that takes the least memory. The planes are what `HostStates`
allocates, to the byte.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from engine.config.settings import TrainConfig
from engine.machine.device import device_of, gpu_count, gpu_limit, rates_of, with_link
from engine.machine.disk_rates import with_disk
from engine.machine.primitive_cache import KEPT_BYTES
from engine.machine.rates import Rates
from engine.machine.read_machine import Machine
from engine.paths import resolve_source
from engine.planning.fit.buffer_sizes import (
    disk_rings_bytes,
    host_matrix_bytes,
    plane_items,
    state_bytes,
)
from engine.planning.fit.checkpoint_sizes import best_items, copy_bytes, disk_items
from engine.planning.fit.choose import choose, least_choices
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.device_memory import RUNTIME_BYTES, WORKER_BYTES
from engine.planning.fit.disk_offload import disk_offload_of, disk_offload_room, shares_disk_of_runs
from engine.planning.fit.job import (
    Job,
    Target,
    is_possible,
    nodes_per_replica_options,
    numbers_of_ranks,
)
from engine.planning.fit.memory_items import MEMORY, Item, MemoryItem, PartName
from engine.planning.fit.simulate_step import predicted_seconds, rates_of_steps
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.schedule.buffers import Word
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.read_ahead import most_read_ahead_bytes
from engine.text import MIB, in_gib

TIGHT_SHARE = 0.9
"""Fraction of a limit above which the verdict is `tight`."""

RUNTIME_GROWTH_BYTES = {"cuda": 1130 * MIB, "cpu": 64 * MIB}
"""Further RAM that libraries take after a run is prepared, for loading and compiling."""
HOST_MARGIN_BYTES = 256 * MIB
"""RAM of the pages of a checkpoint or an export that are written but not synced."""
TRACKERS_BYTES = 256 * MIB
"""Most RAM of the process that gives curves to trackers (measured: 217 MiB for TensorBoard, 212 for
MLflow, 97 for Weights & Biases, 64 for Trackio).
"""
DATA_FACTOR = 0.05
"""Memory of the data as a fraction of the data file's size: about 50 bytes per document of 1,000
bytes. Tokens stay on disk.
"""
DATA_LEAST_BYTES = 32 * MIB
DATA_UNKNOWN_BYTES = 256 * MIB
"""Memory that a data set on the Hub is assumed to take, because its size is unknown before it is
loaded.
"""

PART_WORDS = {PartName.HOST: "RAM", PartName.GPU: "GPU memory", PartName.DISK: "disk"}


class FitStatus(Word):
    """A verdict says whether a job fits. The members are ordered from the best to the worst, and
    their values are written to run records.
    """

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True)
class Resident:
    """RAM of this process, for a process that is about to train."""

    now: int
    """Bytes of RAM of the process now, data included."""
    to_come: int
    """Bytes of the libraries that the process has yet to load."""


@dataclass(frozen=True)
class SessionFacts:
    """A session that is about to train has these facts in addition to its settings and its machine.
    All of them are optional.
    """

    rounding: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the session that this one continues (`Job.rounding`)."""
    rates: Rates | None = None
    """Measured rates of the machine; None stands for those of `rates_of`."""
    resident: Resident | None = None
    """RAM of this process if it is the one that will train; None where another process will
    train.
    """
    steps: int | None = None
    """Number of steps of the whole run; None where the data are not known."""
    typical_length: Callable[[Chosen], int] | None = None
    """Returns the length of the rows of a typical step, padding included. Where it is None, all
    rows are taken to be full.
    """
    checkpoints_before: int = 0
    """Number of checkpoints of earlier sessions of the run on the disk."""
    nodes: int = 1
    """Number of nodes like this machine that compute the run."""
    network: float = 0.0
    """Bytes a second that each of them receives from the others; 0 where the rates say it."""


NOTHING_MORE = SessionFacts()
"""No facts, as of a job that is only estimated."""


@dataclass(frozen=True)
class Part:
    """A part says what one kind of memory must hold. `limit` is None where it is not known; such a
    part is not judged.
    """

    items: tuple[Item, ...]
    limit: int | None
    least: int | None = None
    """Bytes that the minimum-memory plan would take; None where the plan does not deliberately fill
    the free memory.
    """

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def known_limit(self) -> int:
        """The limit of a part that has one. Raises ValueError where the limit is not known."""
        if self.limit is None:
            raise ValueError("this part has no limit")
        return self.limit

    @property
    def status(self) -> FitStatus:
        if self.limit is None:
            return FitStatus.FITS
        if self.total > self.limit:
            return FitStatus.DOES_NOT_FIT
        needed = self.total if self.least is None else self.least
        return FitStatus.FITS if needed <= TIGHT_SHARE * self.limit else FitStatus.TIGHT

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that records and the screen use."""
        return {
            "items": [item.to_dict() for item in self.items],
            "total": self.total,
            "limit": self.limit,
            "least": self.least,
        }


class Requirements:
    """Holds the items of host, GPU and disk for one configuration on one machine, and the plan that
    they belong to.

    The `rates` and `resident` of the facts are used as given, also where they are None.
    """

    def __init__(
        self,
        config: TrainConfig,
        machine: Machine,
        shape: ModelShape,
        chosen: Chosen,
        facts: SessionFacts,
    ):
        self.config = config
        self.machine = machine
        self.shape = shape
        self.chosen = chosen
        self.device = device_of(config, machine)
        self._facts = facts
        steps = config.train.steps or facts.steps
        self.disk_offload = disk_offload_of(config, shape, chosen, self.micro_batch, steps)
        """Moments and block inputs on the disk; None where none are."""
        written = disk_items(config, shape, self.checkpoints_before)
        limit = machine.disk_free if machine.disk_path else None
        is_shared = shares_disk_of_runs(config, machine)
        # What is on another drive takes nothing of a limit that is the runs' drive's.
        if self.disk_offload is not None and (is_shared or limit is None):
            which = "freed when the run ends" if is_shared else "on the disk of engine.disk"
            written += tuple(
                Item(each.kind, each.bytes, f"{each.words}; {which}")
                for each in self.disk_offload.kinds
            )
        disk = Part(written, limit)
        best = best_items(config, shape)
        with_best = replace(disk, items=(*written, *best))
        self.keeps_best = bool(best) and with_best.status != FitStatus.DOES_NOT_FIT
        self.lacks_room_for_best = bool(best) and not self.keeps_best
        """Whether the best weights are not kept, since the disk has no room for them beside the
        rest.
        """
        if self.keeps_best:
            disk = with_best
        self.parts = {PartName.HOST: Part(self._host(), machine.ram_available)}
        if self.device == "cuda":
            limit = gpu_limit(config, machine, self.ranks)
            self.parts[PartName.GPU] = Part(chosen.gpu_items, limit)
        self.parts[PartName.DISK] = disk

    def compare_with(self, least: Requirements, name: PartName) -> None:
        """Makes the verdict on the part `name` depend on what the minimum-memory plan would take
        of it.
        """
        part = self.parts[name]
        self.parts[name] = replace(part, least=min(part.total, least.parts[name].total))

    def status(self, parts: Collection[PartName] | None = None) -> FitStatus:
        """Returns the worst verdict among these parts, by default among all."""
        found = {part.status for name, part in self.parts.items() if parts is None or name in parts}
        for bad in (FitStatus.DOES_NOT_FIT, FitStatus.TIGHT):
            if bad in found:
                return bad
        return FitStatus.FITS

    @cached_property
    def step_seconds(self) -> float | None:
        """Seconds of a typical step, as the plan's simulation predicts them; None without rates."""
        if self.device == "cpu" and not self.machine.here:
            return None
        shape, row_length = self.shape, self.config.row_tokens
        rows = self.chosen.micro_batch_size
        rates = rates_of_steps(shape, rows, self._facts.rates, row_length, self.device)
        if rates is None:
            return None
        choices, rates = self.chosen.choices, with_disk(rates, self.config)
        return predicted_seconds(shape, choices, rates, self.micro_batch, self.device)

    @property
    def ranks(self) -> int:
        """Number of ranks on a node. The GPU memory is that of each."""
        return self.chosen.choices.sharding.ranks_per_node

    @property
    def nodes(self) -> int:
        """Number of nodes. The RAM is that of each."""
        return self.chosen.choices.sharding.node_count

    @property
    def micro_batch(self) -> MicroBatch:
        """The micro-batches of a typical step."""
        varlen = self.shape.varlen(self.config.packs, self.device)
        rows = MicroBatch(self.chosen.micro_batch_size, self.step_length, varlen)
        return rows.learning(self.config.objective, self.chosen.loss_chunk)

    @property
    def checkpoints_before(self) -> int:
        """Number of checkpoints of earlier sessions on the disk."""
        return self._facts.checkpoints_before

    @property
    def step_length(self) -> int:
        """The length of the rows of a typical step, padding included."""
        typical = self._facts.typical_length
        return self.config.row_tokens if typical is None else typical(self.chosen)

    def _host(self) -> tuple[Item, ...]:
        """Returns the items of RAM, first those that every run needs and last those that choices
        add.
        """
        resident = self._facts.resident
        items = self._program(resident)
        if self.device == "cpu" and self.shape.dtype == "bfloat16":
            words = "for products in bf16 of the latest shapes"
            items.append(Item(MemoryItem.KERNELS, self.ranks * KEPT_BYTES, words))
        output = self.config.output
        if output.checkpoint != "none" or output.export or self.keeps_best:
            words = "pages of checkpoint or export on their way to the disk"
            items.append(Item(MemoryItem.MARGIN, HOST_MARGIN_BYTES, words))
        items += plane_items(self.shape, self.chosen.choices)
        matrix = host_matrix_bytes(self.shape, self.device)
        if matrix:
            words = "the largest matrix, while the CPU updates it"
            items.append(Item(MemoryItem.UPDATED_MATRIX, matrix, words))
        items += self._block_inputs()
        if self.device == "cpu":
            for item in self.chosen.gpu_items:
                items.append(replace(item, bytes=self.ranks * item.bytes))
        if resident is None:
            items.append(
                Item(MemoryItem.DATA, _data_bytes(self.config), "rows; tokens stay on disk")
            )
        if output.trackers:
            words = "a process of its own, which gives them the curves"
            items.append(Item(MemoryItem.TRACKERS, TRACKERS_BYTES, words))
        if self.config.model.init == "pretrained":
            items.append(self._loading_peak())
        taken = sum(item.bytes for item in items)
        copies = copy_bytes(
            self.config, self.shape, taken, self.machine.ram_available, self.keeps_best
        )
        if copies:
            note = (
                "copies of weights and moments, so that steps go on while a checkpoint is written"
            )
            items.append(Item(MemoryItem.STAGING_BUFFERS, copies, note))
        return tuple(items)

    def _block_inputs(self) -> list[Item]:
        """Returns the items of block inputs in RAM, and of what those on the disk pass through."""
        full = self.chosen.micro_batch_size * self.config.row_tokens
        rings = disk_rings_bytes(self.shape, self.chosen.choices, full)
        kept, words = self.chosen.offloaded_input_bytes - rings, "inputs of blocks, for backward"
        if self.chosen.choices.activations.attention_blocks:
            words += (
                f"; {self.chosen.choices.activations.attention_blocks} with the result of attention"
            )
        passing = "inputs of blocks, on their way to the disk and back"
        both = (MemoryItem.HOST_BLOCK_INPUTS, kept, words), (MemoryItem.DISK_RINGS, rings, passing)
        return [Item(*values) for values in both if values[1]]

    def _program(self, resident: Resident | None) -> list[Item]:
        """Returns the items that the program itself takes."""
        words = "Python, torch and CUDA libraries" if self.device == "cuda" else "Python and torch"
        others = (self.ranks - 1) * WORKER_BYTES[self.device]
        if others:
            words += f" in {self.ranks} processes"
        if resident is None:
            return [Item(MemoryItem.RUNTIME, RUNTIME_BYTES[self.device] + others, words)]
        words = f"{words}, and data: this program as it is"
        return [
            Item(MemoryItem.RUNTIME, resident.now + others, words),
            Item(
                MemoryItem.LIBRARIES,
                resident.to_come,
                "what is still loaded and compiled as it trains",
            ),
        ]

    def _loading_peak(self) -> Item:
        """Returns the memory that reading weights takes beyond that of training."""
        shape = self.shape
        planes = shape.states.plane_bytes(self.chosen.choices.placement.gpu_resident_units)
        weights = sum(size for plane, size in planes.items() if plane in WEIGHT_PLANES)
        weights //= self.chosen.choices.sharding.nodes_per_replica
        ahead = most_read_ahead_bytes(shape.read_ahead_numel)
        loading = weights + ahead
        running = state_bytes(shape, self.chosen.choices) + self.chosen.offloaded_input_bytes
        running += host_matrix_bytes(shape, self.device)
        note = f"weight planes, and at most {in_gib(ahead)} read ahead of them: {in_gib(loading)}"
        if loading <= running:
            note += ", less than training takes"
        return Item(MemoryItem.LOADING_PEAK, max(0, loading - running), note)


def requirements_of(
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    facts: SessionFacts = NOTHING_MORE,
    coarse: bool = False,
) -> Requirements:
    """Returns the requirements of a job with the plan that a run would use. Raises ConfigError for
    what no machine could run.

    coarse: as for `choose`.
    """
    shape = shape.with_optimizer(config.train.optimizer)
    known = facts.rates
    rates = rates_of(config, machine) if known is None else with_link(known, machine)
    if rates is not None and facts.network:
        rates = replace(rates, network=facts.network)
    job = Job(shape, config, config.row_tokens, facts.rounding, nodes=facts.nodes)
    facts = replace(facts, rates=rates)
    on_ranks = _on_ranks(job, machine, rates)
    found = [
        Requirements(config, machine, shape, choose(each, target, coarse), facts)
        for each, target in on_ranks
    ]
    requirements = min(found, key=_slowness)
    if requirements.status(MEMORY) == FitStatus.DOES_NOT_FIT and not coarse:
        # The planner looks at what steps take. What loading takes besides may need a smaller plan.
        found = [
            Requirements(config, machine, shape, chosen, facts)
            for each, target in on_ranks
            for chosen in least_choices(each, target)
        ]
        requirements = min(requirements, *found, key=_slowness)
    tight = [
        name
        for name in MEMORY
        if name in requirements.parts and requirements.parts[name].status == FitStatus.TIGHT
    ]
    if tight:
        # The planner fills the free memory, which is not a reason for a warning.
        alike = config.with_values({"engine.gpus": requirements.ranks})
        least = minimum_requirements(alike, machine, shape, nodes=facts.nodes)
        for name in tight:
            requirements.compare_with(least, name)
    return requirements


def minimum_requirements(
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    checkpoints_before: int = 0,
    nodes: int = 1,
) -> Requirements:
    """Returns the needs of a job with the minimum-memory plan. Of the plans with block inputs on
    the host and on the device, it is the one that fits better. `checkpoints_before` and `nodes` are
    as in `SessionFacts`.
    """
    shape = shape.with_optimizer(config.train.optimizer)
    job = Job(shape, config, config.row_tokens, nodes=nodes)
    found_choices: list[Chosen] = []
    for each, target in _on_ranks(job, machine, None):
        found_choices += least_choices(each, target)
    facts = SessionFacts(checkpoints_before=checkpoints_before)
    found = [Requirements(config, machine, shape, minimum, facts) for minimum in found_choices]
    return min(found, key=lambda requirements: tuple(FitStatus).index(requirements.status(MEMORY)))


def _on_ranks(job: Job, machine: Machine, rates: Rates | None) -> list[tuple[Job, Target]]:
    """Returns the job on each number of ranks that may compute its steps, with its target. Settings
    that contradict a number of several leave it out where there are others.
    """
    config = job.config
    found = []
    numbers = numbers_of_ranks(config, gpu_count(config, machine), job.rounding)
    options = nodes_per_replica_options(config, job.nodes, job.rounding)
    for ranks, nodes_per_replica in itertools.product(numbers, options):
        on_ranks = replace(job, ranks=ranks, nodes_per_replica=nodes_per_replica)
        may_be_one = numbers[0] == 1
        if ranks > 1 and may_be_one and not is_possible(on_ranks):
            continue
        target = Target(
            device=device_of(config, machine),
            gpu_limit=gpu_limit(config, machine, ranks),
            host_free=machine.ram_available,
            rates=rates,
            disk_free=disk_offload_room(config, machine),
            here=machine.here,
        )
        found.append((on_ranks, target))
    return found


def _slowness(requirements: Requirements) -> tuple[bool, float, float]:
    """Orders the same job on several numbers of ranks: those that fit, the fastest first, and then
    all others, which take less RAM with fewer ranks, and with planes that are divided among nodes.
    """
    if requirements.status(MEMORY) == FitStatus.DOES_NOT_FIT:
        return True, requirements.ranks, 1 / requirements.chosen.choices.sharding.nodes_per_replica
    return (
        False,
        requirements.step_seconds or math.inf,
        requirements.chosen.choices.sharding.nodes_per_replica,
    )


def _data_bytes(config: TrainConfig) -> int:
    """Returns the bytes of memory that the data take, estimated from the sizes of their files."""
    total = 0
    for part, weight in config.data.parts():
        path = resolve_source(part.only_source)
        if path is None or not path.is_file():
            total += DATA_UNKNOWN_BYTES
        else:
            total += round(DATA_FACTOR * path.stat().st_size * max(1.0, weight))
    return max(DATA_LEAST_BYTES, total)
