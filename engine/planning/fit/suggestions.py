"""`suggestions_for` finds the smallest changes of settings that make a job fit. Each change is
checked with the minimum-memory plan before it is returned. `requirements_with` says what the job
then takes, and `moves_text` which units then live elsewhere. No torch.

Suggestions are ordered by what they cost the user: first fewer checkpoints, for a job that lacks
disk space, then what changes nothing but speed, what only adds sums in another order, weights in
bf16, moments of AdamW in bf16 and in 8 bits, and fewer and shorter rows. Adapters in the place of
all weights come next, for they are another training. Moments and block inputs on the disk come
last: they change no result, but wear the drive.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import ConfigError
from engine.machine.read_machine import Machine
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.exactness import Exactness, sentences
from engine.planning.fit.memory_items import MEMORY, PartName
from engine.planning.fit.requirements import (
    PART_WORDS,
    FitStatus,
    Requirements,
    minimum_requirements,
    requirements_of,
)
from engine.planning.fit.suggestion_options import (
    Changes,
    Kind,
    Option,
    all_together,
    groups_of_adapters,
    groups_of_kinds,
    kinds_of_disk_offload,
)
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.catalog import catalog_shape
from engine.planning.shape.model_shape import ModelShape
from engine.text import in_gib, in_seconds

MAY_BE_MORE = 1.25
"""Share of what the best change lacks that the nearest one may lack: the simplest one is told."""

AdaptedShape = Callable[[ModelConfig, Adapters], ModelShape | None]
"""Returns the shape of a model with these adapters; None for a model whose adapters are unknown."""


def of_catalog(model: ModelConfig, adapters: Adapters) -> ModelShape | None:
    """Returns the shape of a bundled model with these adapters, None for any other model."""
    return catalog_shape(model.source, model.dtype, model.attention, adapters)


@dataclass(frozen=True)
class Suggestion:
    """A suggestion is a change of settings that makes the job fit."""

    title: str
    """The change, in words."""
    needs: str
    """Memory that the job then takes of each part that did not fit: the least with which it fits,
    or that of its plan once the seconds are known.
    """
    changes: Changes
    exactness: tuple[Exactness, ...]
    """What the changes do to results. Several changes may do different things."""
    seconds: float | None = None
    """Seconds of a step then; None where that was not asked for, and without rates."""
    instead_of: float | None = None
    """Seconds of a step with the settings as they are; None where the job does not fit with them,
    or without rates.
    """

    after: tuple[tuple[PartName, int], ...] = ()
    """The bytes of `needs`, by part."""
    places: str = ""
    """Where units then live, if that differs from where they live with the settings as they are. It
    is known together with the seconds.
    """

    @property
    def text(self) -> str:
        """The change and the memory that the job then takes."""
        return f"{self.title}: {self.needs}"

    def as_planned(self, planned: Requirements) -> Suggestion:
        """Returns the suggestion with the memory of the plan that the changed job has."""
        names = tuple(name for name, _ in self.after)
        needs = _needs(planned, names)
        return replace(self, needs=needs, after=_bytes_of(planned, names))

    @property
    def time_text(self) -> str:
        """How long a step takes, as in "about 8.4 s a step instead of 7.9 s", or an empty text if
        that is not known.
        """
        if self.seconds is None:
            return ""
        words = f"about {in_seconds(self.seconds)} a step"
        if self.instead_of is None:
            return words
        if in_seconds(self.seconds) == in_seconds(self.instead_of):
            return f"{words}, as now"
        return f"{words} instead of {in_seconds(self.instead_of)}"

    @property
    def exactness_text(self) -> str:
        """What happens to results, in sentences."""
        return sentences(self.exactness)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain data, in the form that the record and tools use."""
        return {
            "text": self.text,
            "changes": self.changes,
            "exactness": [kind.value for kind in self.exactness],
            "exactness_text": self.exactness_text,
            "seconds": self.seconds,
            "instead_of": self.instead_of,
            "places": self.places,
        }


@dataclass(frozen=True)
class Nearest:
    """The change of settings with which a job that no change makes fit lacks least."""

    title: str
    """The change, in words."""
    changes: Changes
    lacks: tuple[tuple[PartName, int], ...]
    """Bytes that the job then lacks of each part that does not fit."""


@dataclass(frozen=True)
class Found:
    """What was found for a job that does not fit, or not comfortably."""

    suggestions: tuple[Suggestion, ...] = ()
    nearest: Nearest | None = None
    """Known only where there are no suggestions."""


def suggestions_for(requirements: Requirements, adapted: AdaptedShape = of_catalog) -> Found:
    """Returns changes with which the job fits, for `requirements` that do not fit, or not
    comfortably. Those that cost least come first, and of each kind only the smallest that suffices
    is returned. Each says how much the job then takes at least. None says yet how long a step
    takes.
    """
    search = _Search(requirements, adapted)
    suggestions = search.suggestions()
    return Found(suggestions, None if suggestions else search.nearest())


