"""The smallest changes of settings that make a job fit, each tried with the leanest plan before it
is named. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError
from engine.fit.memory_items import MEMORY, PartName
from engine.fit.needs import PART_WORDS, Needs, Verdict, least_needs
from engine.plan.ops import GradientSum
from engine.words import counted, in_gib

SHORTEST_ROW, MOST_ROUNDS = 64, 8
"""Remedies do not go beyond these."""


@dataclass(frozen=True)
class Remedy:
    """A change of settings that makes the job fit; `text` says what it is and what it comes to."""

    text: str
    changes: dict[str, Any]


def remedies_for(needs: Needs) -> tuple[Remedy, ...]:
    """Changes that fit where `needs` do not, or not comfortably; the smallest first, and of each
    kind the least that does. Each says what the job takes at least then.
    """
    wanted = (Verdict.FITS,) if needs.verdict() == Verdict.TIGHT else (Verdict.FITS, Verdict.TIGHT)
    bad = tuple(name for name, part in needs.parts.items() if part.verdict not in wanted)

    def tried(changes: dict[str, Any]) -> Needs | None:
        try:
            config = needs.config.with_values(changes)
            shape = (
                needs.shape
                if config.model.dtype == needs.shape.dtype
                else needs.shape.in_dtype(config.model.dtype)
            )
            return least_needs(config, needs.machine, shape)
        except ConfigError:  # a change that contradicts another setting is no remedy
            return None

    remedies, fixes = [], {}
    for kinds, options in _candidates(needs):
        if not set(kinds) & set(bad):
            continue
        # Where it fits already, though only just, nobody wants to hear of rows an eighth as long.
        for text, changes in options[:2] if wanted == (Verdict.FITS,) else options:
            result = tried(changes)
            if result is None:
                continue
            if result.verdict() in wanted:
                remedies.append(Remedy(f"{text}: {_outcome(result, bad)}", changes))
                break
            better = [
                name for name in bad if name not in fixes and result.verdict((name,)) in wanted
            ]
            if better and len(bad) > 1:
                fixes |= dict.fromkeys(better, (text, changes))
                break
    if not remedies and set(fixes) == set(bad):
        merged = {key: value for _, changes in fixes.values() for key, value in changes.items()}
        result = tried(merged)
        if result is not None and result.verdict() in wanted:
            steps = list(dict.fromkeys(text for text, _ in fixes.values()))
            remedies.append(
                Remedy(
                    f"{steps[0]}, and {', and '.join(_lower(t) for t in steps[1:])}: "
                    f"{_outcome(result, bad)}",
                    merged,
                )
            )
    return tuple(remedies)


def _candidates(
    needs: Needs,
) -> list[tuple[tuple[PartName, ...], list[tuple[str, dict[str, Any]]]]]:
    """Kinds of change from the smallest on: (parts that it can help, its options from the least
    on).
    """
    config = needs.config
    t, e, o = config.train, config.engine, config.output
    found = [
        (
            (PartName.DISK,),
            [
                (
                    f"Keep {counted(keep, 'checkpoint')} instead of {o.keep_checkpoints}",
                    {"output.keep_checkpoints": keep},
                )
                for keep in range(o.keep_checkpoints - 1, 0, -1)
            ],
        )
    ]
    if o.export:
        found.append(
            ((PartName.DISK,), [("Export later, not when the run ends", {"output.export": False})])
        )
    for name in ("slots", "residency", "save_level", "rounds"):
        if getattr(e, name) != AUTO:
            found.append((MEMORY, [(f"Set engine.{name} to auto", {f"engine.{name}": AUTO})]))
    if e.gpu_memory_gib is not None:
        found.append(
            (
                (PartName.GPU,),
                [("Use all GPU memory that is free", {"engine.gpu_memory_gib": None})],
            )
        )
    if e.save_level != "boundary_host" and needs.device == "cuda":
        found.append(
            (
                (PartName.GPU,),
                [("Keep boundaries on the host", {"engine.save_level": "boundary_host"})],
            )
        )
    size = needs.chosen.micro_batch_size
    found.append(
        (
            (PartName.GPU if needs.device == "cuda" else PartName.HOST,),
            [
                (
                    f"Lower train.micro_batch_size from {size} to {less}",
                    {"train.micro_batch_size": less},
                )
                for less in range(size - 1, 0, -1)
                if t.batch_size % less == 0
            ],
        )
    )
    rounds = needs.chosen.choices.rounds
    found.append(
        (
            MEMORY,
            [
                (f"Spread a step over {more} rounds", {"engine.rounds": more})
                for more in range(rounds + 1, MOST_ROUNDS + 1)
                if t.batch_size % more == 0
            ],
        )
    )
    found.append(
        (
            MEMORY,
            [
                (f"Lower train.batch_size from {t.batch_size} to {rows}", _fewer_rows(config, rows))
                for rows in _halves(t.batch_size, 1)
            ],
        )
    )
    length = config.data.max_seq_len
    found.append(
        (
            MEMORY,
            [
                (f"Shorten data.max_seq_len from {length} to {less}", {"data.max_seq_len": less})
                for less in _halves(length, SHORTEST_ROW)
            ],
        )
    )
    if config.model.dtype == "float32":
        found.append((tuple(PartName), [("Compute in bfloat16", {"model.dtype": "bfloat16"})]))
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


def _outcome(needs: Needs, names: tuple[PartName, ...]) -> str:
    outcome = ", ".join(
        f"{in_gib(part.total)} of {in_gib(part.limit)} {PART_WORDS[name]}"
        for name, part in needs.parts.items()
        if name in names
    )
    if needs.chosen.choices.gradient_sum == GradientSum.HOST and needs.shape.dtype == "bfloat16":
        outcome += " (gradients are rounded to bf16 once a round)"
    return outcome


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
