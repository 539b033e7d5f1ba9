"""What one job takes of host memory, GPU memory and disk, item by item. No torch.

The plan is the one that the run will use (`engine.fit.choose`), the planes are what HostStore
allocates, to the byte.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.fit.choose import Chosen, choose, least_choices
from engine.fit.cost import largest_product
from engine.fit.memory_items import MEMORY, Item, MemoryItem, PartName
from engine.fit.predict import predicted_seconds
from engine.machine.known_machines import known_rates
from engine.machine.rates import Rates, stored_cpu_rates, stored_rates
from engine.machine.read_machine import Machine
from engine.model.layout import PLANE_ITEM_BYTES, WEIGHT_PLANES
from engine.model.shape import ModelShape
from engine.paths import resolve_source
from engine.plan.buffers import Word
from engine.words import GIB, MIB, in_gib

TIGHT_SHARE = 0.9
"""Above this share of a limit the verdict is `tight`."""

RUNTIME_BYTES = {"cuda": round(1.9 * GIB), "cpu": 480 * MIB}
"""Of the program with its libraries (measured: docs/performance.md); kernels compile in this
process.
"""
RUNTIME_GROWTH_BYTES = {"cuda": 830 * MIB, "cpu": 64 * MIB}
"""What libraries still load and compile once a run is prepared."""
HOST_MARGIN_BYTES = 256 * MIB
"""Pages of a checkpoint that are written and not yet synced."""
DATA_FACTOR, DATA_LEAST_BYTES, DATA_UNKNOWN_BYTES = 0.05, 32 * MIB, 256 * MIB
"""Some 50 bytes a document stay in memory, a twentieth of the file where documents have 1,000;
tokens stay on disk. Hub data sets have no size before they are loaded.
"""
RECORD_BYTES = 16 * MIB
"""Events, timelines, manifests and tokenizer files of a run."""

PLANE_NOTES = {
    "weight_high": "weights as the device sees them",
    "weight_low": "the rest of the fp32 masters",
    "exp_avg": "AdamW's first moment, fp32",
    "exp_avg_sq": "AdamW's second moment, fp32",
    "grad": "gradients",
}
PART_WORDS = {PartName.HOST: "RAM", PartName.GPU: "GPU memory", PartName.DISK: "disk"}


class Verdict(Word):
    """Whether what is needed fits, from the best answer to the worst. The values stand in records
    of runs.
    """

    FITS = "fits"
    TIGHT = "tight"
    DOES_NOT_FIT = "does_not_fit"


@dataclass(frozen=True)
class Resident:
    """RAM of this program, where it is about to train itself: bytes that it has, its data among
    them, and bytes of libraries that it has yet to load.
    """

    now: int
    to_come: int


@dataclass(frozen=True)
class Part:
    """What one kind of memory must hold. `limit` is None where it is not known, and then not
    judged.
    """

    items: tuple[Item, ...]
    limit: int | None
    least: int | None = None
    """What it would take with the leanest plan, where the plan fills what is free on purpose; else
    None.
    """

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def verdict(self) -> Verdict:
        if self.limit is None:
            return Verdict.FITS
        if self.total > self.limit:
            return Verdict.DOES_NOT_FIT
        needed = self.total if self.least is None else self.least
        return Verdict.FITS if needed <= TIGHT_SHARE * self.limit else Verdict.TIGHT

    def to_dict(self) -> dict[str, Any]:
        return {
            "items": [item.to_dict() for item in self.items],
            "total": self.total,
            "limit": self.limit,
            "least": self.least,
        }


class Needs:
    """Items of host, GPU and disk for one configuration on one machine, and the plan that they
    belong to.

    `chosen`, `rates` and `resident` as `needs_of` has them.
    """

    def __init__(
        self,
        config: TrainConfig,
        machine: Machine,
        shape: ModelShape,
        chosen: Chosen,
        rates: Rates | None,
        resident: Resident | None = None,
    ):
        self.config, self.machine, self.shape, self.chosen, self.rates = (
            config,
            machine,
            shape,
            chosen,
            rates,
        )
        self._resident = resident
        self.device = device_of(config, machine)
        self.parts = {PartName.HOST: Part(self._host(), machine.ram_available)}
        if self.device == "cuda":
            self.parts[PartName.GPU] = Part(chosen.gpu_items, gpu_limit(config, machine))
        self.parts[PartName.DISK] = Part(
            self._disk(), machine.disk_free if machine.disk_path else None
        )

    def compare_with(self, least: Needs, name: PartName) -> None:
        """Judge the part `name` by what the leanest plan would take of it."""
        part = self.parts[name]
        self.parts[name] = replace(part, least=min(part.total, least.parts[name].total))

    def verdict(self, parts: Collection[PartName] | None = None) -> Verdict:
        found = {
            part.verdict for name, part in self.parts.items() if parts is None or name in parts
        }
        return next((v for v in (Verdict.DOES_NOT_FIT, Verdict.TIGHT) if v in found), Verdict.FITS)

    @cached_property
    def step_seconds(self) -> float | None:
        """As the plan's simulation predicts it; None without rates."""
        if self.device == "cpu" and not self.machine.here:
            return None
        return seconds_of(
            self.shape,
            self.chosen,
            self.rates,
            self.config.data.max_seq_len,
            self.device,
            self.config.data.packing,
        )

    def _host(self) -> tuple[Item, ...]:
        shape, item = self.shape, PLANE_ITEM_BYTES[self.shape.dtype]
        program = (
            "Python, torch and CUDA libraries" if self.device == "cuda" else "Python and torch"
        )
        if self._resident is None:
            items = [Item(MemoryItem.RUNTIME, RUNTIME_BYTES[self.device], program)]
        else:
            items = [
                Item(
                    MemoryItem.RUNTIME,
                    self._resident.now,
                    f"{program}, and data: this program as it is",
                ),
                Item(
                    MemoryItem.LIBRARIES,
                    self._resident.to_come,
                    "what is still loaded and compiled as it trains",
                ),
            ]
        items.append(
            Item(MemoryItem.MARGIN, HOST_MARGIN_BYTES, "checkpoint pages on their way to the disk")
        )
        planes = shape.plane_bytes()
        items += [
            Item(MemoryItem(plane), size, f"{PLANE_NOTES[plane]}, {item[plane]} bytes a parameter")
            for plane, size in planes.items()
        ]
        if self.chosen.host_boundary_bytes:
            items.append(
                Item(
                    MemoryItem.HOST_BOUNDARIES,
                    self.chosen.host_boundary_bytes,
                    "inputs of blocks, for backward",
                )
            )
        if self.device == "cpu":
            items += self.chosen.gpu_items
        if self._resident is None:
            items.append(
                Item(MemoryItem.DATA, _data_bytes(self.config), "rows; tokens stay on disk")
            )
        if self.config.model.init == "pretrained":
            weights = sum(size for plane, size in planes.items() if plane in WEIGHT_PLANES)
            loading = weights + shape.parameter_count * shape.item_bytes
            running = sum(planes.values()) + self.chosen.host_boundary_bytes
            items.append(
                Item(
                    MemoryItem.LOADING_PEAK,
                    max(0, loading - running),
                    f"weight planes and one copy of the weights: {in_gib(loading)}"
                    + (", less than training takes" if loading <= running else ""),
                )
            )
        return tuple(items)

    def _disk(self) -> tuple[Item, ...]:
        copies = checkpoints_at_once(self.config)
        items = [
            Item(
                MemoryItem.CHECKPOINTS,
                copies * self.shape.checkpoint_bytes,
                f"{copies} of {in_gib(self.shape.checkpoint_bytes)}, one of them being written",
            )
        ]
        if self.config.output.export:
            items.append(
                Item(
                    MemoryItem.EXPORT,
                    self.shape.export_bytes,
                    f"a Hugging Face folder in {self.shape.dtype}",
                )
            )
        return (
            *items,
            Item(MemoryItem.RECORD, RECORD_BYTES, "events, timelines and tokenizer files"),
        )


