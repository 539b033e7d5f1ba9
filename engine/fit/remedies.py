"""`remedies_for` finds the smallest changes of settings that make a job fit. Each change is checked
with the leanest plan before it is returned. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.config.settings import AUTO, OutputConfig, TrainConfig
from engine.errors import ConfigError
from engine.fit.memory_items import MEMORY, PartName
from engine.fit.needs import PART_WORDS, Needs, Verdict, least_needs
from engine.plan.ops import GradientSum
from engine.planes.moments import KINDS
from engine.words import counted, in_gib

SHORTEST_ROW, MOST_ROUNDS = 64, 8
"""Remedies propose no shorter rows and no more rounds than these."""

Changes = dict[str, Any]
"""The keys are names of settings, and the values are their new values."""


@dataclass(frozen=True)
class Remedy:
    """A remedy is a change of settings that makes the job fit. `text` describes the change and the
    memory that the job then takes.
    """

    text: str
    changes: Changes


@dataclass(frozen=True)
class _Option:
    """An option is a change of settings that may help, with its description."""

    text: str
    changes: Changes


@dataclass(frozen=True)
class _Kind:
    """A `_Kind` is a kind of change, such as fewer rows, with its options ordered from the
    smallest.
    """

    helps: tuple[PartName, ...]
    """This kind of change can help these parts of memory."""
    options: list[_Option]


def remedies_for(needs: Needs) -> tuple[Remedy, ...]:
    """Returns changes with which the job fits, for `needs` that do not fit, or not comfortably. The
    smallest come first, and of each kind only the smallest that suffices is returned. Each says how
    much the job then takes at least.
    """
    return _Search(needs).remedies()


class _Search:
    """A `_Search` tries changes for one job.

    A change is a remedy if all parts of memory fit with it. If several parts do not fit and no
    single change is enough for all of them, changes that each help some of the parts are combined.
    """

    def __init__(self, needs: Needs):
        self._needs = needs
        self._wanted: tuple[Verdict, ...] = (Verdict.FITS, Verdict.TIGHT)
        if needs.verdict() == Verdict.TIGHT:
            self._wanted = (Verdict.FITS,)
        self._bad = tuple(
            name for name, part in needs.parts.items() if part.verdict not in self._wanted
        )
        self._partial: dict[PartName, _Option] = {}
        """For each part that does not fit, it keeps the smallest change that helps the part but not
        all parts.
        """

    def remedies(self) -> tuple[Remedy, ...]:
        found = []
        for kind in _kinds(self._needs):
            if set(kind.helps) & set(self._bad):
                found += self._first_that_helps(kind)
        if not found and set(self._partial) == set(self._bad):
            found += self._all_together()
        return tuple(found)

    def _first_that_helps(self, kind: _Kind) -> list[Remedy]:
        """Returns the smallest remedy of a kind, if there is one."""
        options = kind.options
        if self._wanted == (Verdict.FITS,):
            # If the job fits already, though only just, drastic changes such as rows an eighth as
            # long are not proposed.
            options = options[:2]
        for option in options:
            result = self._tried(option.changes)
            if result is None:
                continue
            if result.verdict() in self._wanted:
                text = f"{option.text}: {_outcome(result, self._bad)}"
                return [Remedy(text, option.changes)]
            if len(self._bad) > 1 and self._helps_some(option, result):
                break
        return []

    def _helps_some(self, option: _Option, result: Needs) -> bool:
        """Records which of the parts that do not fit the option helps, and returns whether it helps
        any for which no change was known.
        """
        better = [
            name
            for name in self._bad
            if name not in self._partial and result.verdict((name,)) in self._wanted
        ]
        self._partial |= dict.fromkeys(better, option)
        return bool(better)

    def _all_together(self) -> list[Remedy]:
        """Returns the combination of all partial changes, if it is a remedy."""
        merged: Changes = {}
        for option in self._partial.values():
            merged |= option.changes
        result = self._tried(merged)
        if result is None or result.verdict() not in self._wanted:
            return []
        first, *others = dict.fromkeys(option.text for option in self._partial.values())
        more = ", and ".join(_lower(text) for text in others)
        return [Remedy(f"{first}, and {more}: {_outcome(result, self._bad)}", merged)]

    def _tried(self, changes: Changes) -> Needs | None:
        """Returns the least needs with these changes. Returns None where a change contradicts
        another setting, since it is then not a remedy.
        """
        try:
            config = self._needs.config.with_values(changes)
            shape = self._needs.shape
            if config.model.dtype != shape.dtype:
                shape = shape.in_dtype(config.model.dtype)
            before = self._needs.checkpoints_before
            return least_needs(config, self._needs.machine, shape, before)
        except ConfigError:
            return None


# ---------------------------------------------------------------------- what can be changed


def _kinds(needs: Needs) -> list[_Kind]:
    """Returns the kinds of change, smallest first."""
    return [*_kinds_of_memory_use(needs), *_kinds_of_steps(needs)]


def _kinds_of_memory_use(needs: Needs) -> list[_Kind]:
    """Returns the kinds of change in what is kept in memory, and where."""
    engine, output = needs.config.engine, needs.config.output
    fewer = [
        _Option(
            f"Keep {counted(keep, 'checkpoint')} instead of {output.keep_checkpoints}",
            {"output.keep_checkpoints": keep},
        )
        for keep in range(output.keep_checkpoints - 1, 0, -1)
    ]
    found = [_Kind((PartName.DISK,), fewer)]
    if output.export:
        later = _Option("Export later, not when the run ends", {"output.export": False})
        found.append(_Kind((PartName.DISK,), [later]))
    found.append(_Kind((PartName.DISK,), _less_written(output)))
    for name in ("slots", "residency", "save_level", "rounds", "gradients"):
        if getattr(engine, name) != AUTO:
            automatic = _Option(f"Set engine.{name} to auto", {f"engine.{name}": AUTO})
            found.append(_Kind(MEMORY, [automatic]))
    if engine.gpu_memory_gib is not None:
        all_free = _Option("Use all GPU memory that is free", {"engine.gpu_memory_gib": None})
        found.append(_Kind((PartName.GPU,), [all_free]))
    if engine.save_level != "boundary_host" and needs.device == "cuda":
        on_host = _Option("Keep boundaries on the host", {"engine.save_level": "boundary_host"})
        found.append(_Kind((PartName.GPU,), [on_host]))
    return found


def _less_written(output: OutputConfig) -> list[_Option]:
    """Returns the changes in which checkpoints a run writes. What loses least comes first; each
    takes less of the disk than the one before it.
    """
    at_end: Changes = {"output.checkpoint_every": 0} if output.checkpoint_every else {}
    later: Changes = {"output.export": False} if output.export else {}
    found: list[_Option] = []
    if output.checkpoint == "none":
        return found
    once = "Write one checkpoint, at the end"
    if at_end:
        found.append(_Option(once, at_end))
        if later:
            found.append(_Option(f"{once}, and export later", at_end | later))
    if output.checkpoint == "full":
        weights: Changes = {"output.checkpoint": "weights"}
        lost = "no run is resumed from them"
        words = f"Keep weights alone in checkpoints; {lost}"
        found.append(_Option(words, weights))
        if at_end:
            words = f"Write weights alone, once at the end; {lost}"
            found.append(_Option(words, weights | at_end))
        if later:
            words = f"Write weights alone, once at the end, and export later; {lost}"
            found.append(_Option(words, weights | at_end | later))
    exported: Changes = {} if output.export else {"output.export": True}
    words = "Write no checkpoint, only the export at the end; nothing of a run that stops is kept"
    return [*found, _Option(words, {"output.checkpoint": "none"} | exported)]


def _kinds_of_steps(needs: Needs) -> list[_Kind]:
    """Returns the kinds of change in how a step computes and what it trains on."""
    config = needs.config
    rows, length = config.train.batch_size, config.data.max_seq_len
    size, rounds = needs.chosen.micro_batch_size, needs.chosen.choices.rounds
    smaller = [
        _Option(
            f"Lower train.micro_batch_size from {size} to {less}", {"train.micro_batch_size": less}
        )
        for less in range(size - 1, 0, -1)
        if rows % less == 0
    ]
    more_rounds = [
        _Option(f"Spread a step over {more} rounds", {"engine.rounds": more})
        for more in range(rounds + 1, MOST_ROUNDS + 1)
        if rows % more == 0
    ]
    fewer_rows = [
        _Option(f"Lower train.batch_size from {rows} to {fewer}", _fewer_rows(config, fewer))
        for fewer in _halves(rows, 1)
    ]
    shorter = [
        _Option(f"Shorten data.max_seq_len from {length} to {less}", {"data.max_seq_len": less})
        for less in _halves(length, SHORTEST_ROW)
    ]
    compute_memory = PartName.GPU if needs.device == "cuda" else PartName.HOST
    found = [
        _Kind((compute_memory,), smaller),
        _Kind(MEMORY, more_rounds),
        # The changes above only reorder sums. Smaller moments round what AdamW remembers, at the
        # same rows and rates. Those below train on fewer or other tokens a step.
        _Kind((PartName.HOST,), _smaller_moments(config)),
        _Kind(MEMORY, fewer_rows),
        _Kind(MEMORY, shorter),
    ]
    if config.model.dtype == "float32":
        half = _Option("Compute in bfloat16", {"model.dtype": "bfloat16"})
        found.append(_Kind(tuple(PartName), [half]))
    return found


def _smaller_moments(config: TrainConfig) -> list[_Option]:
    """Returns the optimizers whose moments take less than those of the job, most exact first."""
    optimizers = list(KINDS)
    return [
        _Option(
            f"Keep AdamW's moments in {KINDS[optimizer]}; "
            "results change slightly, and fp32 masters stay",
            {"train.optimizer": optimizer},
        )
        for optimizer in optimizers[optimizers.index(config.train.optimizer) + 1 :]
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


# ---------------------------------------------------------------------- words


def _outcome(needs: Needs, names: tuple[PartName, ...]) -> str:
    """Returns a text on how much a changed job takes of the parts that did not fit."""
    outcome = ", ".join(
        f"{in_gib(part.total)} of {in_gib(part.known_limit)} {PART_WORDS[name]}"
        for name, part in needs.parts.items()
        if name in names
    )
    if needs.chosen.choices.gradient_sum == GradientSum.HOST and needs.shape.dtype == "bfloat16":
        outcome += " (gradients are rounded to bf16 once a round)"
    return outcome


def _lower(text: str) -> str:
    return text[0].lower() + text[1:]