def requirements_with(
    changes: Changes,
    config: TrainConfig,
    machine: Machine,
    shape: ModelShape,
    adapted: AdaptedShape = of_catalog,
) -> Requirements:
    """Returns the needs of the job with these changes."""
    changed = config.with_values(changes)
    found = _shape_of(changed, config, shape, adapted)
    if found is None:
        raise ConfigError(
            "train.method", "adapters of this model are not known here; set it to full."
        )
    return requirements_of(changed, machine, found)


def moves_text(before: PlanChoices | None, after: Chosen, units: int) -> str:
    """Returns how another plan moves the border between GPU memory and RAM: a sentence, or an empty
    text where nothing moves. before: the choices of the plan as it is, None where that does not
    fit. units: number of units of the model.
    """
    choices = after.choices
    told = []
    gpu_resident, was = (
        choices.placement.gpu_resident_units,
        0 if before is None else before.placement.gpu_resident_units,
    )
    if gpu_resident != was:
        now = "" if before is None else f" instead of {was}"
        one = "lives" if gpu_resident == 1 else "live"
        told.append(f"{gpu_resident} of {units} units then {one} on the GPU{now}")
    was_kept_on_gpu = before is not None and before.gradients.gradients_on_gpu
    is_kept_on_gpu = choices.gradients.gradients_on_gpu
    if is_kept_on_gpu != was_kept_on_gpu:
        told.append(f"gradients then wait {'on the GPU' if is_kept_on_gpu else 'in RAM'}")
    words = ", and ".join(told)
    return f"{words[0].upper()}{words[1:]}." if words else ""


class _Search:
    """A `_Search` tries changes for one job.

    A change is a suggestion if all parts of memory fit with it. If several parts do not fit and no
    single change is enough for all of them, changes that each help some of the parts are combined.
    """

    def __init__(self, requirements: Requirements, adapted: AdaptedShape):
        self._requirements = requirements
        self._adapted = adapted
        self._wanted: tuple[FitStatus, ...] = (FitStatus.FITS, FitStatus.TIGHT)
        if requirements.status() == FitStatus.TIGHT:
            self._wanted = (FitStatus.FITS,)
        self._bad = tuple(
            name for name, part in requirements.parts.items() if part.status not in self._wanted
        )
        self._partial: dict[PartName, Option] = {}
        """Smallest change that helps a part that does not fit but not all parts, by part."""
        self._near: list[Nearest] = []
        """What was tried in vain, but for fewer and shorter rows, in the order of what it costs."""

    def suggestions(self) -> tuple[Suggestion, ...]:
        found = self._of_first(groups_of_kinds(self._requirements))
        adapters = self._of_first(groups_of_adapters(self._requirements))
        return (*found, *adapters[:1], *self._of_group(kinds_of_disk_offload(self._requirements)))

    def nearest(self) -> Nearest | None:
        """Returns the change that was tried in vain and lacks about the least, for a job that lacks
        memory; None where none lacks much less than the job as it is.
        """
        if self._requirements.status(MEMORY) != FitStatus.DOES_NOT_FIT:
            return None
        as_it_is = sum(size for _, size in lacks_of(self._requirements))
        least = min((_size(each) for each in self._near), default=as_it_is)
        if MAY_BE_MORE * least >= as_it_is:
            return None
        return next(each for each in self._near if _size(each) <= MAY_BE_MORE * least)

    def _of_first(self, groups: list[list[Kind]]) -> list[Suggestion]:
        """Returns the suggestions of the first group that has any."""
        for kinds in groups:
            found = self._of_group(kinds)
            if found:
                return found
        return []

    def _of_group(self, kinds: list[Kind]) -> list[Suggestion]:
        self._partial = {}
        found = []
        for kind in kinds:
            if set(kind.helps) & set(self._bad):
                found += self._first_that_helps(kind)
        if not found and set(self._partial) == set(self._bad):
            found += self._all_together()
        return found

    def _first_that_helps(self, kind: Kind) -> list[Suggestion]:
        """Returns the smallest suggestion of a kind, if there is one. The next larger one takes its
        place where the job fits comfortably with that one alone.
        """
        options, only_just = kind.options, None
        if self._wanted == (FitStatus.FITS,) and kind.is_graded:
            # If the job fits already, though only just, drastic changes such as rows an eighth as
            # long are not proposed.
            options = options[:2]
        for option in options:
            result = self._tried(option.changes)
            if result is None:
                continue
            lacks = lacks_of(result)
            if lacks and Exactness.FEWER_TOKENS not in option.exactness:
                self._near.append(Nearest(option.text, option.changes, lacks))
            if result.status() in self._wanted:
                if not self._is_planned(option.changes):
                    continue
                suggestion = self._suggestion(option, result)
                if result.status() == FitStatus.FITS:
                    return [suggestion]
                if only_just is not None:
                    break
                only_just = suggestion
                continue
            if len(self._bad) > 1 and self._helps_some(option, result):
                break
        return [only_just] if only_just is not None else []

    def _helps_some(self, option: Option, result: Requirements) -> bool:
        """Records which of the parts that do not fit the option helps, and returns whether it helps
        any for which no change was known.
        """
        better = [
            name
            for name in self._bad
            if name not in self._partial and result.status((name,)) in self._wanted
        ]
        self._partial |= dict.fromkeys(better, option)
        return bool(better)

    def _all_together(self) -> list[Suggestion]:
        """Returns the combination of all partial changes, if it is a suggestion."""
        options = {option.text: option for option in self._partial.values()}
        merged = all_together([*options.values()])
        result = self._tried(merged.changes)
        if result is None or result.status() not in self._wanted:
            return []
        return [self._suggestion(merged, result)] if self._is_planned(merged.changes) else []

    def _is_planned(self, changes: Changes) -> bool:
        """Returns whether the planner finds a plan that fits, too. With a given number of rounds it
        may prefer block inputs on the host, although only those on the device fit.
        """
        if "engine.rounds" not in changes:
            return True
        config = self._requirements.config.with_values(changes)
        shape = self._shape_of(config)
        if shape is None:
            return False
        planned = requirements_of(config, self._requirements.machine, shape, coarse=True)
        return planned.status(MEMORY) in self._wanted

    def _shape_of(self, config: TrainConfig) -> ModelShape | None:
        return _shape_of(config, self._requirements.config, self._requirements.shape, self._adapted)

    def _suggestion(self, option: Option, result: Requirements) -> Suggestion:
        exactness = option.exactness
        if _rounds_gradients(result) and not _rounds_gradients(self._requirements):
            kept = set(exactness) - {Exactness.SAME_BITS, Exactness.OTHER_ORDER}
            changed = kept | {Exactness.ROUNDED_GRADIENTS}
            exactness = tuple(kind for kind in Exactness if kind in changed)
        needs, after = _needs(result, self._bad), _bytes_of(result, self._bad)
        return Suggestion(option.text, needs, option.changes, exactness, after=after)

    def _tried(self, changes: Changes) -> Requirements | None:
        """Returns the least needs with these changes. Returns None where a change contradicts
        another setting or the model, since it is then not a suggestion.
        """
        try:
            config = self._requirements.config.with_values(changes)
            shape = self._shape_of(config)
            if shape is None:
                return None
            before = self._requirements.checkpoints_before
            return minimum_requirements(config, self._requirements.machine, shape, before)
        except ConfigError:
            return None