def seconds_of(
    shape: ModelShape,
    chosen: Chosen,
    rates: Rates | None,
    row_length: int,
    device: str,
    packed: bool,
) -> float | None:
    """Of a step of full rows by what was chosen, simulated with `rates_of_steps`. None without
    rates.
    """
    rates = rates_of_steps(shape, chosen, rates, row_length, device)
    return rates and predicted_seconds(
        shape, chosen.choices, rates, chosen.micro_batch_size, row_length, device, packed
    )


def rates_of_steps(
    shape: ModelShape, chosen: Chosen, rates: Rates | None, row_length: int, device: str
) -> Rates | None:
    """Those that the times of steps follow. rates: of the machine of a GPU; on the CPU, where no
    choice depends on them, those that were measured here, in float32. None where none are known.
    """
    if device != "cpu":
        return rates
    return (
        stored_cpu_rates(largest_product(shape, chosen.micro_batch_size * row_length))
        if shape.dtype == "float32"
        else None
    )


def needs_of(
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    rounding: Mapping[str, Any] | None = None,
    rates: Rates | None = None,
    quick: bool = False,
    resident: Resident | None = None,
) -> Needs:
    """With the plan that a run would use. `rounding` and `quick` as for `choose`; `rates` are those
    of `rates_of` if none are given. resident: where this program is about to train itself. Raises
    ConfigError for what no machine could run.
    """
    rates = rates or rates_of(config, machine)
    chosen = choose(
        shape,
        config,
        device_of(config, machine),
        gpu_limit(config, machine),
        machine.ram_available,
        config.data.max_seq_len,
        rounding,
        rates,
        machine.here,
        quick,
    )
    needs = Needs(config, machine, shape, chosen, rates, resident)
    tight = [
        name
        for name in MEMORY
        if name in needs.parts and needs.parts[name].verdict == Verdict.TIGHT
    ]
    if tight:
        # The planner fills what is free; that is no reason to warn.
        least = least_needs(config, machine, shape)
        for name in tight:
            needs.compare_with(least, name)
    return needs


