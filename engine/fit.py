"""Will it fit? Host memory, GPU memory and disk of a run, item by item, with a verdict, reasons and remedies.

The plan is the one that the run will use (`engine.choose`), the planes are what HostStore allocates, to the byte. No
torch here; a model whose shape is not given is built on the meta device by `engine.shape`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from engine.choose import Chosen, choose
from engine.sizes import Item
from engine.config import AUTO, TrainConfig
from engine.cost import Rates
from engine.errors import ConfigError
from engine.layout import PLANE_ITEM_BYTES
from engine.machine import Machine
from engine.paths import resolve_source
from engine.predict import predicted_seconds
from engine.rates import stored_rates
from engine.shape import ModelShape, shape_from_source

GIB = 1 << 30
MIB = 1 << 20

TIGHT = 0.9
"""Above this share of a limit the verdict is `tight`."""

RUNTIME_BYTES = {"cuda": round(1.2 * GIB), "cpu": round(0.8 * GIB)}
HOST_MARGIN_BYTES = 256 * MIB
"""Pages of a checkpoint that are written and not yet synced."""
DATA_FACTOR, DATA_LEAST_BYTES, DATA_UNKNOWN_BYTES = 0.05, 32 * MIB, 256 * MIB
"""Some 50 bytes a document stay in memory, a twentieth of the file where documents have 1,000; tokens stay on disk. Hub
data sets have no size before they are loaded."""
RECORD_BYTES = 16 * MIB
"""Events, timelines, manifests and tokenizer files of a run."""

PLANE_NOTES = {
    "weight_high": "weights as the device sees them", "weight_low": "the rest of the fp32 masters",
    "exp_avg": "AdamW's first moment, fp32", "exp_avg_sq": "AdamW's second moment, fp32", "grad": "gradients",
}
FLOPS_FORMULA = "6 x parameters that a token passes through x tokens of full rows; recompute not counted"

FITS, TIGHT_VERDICT, DOES_NOT_FIT = "fits", "tight", "does_not_fit"
WORDS = {FITS: "fits", TIGHT_VERDICT: "fits, but only just", DOES_NOT_FIT: "does not fit"}
PART_WORDS = {"host": "RAM", "gpu": "GPU memory", "disk": "disk"}
SHORTEST_ROW, MOST_ROUNDS = 64, 8
"""Remedies do not go beyond these."""


@dataclass(frozen=True)
class Part:
    """What one kind of memory must hold. `limit` is None where it is not known, and then not judged."""

    items: tuple[Item, ...]
    limit: int | None

    @property
    def total(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def verdict(self) -> str:
        if self.limit is None or self.total <= TIGHT * self.limit:
            return FITS
        return TIGHT_VERDICT if self.total <= self.limit else DOES_NOT_FIT

    def to_dict(self) -> dict[str, Any]:
        return {"items": [asdict(item) for item in self.items], "total": self.total, "limit": self.limit}


@dataclass(frozen=True)
class Remedy:
    """A change of settings that makes the job fit; `text` says what it is and what it comes to."""

    text: str
    changes: dict[str, Any]


@dataclass(frozen=True)
class FitReport:
    """`estimate`'s answer. Bytes throughout; `gpu` is None where blocks compute on the CPU."""

    verdict: str
    headline: str
    reasons: tuple[str, ...]
    remedies: tuple[Remedy, ...]
    host: Part
    gpu: Part | None
    disk: Part
    model: dict[str, Any]
    choices: dict[str, Any]
    time: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as the record and the screen take it."""
        return {"verdict": self.verdict, "headline": self.headline, "reasons": list(self.reasons),
                "remedies": [asdict(remedy) for remedy in self.remedies], "host": self.host.to_dict(),
                "gpu": self.gpu.to_dict() if self.gpu is not None else None, "disk": self.disk.to_dict(),
                "model": self.model, "choices": self.choices, "time": self.time}


def estimate(config: TrainConfig, machine: Machine, shape: ModelShape | None = None,
             rounding: Mapping[str, Any] | None = None, rates: Rates | None = None) -> FitReport:
    """The report for `config` on `machine`; `rounding` and `rates` as for `choose`, the latter those that are kept if none
    are given. Raises ModelError or ConfigError for what no
    machine could run."""
    if shape is None:
        shape = shape_from_source(config.model)
    sizes = _Sizes(config, machine, shape, rounding, rates)
    tokens = config.train.batch_size * config.data.max_seq_len
    verdict = sizes.verdict()
    remedies = tuple(_remedies(config, machine, shape, sizes)) if verdict != FITS else ()
    return FitReport(
        verdict=verdict, headline=_headline(sizes, verdict), reasons=tuple(_reasons(sizes, bool(remedies))),
        remedies=remedies, host=sizes.parts["host"], gpu=sizes.parts.get("gpu"), disk=sizes.parts["disk"],
        model={"parameters": shape.parameter_count, "active_parameters": shape.active_parameters,
               "blocks": len(shape.blocks), "model_type": shape.model_type, "source": config.model.source,
               "dtype": config.model.dtype},
        choices={"device": sizes.device, "micro_batch_size": sizes.chosen.micro_batch_size,
                 "loss_chunk": sizes.chosen.loss_chunk, **sizes.chosen.choices.to_dict()},
        time={"tokens_per_step": tokens, "flops_per_step": 6 * shape.active_parameters * tokens,
              "formula": FLOPS_FORMULA, "step_seconds": sizes.step_seconds()})


def in_gib(count: float) -> str:
    """12.3 GiB; 312 MiB or 4 KiB for what is smaller."""
    if abs(count) >= GIB:
        return f"{count / GIB:,.1f} GiB"
    return f"{count / MIB:,.0f} MiB" if abs(count) >= MIB else f"{count / 1024:,.0f} KiB"


# ---------------------------------------------------------------------- what it takes

class _Sizes:
    """Items of host, GPU and disk for one configuration, and the plan that they belong to."""

    def __init__(self, config: TrainConfig, machine: Machine, shape: ModelShape,
                 rounding: Mapping[str, Any] | None = None, rates: Rates | None = None):
        self.config, self.machine = config, machine
        self.shape = shape if shape.dtype == config.model.dtype else shape.in_dtype(config.model.dtype)
        self.device = _device(config, machine)
        limit = machine.gpus[0].free if self.device == "cuda" else None
        self.cap = config.engine.gpu_memory_gib
        if limit is not None and self.cap is not None:
            limit = min(limit, round(self.cap * GIB))
        # Those of a machine that is only asked about are not known.
        here = self.device == "cuda" and bool(machine.disk_path)
        self.rates = rates or (stored_rates(machine.gpus[0].name) if here else None)
        self.chosen: Chosen = choose(self.shape, config, self.device, limit, machine.ram_available,
                                     config.data.max_seq_len, rounding, self.rates)
        self.parts = {"host": Part(self._host(), machine.ram_available)}
        if limit is not None:
            self.parts["gpu"] = Part(self.chosen.gpu_items, limit)
        self.parts["disk"] = Part(self._disk(), machine.disk_free if machine.disk_path else None)

    def verdict(self, parts: tuple[str, ...] | None = None) -> str:
        found = {part.verdict for name, part in self.parts.items() if parts is None or name in parts}
        return next((v for v in (DOES_NOT_FIT, TIGHT_VERDICT) if v in found), FITS)

    def step_seconds(self) -> float | None:
        """As the plan's simulation predicts it, where this machine was measured."""
        if self.rates is None:
            return None
        return predicted_seconds(self.shape, self.chosen.choices, self.rates, self.chosen.micro_batch_size,
                                 self.config.data.max_seq_len, self.device)

    def _host(self) -> tuple[Item, ...]:
        shape, item = self.shape, PLANE_ITEM_BYTES[self.shape.dtype]
        items = [Item("Runtime", RUNTIME_BYTES[self.device], "Python, torch and CUDA libraries" if self.device == "cuda"
                      else "Python and torch"),
                 Item("Margin", HOST_MARGIN_BYTES, "checkpoint pages on their way to the disk")]
        planes = shape.plane_bytes()
        items += [Item(plane, size, f"{PLANE_NOTES[plane]}, {item[plane]} bytes a parameter")
                  for plane, size in planes.items()]
        if self.chosen.host_boundary_bytes:
            items.append(Item("Boundaries on the host", self.chosen.host_boundary_bytes, "inputs of blocks, for backward"))
        if self.device == "cpu":
            items += self.chosen.gpu_items
        items.append(Item("Tokenised data", _data_bytes(self.config), "rows; tokens stay on disk"))
        if self.config.model.init == "pretrained":
            weights = sum(size for plane, size in planes.items() if plane.startswith("weight"))
            loading = weights + shape.parameter_count * shape.item_bytes
            running = sum(planes.values()) + self.chosen.host_boundary_bytes
            items.append(Item("Loading peak", max(0, loading - running),
                              f"weight planes and one copy of the weights: {in_gib(loading)}"
                              + (", less than training takes" if loading <= running else "")))
        return tuple(items)

    def _disk(self) -> tuple[Item, ...]:
        copies = checkpoints_at_once(self.config)
        items = [Item("Checkpoints", copies * self.shape.checkpoint_bytes,
                      f"{copies} of {in_gib(self.shape.checkpoint_bytes)}, one of them being written")]
        if self.config.output.export:
            items.append(Item("Export", self.shape.export_bytes, f"a Hugging Face folder in {self.shape.dtype}"))
        return (*items, Item("Record", RECORD_BYTES, "events, timelines and tokenizer files"))


