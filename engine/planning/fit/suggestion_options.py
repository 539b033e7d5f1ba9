"""`groups_of_kinds` lists the changes of settings that may make a job fit, in the order of what
they cost. `suggestions_for` tries them. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.optimizers import OPTIMIZERS
from engine.config.output_settings import OutputConfig
from engine.config.settings import AUTO, TrainConfig
from engine.planning.fit.disk_offload import offered_folder
from engine.planning.fit.exactness import Exactness
from engine.planning.fit.memory_items import MEMORY, MemoryItem, PartName
from engine.planning.fit.requirements import FitStatus, Requirements
from engine.text import counted

SHORTEST_ROW, MOST_ROUNDS = 64, 8
"""Shortest rows and most rounds that suggestions propose."""

METHOD = "train.method"
"""Setting whose change trains adapters instead of all weights."""

Changes = dict[str, Any]
"""New values of settings, by name."""


@dataclass(frozen=True)
class Option:
    """An option is a change of settings that may help, with its description."""

    text: str
    changes: Changes
    exactness: tuple[Exactness, ...] = (Exactness.SAME_BITS,)
    """What the changes do to results, in the order of the kinds."""


@dataclass(frozen=True)
class Kind:
    """A kind of change, such as fewer rows, has options that are ordered from the smallest."""

    helps: tuple[PartName, ...]
    """Parts of memory that this kind of change can help."""
    options: list[Option]
    is_graded: bool = True
    """Whether later options change more than earlier ones."""


def groups_of_kinds(requirements: Requirements) -> list[list[Kind]]:
    """Returns the kinds of change, in groups. Those of a group stand in the order of what they
    cost. A later group is for a job that no earlier one helps: each of its changes, but for those
    of the disk, also leaves to the planner what the settings forbid it, and in the last group also
    keeps moments in 8 bits.
    """
    disk = _kinds_of_disk(requirements)
    steps = _kinds_of_steps(requirements)
    groups = [[*disk, *_kinds_of_places(requirements), *steps]]
    automatic = _left_to_planner(requirements.config)
    smaller = _smaller_moments(requirements.config)
    bases = [[automatic]] if automatic is not None else []
    if smaller:
        bases.append([*bases[0], smaller[-1]] if bases else [smaller[-1]])
    more = [[*disk, *_together_with(all_together(base), steps)] for base in bases]
    return [*groups, *more]


def all_together(options: Sequence[Option]) -> Option:
    """Returns all these changes as one option."""
    changes: Changes = {}
    for option in options:
        changes |= option.changes
    first, *others = [option.text for option in options]
    more = [f", and {text[0].lower()}{text[1:]}" for text in others]
    found = {kind for option in options for kind in option.exactness}
    if len(found) > 1:
        found.discard(Exactness.SAME_BITS)
    kinds = tuple(kind for kind in Exactness if kind in found)
    return Option("".join([first, *more]), changes, kinds)


def _together_with(base: Option, kinds: Sequence[Kind]) -> list[Kind]:
    """Returns the base alone, and then each kind with the base. An option whose changes the base
    has already is left out.
    """
    found = [Kind(MEMORY, [base])]
    for kind in kinds:
        options = [
            all_together([base, option])
            for option in kind.options
            if not set(option.changes) & set(base.changes)
        ]
        found.append(Kind(tuple(PartName), options))
    return found


# ---------------------------------------------------------------------- the disk


def _kinds_of_disk(requirements: Requirements) -> list[Kind]:
    """Returns the kinds of change in what is written."""
    output = requirements.config.output
    fewer = [
        Option(
            f"Keep {counted(keep, 'checkpoint')} instead of {output.keep_checkpoints}",
            {"output.keep_checkpoints": keep},
        )
        for keep in range(output.keep_checkpoints - 1, 0, -1)
    ]
    found = [Kind((PartName.DISK,), fewer)]
    if any(item.kind == MemoryItem.BEST for item in requirements.parts[PartName.DISK].items):
        without = Option(
            "Do not keep the best weights; the last are exported", {"output.keep_best": "none"}
        )
        found.append(Kind((PartName.DISK,), [without]))
    if output.export:
        later = Option("Export later, not when the run ends", {"output.export": False})
        found.append(Kind((PartName.DISK,), [later]))
    return [*found, Kind((PartName.DISK,), _less_written(output))]


def _less_written(output: OutputConfig) -> list[Option]:
    """Returns the changes in which checkpoints a run writes. What loses least comes first; each
    takes less of the disk than the one before it.
    """
    at_end: Changes = {"output.checkpoint_every": 0} if output.checkpoint_every else {}
    later: Changes = {"output.export": False} if output.export else {}
    found: list[Option] = []
    if output.checkpoint == "none":
        return found
    once = "Write one checkpoint, at the end"
    if at_end:
        found.append(Option(once, at_end))
        if later:
            found.append(Option(f"{once}, and export later", at_end | later))
    if output.checkpoint == "full":
        weights: Changes = {"output.checkpoint": "weights"}
        lost = "no run is resumed from them"
        words = f"Keep weights alone in checkpoints; {lost}"
        found.append(Option(words, weights))
        if at_end:
            words = f"Write weights alone, once at the end; {lost}"
            found.append(Option(words, weights | at_end))
        if later:
            words = f"Write weights alone, once at the end, and export later; {lost}"
            found.append(Option(words, weights | at_end | later))
    exported: Changes = {} if output.export else {"output.export": True}
    words = "Write no checkpoint, only the export at the end; nothing of a run that stops is kept"
    return [*found, Option(words, {"output.checkpoint": "none"} | exported)]


# ---------------------------------------------------------------------- places


def _kinds_of_places(requirements: Requirements) -> list[Kind]:
    """Returns the kinds of change in what is kept in memory, and where. They change speed, and with
    `rounds` the order of sums. `auto` keeps gradients on the GPU and offloads no block inputs where
    there is room by itself, so these are for settings that forbid it.
    """
    engine = requirements.config.engine
    found: list[Kind] = []
    if engine.gradients == "host" and requirements.device == "cuda":
        kept_gradients = Option(
            "Keep gradients on the GPU until they are applied", {"engine.gradients": "gpu"}
        )
        found.append(Kind((PartName.HOST,), [kept_gradients]))
    elif engine.gradients != AUTO:
        found.append(Kind(MEMORY, [_set_to_auto("gradients")]))
    if engine.activation_checkpointing != AUTO:
        found.append(Kind(MEMORY, _other_block_input_places(requirements), is_graded=False))
    found += [
        Kind(MEMORY, [_set_to_auto(name)])
        for name in ("slots", "blocks_kept_in_slots", "states")
        if getattr(engine, name) != AUTO
    ]
    if engine.gpu_memory_gib is not None:
        all_free = Option("Use all GPU memory that is free", {"engine.gpu_memory_gib": None})
        found.append(Kind((PartName.GPU,), [all_free]))
    if engine.rounds != AUTO:
        found.append(Kind(MEMORY, [_set_to_auto("rounds", Exactness.OTHER_ORDER)]))
    return found


def kinds_of_disk_offload(requirements: Requirements) -> list[Kind]:
    """Returns the kind of change that moves moments and block inputs to the disk. It changes no
    result, but steps take longer, and the drive wears.
    """
    folder = (
        offered_folder(requirements.machine) if requirements.config.engine.disk is None else None
    )
    if folder is None:
        return []
    words = "Keep what does not fit in RAM on the disk"
    return [Kind((PartName.HOST,), [Option(words, {"engine.disk": folder})])]


def groups_of_adapters(requirements: Requirements) -> list[list[Kind]]:
    """Returns the change that trains adapters instead of all weights, for a job that lacks memory,
    and then each kind of change of the disk and of steps together with it.
    """
    config = requirements.config
    if config.train.method != "full" or requirements.status(MEMORY) != FitStatus.DOES_NOT_FIT:
        return []
    if config.data.add_tokens:  # their rows must be trained, and adapters leave them as they are
        return []
    changes: Changes = {METHOD: "lora"}
    if config.engine.activation_checkpointing == "offload_pairs":
        changes["engine.activation_checkpointing"] = AUTO
    words = f"Train adapters (LoRA) of rank {config.train.lora_rank} instead of all weights"
    base = Option(words, changes, (Exactness.ADAPTERS_ALONE,))
    alone, *more = _together_with(
        base, [*_kinds_of_disk(requirements), *_kinds_of_steps(requirements)]
    )
    return [[alone], more]


def _other_block_input_places(requirements: Requirements) -> list[Option]:
    """Returns other places for block inputs than that of the settings. Those of every second block
    take half the RAM of all.
    """
    places = {
        "offload_pairs": "Keep the input of every second block alone, in RAM",
        "offload": "Keep block inputs in RAM",
    }
    asked = requirements.config.engine.activation_checkpointing
    options = [
        Option(text, {"engine.activation_checkpointing": level})
        for level, text in places.items()
        if level != asked and requirements.device == "cuda"
    ]
    return [*options, _set_to_auto("activation_checkpointing")]


def _set_to_auto(name: str, exactness: Exactness = Exactness.SAME_BITS) -> Option:
    text = f"Set engine.{name} to auto"
    if name == "states":
        text += ", so that units live on the GPU where it has room"
    return Option(text, {f"engine.{name}": AUTO}, (exactness,))


def _left_to_planner(config: TrainConfig) -> Option | None:
    """Returns the change that leaves all places to the planner, or None if it has them already."""
    names = ("gradients", "activation_checkpointing", "slots", "blocks_kept_in_slots", "states")
    options = [_set_to_auto(name) for name in names if getattr(config.engine, name) != AUTO]
    return all_together(options) if options else None


# ---------------------------------------------------------------------- steps


def _kinds_of_steps(requirements: Requirements) -> list[Kind]:
    """Returns the kinds of change in how a step computes and what it trains on."""
    config = requirements.config
    rows, length = config.train.batch_size, config.data.max_seq_len
    size, rounds = requirements.chosen.micro_batch_size, requirements.chosen.choices.batching.rounds
    smaller = [
        Option(
            f"Lower train.micro_batch_size from {size} to {less}",
            {"train.micro_batch_size": less},
            (Exactness.OTHER_ORDER,),
        )
        for less in range(size - 1, 0, -1)
        if rows % less == 0
    ]
    more_rounds = [
        Option(
            f"Spread a step over {more} rounds",
            {"engine.rounds": more},
            (Exactness.OTHER_ORDER,),
        )
        for more in range(rounds + 1, MOST_ROUNDS + 1)
        if rows % more == 0
    ]
    fewer_rows = [
        Option(
            f"Lower train.batch_size from {rows} to {fewer}",
            _fewer_rows(config, fewer),
            (Exactness.FEWER_TOKENS,),
        )
        for fewer in _halves(rows, 1)
    ]
    shorter = [
        Option(
            f"Shorten data.max_seq_len from {length} to {less}",
            {"data.max_seq_len": less},
            (Exactness.FEWER_TOKENS,),
        )
        for less in _halves(length, SHORTEST_ROW)
    ]
    gpus = requirements.ranks
    alone = [
        Option(
            f"Compute on one GPU instead of {gpus}",
            {"engine.gpus": 1},
            (Exactness.OTHER_ORDER,),
        )
    ]
    compute_memory = PartName.GPU if requirements.device == "cuda" else PartName.HOST
    found = [
        Kind((compute_memory,), smaller),
        Kind(MEMORY, more_rounds),
        Kind(MEMORY, alone if gpus > 1 else []),
        # The changes above only reorder sums. Smaller moments round what AdamW remembers, at the
        # same rows and rates. Those below train on fewer or other tokens a step.
        Kind((PartName.HOST,), _smaller_moments(config)),
        Kind(MEMORY, fewer_rows),
        Kind(MEMORY, shorter),
    ]
    if config.model.dtype == "float32":
        changes: Changes = {"model.dtype": "bfloat16"}
        half = Option("Compute in bfloat16", changes, (Exactness.LOWER_PRECISION,))
        found.append(Kind(tuple(PartName), [half]))
    return found


def _smaller_moments(config: TrainConfig) -> list[Option]:
    """Returns the optimizers whose states take less than those of the job, most exact first."""
    return [
        Option(
            f"Keep {OPTIMIZERS[optimizer].states_text}",
            {"train.optimizer": optimizer},
            (Exactness.ROUNDED_MOMENTS,),
        )
        for optimizer in OPTIMIZERS[config.train.optimizer].smaller
    ]


def _halves(value: int, least: int) -> list[int]:
    """Returns half of the value, a quarter of it and so on, down to `least`."""
    found = []
    half = value // 2
    while half >= least:
        found.append(half)
        half //= 2
    return found


def _fewer_rows(config: TrainConfig, rows: int) -> Changes:
    changes: Changes = {"train.batch_size": rows}
    size = config.train.micro_batch_size
    if size != AUTO and rows % size:
        changes["train.micro_batch_size"] = AUTO
    return changes