def least_needs(config: TrainConfig, machine: Machine, shape: ModelShape) -> Needs:
    """With the plan that takes least: of those with boundaries on the host or on the device, the
    one that fits better.
    """
    found = [Needs(config, machine, shape, lean, None) for lean in _least(config, machine, shape)]
    return min(found, key=lambda needs: tuple(Verdict).index(needs.verdict(MEMORY)))


def _least(config: TrainConfig, machine: Machine, shape: ModelShape) -> tuple[Chosen, ...]:
    return least_choices(
        shape,
        config,
        device_of(config, machine),
        gpu_limit(config, machine),
        machine.ram_available,
        config.data.max_seq_len,
        machine.here,
    )


def device_of(config: TrainConfig, machine: Machine) -> str:
    """Cpu or cuda. Raises ConfigError where a GPU is asked for that is not there."""
    if config.engine.device == "cuda" and not machine.gpus:
        raise ConfigError(
            "engine.device",
            "cuda is asked for but this machine has no CUDA GPU; choose auto or cpu.",
        )
    return "cuda" if machine.gpus and config.engine.device != "cpu" else "cpu"


def gpu_limit(config: TrainConfig, machine: Machine) -> int | None:
    """Bytes of GPU memory that the run may take; None on the CPU."""
    if device_of(config, machine) == "cpu":
        return None
    return config.engine.within_cap(machine.gpus[0].free)


def measured_rates(config: TrainConfig, machine: Machine) -> Rates | None:
    """Those that were measured on this machine and kept; a machine that is only asked about has
    none.
    """
    here = device_of(config, machine) == "cuda" and machine.here
    return stored_rates(machine.gpus[0].name) if here else None


def rates_of(config: TrainConfig, machine: Machine) -> Rates | None:
    """Measured, or else estimated from the card's specification; None for a card that is not known
    and on the CPU.
    """
    if device_of(config, machine) == "cpu":
        return None
    return measured_rates(config, machine) or known_rates(machine)


def checkpoints_at_once(config: TrainConfig) -> int:
    """The most checkpoints that are on the disk at one moment: those kept, and the next one while
    it is written. A run that writes few has fewer; a stop may add one.
    """
    every, steps = config.output.checkpoint_every, config.train.steps
    kept = config.output.keep_checkpoints
    if every == 0:
        return min(kept, 1) + 1
    return min(kept, -(-steps // every)) + 1 if steps is not None else kept + 1


def _data_bytes(config: TrainConfig) -> int:
    total = 0
    for part, weight in config.data.parts():
        path = resolve_source(part.only_source)
        if path is None or not path.is_file():
            total += DATA_UNKNOWN_BYTES
        else:
            total += round(DATA_FACTOR * path.stat().st_size * max(1.0, weight))
    return max(DATA_LEAST_BYTES, total)