def checkpoints_at_once(config: TrainConfig) -> int:
    """The most checkpoints that are on the disk at one moment: those kept, and the next one while it is written. A run
    that writes few has fewer; a stop may add one."""
    every, steps = config.output.checkpoint_every, config.train.steps
    kept = config.output.keep_checkpoints
    if every == 0:
        return min(kept, 1) + 1
    return min(kept, -(-steps // every)) + 1 if steps is not None else kept + 1


def _device(config: TrainConfig, machine: Machine) -> str:
    if config.engine.device == "cuda" and not machine.gpus:
        raise ConfigError("engine.device", "cuda is asked for but this machine has no CUDA GPU; choose auto or cpu.")
    return "cuda" if machine.gpus and config.engine.device != "cpu" else "cpu"


def _data_bytes(config: TrainConfig) -> int:
    total = 0
    for part, weight in config.data.parts():
        path = resolve_source(part.source)
        if path is None or not path.is_file():
            total += DATA_UNKNOWN_BYTES
        else:
            total += round(DATA_FACTOR * path.stat().st_size * max(1.0, weight))
    return max(DATA_LEAST_BYTES, total)


# ---------------------------------------------------------------------- words

def _headline(sizes: _Sizes, verdict: str) -> str:
    needs = []
    for name, part in sizes.parts.items():
        limit = "" if part.limit is None else f" ({in_gib(part.limit)} free)"
        needs.append(f"{in_gib(part.total)} of {PART_WORDS[name]}{limit}")
    return f"Needs {', '.join(needs[:-1])} and {needs[-1]}: {WORDS[verdict]}."


def _reasons(sizes: _Sizes, helped: bool) -> list[str]:
    failing = [name for name, part in sizes.parts.items() if part.verdict == DOES_NOT_FIT]
    reasons = []
    for name in failing:
        part = sizes.parts[name]
        reasons.append(f"{_capital(PART_WORDS[name])}: {in_gib(part.total)} needed, {in_gib(part.limit)} free, "
                       f"{in_gib(part.total - part.limit)} too few; {_breaking(part)}.")
    if failing and not helped:
        least = " and ".join(f"{in_gib(sizes.parts[name].total)} of {PART_WORDS[name]}" for name in failing)
        reasons.append(f"No change of settings was found that makes it fit: it takes {least}, or a smaller model.")
    for name, part in sizes.parts.items():
        if part.verdict == TIGHT_VERDICT:
            largest = max(part.items, key=lambda item: item.bytes)
            reasons.append(f"{_capital(PART_WORDS[name])} is {100 * part.total / part.limit:.0f} % full, mostly with "
                           f"{largest.name} ({in_gib(largest.bytes)}).")
    known, length = sizes.shape.max_position_embeddings, sizes.config.data.max_seq_len
    if known is not None and length > known:
        reasons.append(f"data.max_seq_len {length} is beyond the {known} positions that this model was trained for.")
    if sizes.cap is not None and sizes.device == "cuda" and sizes.cap * GIB > sizes.machine.gpus[0].free:
        reasons.append(f"engine.gpu_memory_gib {sizes.cap:g} is more than the {in_gib(sizes.machine.gpus[0].free)} free on "
                       f"the {sizes.machine.gpus[0].name}; the plan uses what is free.")
    return reasons


def _breaking(part: Part) -> str:
    """Items stand from what every run needs to what choices add; the one that crosses the limit is named."""
    overhead = ("Runtime", "Margin", "CUDA context", "Allocator slack")
    filled = sum(item.bytes for item in part.items if item.name in overhead)
    if filled > part.limit:
        return "the program alone takes more"
    for item in part.items:
        if item.name not in overhead:
            filled += item.bytes
            if filled > part.limit:
                break
    return f"{item.name} ({in_gib(item.bytes)}) is what no longer fits"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


# ---------------------------------------------------------------------- remedies

def _remedies(config: TrainConfig, machine: Machine, shape: ModelShape, sizes: _Sizes) -> list[Remedy]:
    """Changes that were estimated again and found to fit, the smallest first; of each kind, the least that does."""
    wanted = (FITS,) if sizes.verdict() == TIGHT_VERDICT else (FITS, TIGHT_VERDICT)
    bad = tuple(name for name, part in sizes.parts.items() if part.verdict not in wanted)

    def tried(changes: dict[str, Any], parts: tuple[str, ...] | None = None) -> _Sizes | None:
        try:
            result = _Sizes(config.with_values(changes), machine, shape)
        except ConfigError:  # a change that contradicts another setting is no remedy
            return None
        return result if result.verdict(parts) in wanted else None

    remedies, fixes = [], {}
    for kinds, options in _candidates(config, sizes):
        if not set(kinds) & set(bad):
            continue
        # Where it fits already, though only just, nobody wants to hear of rows an eighth as long.
        for text, changes in options[:2] if wanted == (FITS,) else options:
            result = tried(changes)
            if result is not None:
                remedies.append(Remedy(f"{text}: {_outcome(result, bad)}", changes))
                break
            better = [name for name in bad if name not in fixes and tried(changes, (name,)) is not None]
            if better and len(bad) > 1:
                fixes |= {name: (text, changes) for name in better}
                break
    if not remedies and set(fixes) == set(bad):
        merged = {key: value for _, changes in fixes.values() for key, value in changes.items()}
        result = tried(merged)
        if result is not None:
            steps = list(dict.fromkeys(text for text, _ in fixes.values()))
            remedies.append(Remedy(f"{steps[0]}, and {', and '.join(_lower(t) for t in steps[1:])}: "
                                   f"{_outcome(result, bad)}", merged))
    return remedies


def _candidates(config: TrainConfig, sizes: _Sizes) -> list[tuple[tuple[str, ...], list[tuple[str, dict[str, Any]]]]]:
    """Kinds of change from the smallest on: (parts that it can help, its options from the least on)."""
    t, e, o, memory = config.train, config.engine, config.output, ("host", "gpu")
    found = [(("disk",), [(f"Keep {keep} checkpoint{'s' if keep > 1 else ''} instead of {o.keep_checkpoints}",
                           {"output.keep_checkpoints": keep}) for keep in range(o.keep_checkpoints - 1, 0, -1)])]
    if o.export:
        found.append((("disk",), [("Export later, not when the run ends", {"output.export": False})]))
    for name in ("slots", "residency", "save_level", "rounds"):
        if getattr(e, name) != AUTO:
            found.append((memory, [(f"Set engine.{name} to auto", {f"engine.{name}": AUTO})]))
    if sizes.cap is not None:
        found.append((("gpu",), [("Use all GPU memory that is free", {"engine.gpu_memory_gib": None})]))
    if e.save_level != "boundary_host" and sizes.device == "cuda":
        found.append((("gpu",), [("Keep boundaries on the host", {"engine.save_level": "boundary_host"})]))
    size = sizes.chosen.micro_batch_size
    found.append((("gpu" if sizes.device == "cuda" else "host",),
                  [(f"Lower train.micro_batch_size from {size} to {less}", {"train.micro_batch_size": less})
                   for less in range(size - 1, 0, -1) if t.batch_size % less == 0]))
    rounds = sizes.chosen.choices.rounds
    found.append((memory, [(f"Spread a step over {more} rounds", {"engine.rounds": more})
                           for more in range(rounds + 1, MOST_ROUNDS + 1) if t.batch_size % more == 0]))
    found.append((memory, [(f"Lower train.batch_size from {t.batch_size} to {rows}", _fewer_rows(config, rows))
                           for rows in _halves(t.batch_size, 1)]))
    length = config.data.max_seq_len
    found.append((memory, [(f"Shorten data.max_seq_len from {length} to {less}", {"data.max_seq_len": less})
                           for less in _halves(length, SHORTEST_ROW)]))
    if config.model.dtype == "float32":
        found.append((("host", "gpu", "disk"), [("Compute in bfloat16", {"model.dtype": "bfloat16"})]))
    return found


def _halves(value: int, least: int) -> list[int]:
    found = []
    while value // 2 >= least:
        value //= 2
        found.append(value)
    return found


def _fewer_rows(config: TrainConfig, rows: int) -> dict[str, Any]:
    changes: dict[str, Any] = {"train.batch_size": rows}
    size = config.train.micro_batch_size
    if size != AUTO and rows % size:
        changes["train.micro_batch_size"] = AUTO
    return changes


def _outcome(sizes: _Sizes, names: tuple[str, ...]) -> str:
    outcome = ", ".join(f"{in_gib(part.total)} of {in_gib(part.limit)} {PART_WORDS[name]}"
                        for name, part in sizes.parts.items() if name in names)
    if sizes.chosen.choices.gradient_sum == "host" and sizes.shape.dtype == "bfloat16":
        outcome += " (gradients are rounded to bf16 once a round)"
    return outcome


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