def lacks_of(requirements: Requirements) -> tuple[tuple[PartName, int], ...]:
    """Returns the bytes that a job lacks of each part that does not fit."""
    return tuple(
        (name, part.total - part.known_limit)
        for name, part in requirements.parts.items()
        if part.status == FitStatus.DOES_NOT_FIT
    )


def _size(nearest: Nearest) -> int:
    return sum(size for _, size in nearest.lacks)


def _shape_of(
    changed: TrainConfig, config: TrainConfig, shape: ModelShape, adapted: AdaptedShape
) -> ModelShape | None:
    """Returns the shape of the model of changed settings, or None if it is not known. shape: that
    of `config`.
    """
    adapters = changed.train.parts
    if isinstance(adapters, Adapters) and adapters != config.train.parts:
        return adapted(changed.model, adapters)
    return _in_dtype_of(changed, shape)


def _in_dtype_of(config: TrainConfig, shape: ModelShape) -> ModelShape:
    dtype = config.model.dtype
    return shape if dtype == shape.dtype else shape.in_dtype(dtype)


def _rounds_gradients(requirements: Requirements) -> bool:
    """Returns whether the plan rounds gradients to bf16 once a round, not once a step."""
    is_on_host = requirements.chosen.choices.gradients.main_grad == MainGrad.HOST
    return is_on_host and requirements.shape.dtype == "bfloat16"


def _needs(requirements: Requirements, names: tuple[PartName, ...]) -> str:
    """Returns a text on how much a changed job takes of the parts that did not fit."""
    words = [
        f"{in_gib(part.total)} of {in_gib(part.known_limit)} {PART_WORDS[name]}"
        for name, part in requirements.parts.items()
        if name in names
    ]
    if requirements.disk_offload is not None:
        words.append(requirements.disk_offload.in_words)
    return ", ".join(words)


def _bytes_of(
    requirements: Requirements, names: tuple[PartName, ...]
) -> tuple[tuple[PartName, int], ...]:
    return tuple((name, requirements.parts[name].total) for name in names)
