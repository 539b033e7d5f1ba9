"""Models as cards, those that fit this machine first. Whether one fits, the disk included, is
judged by the plan of least memory; the memory that a card says is that of the plan that a run would
use. All functions are pure but for `downloads`, which looks into the cache of the hub.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.labels import in_bytes, in_count
from app.pages.new.download import beside_download, download_bytes, size_text
from app.pages.new.known_models import card_id, is_offered, model_title
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RamstreamError
from engine.machine.read_machine import Machine
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.model_table import table_shape
from engine.planning.fit.requirements import (
    PART_WORDS,
    FitStatus,
    Requirements,
    minimum_requirements,
    requirements_of,
)
from engine.planning.shape.catalog import CatalogEntry, catalog
from engine.planning.shape.model_shape import ModelShape

FITTING, TOO_LARGE = 5, 1
"""Number of cards of models that fit, that of an example included, and of those that do not."""
OUT_OF_REACH = "not on this machine"
FOR_THE_EXAMPLE = "for the example only"

Known = tuple[CatalogEntry, ModelShape]


def model_cards(
    config: TrainConfig,
    machine: Machine,
    chosen: TrainConfig,
    example: TrainConfig,
    downloads: Callable[[TrainConfig], bool],
) -> list[dict[str, Any]]:
    """Returns models for these settings, those that fit first: that of `chosen`, with its own
    settings, if it is known; those that fit and are on this machine; some others that fit, from the
    smallest to the largest; that of `example`, which needs no download; then the smallest that does
    not fit. There are none of the catalog for settings that no table is about. downloads: whether a
    run would first download weights.
    """
    jobs = _Jobs(machine, downloads)
    known = _known(config)
    end = _first_too_large(known, config, jobs)
    is_chosen = chosen.model.source.strip() == example.model.source.strip()
    examples = _example_cards(example, jobs) if known or is_chosen else []
    room = FITTING - len(examples)
    rest = [*_chosen_of(known[:end], room, config, jobs), *known[end : end + TOO_LARGE]]
    first = [each for each in _known(chosen) if _is_of(chosen, each[0])]
    if first and not any(_is_of(chosen, entry) for entry, _ in rest):
        rest = [*_chosen_of(known[:end], room - 1, config, jobs), *known[end : end + TOO_LARGE]]
    of_catalog = [
        *(_card(*each, chosen, jobs) for each in first),
        *(_card(*each, config, jobs) for each in rest if not _is_of(chosen, each[0])),
    ]
    cards = [*examples, *of_catalog] if is_chosen else [*of_catalog, *examples]
    return sorted(cards, key=lambda card: not card["fits"])


def out_of_reach(card: dict[str, Any]) -> dict[str, Any]:
    """Returns a card while nothing can be downloaded: it promises no model that is not here."""
    if not card["is_download"]:
        return card
    return card | {"note": OUT_OF_REACH, "is_to_be_had": False}


def _chosen_of(known: Sequence[Known], count: int, config: TrainConfig, jobs: _Jobs) -> list[Known]:
    """Returns so many models: the largest that are on this machine, then others."""
    here = [each for each in known if jobs.source_here(each[0], config)][-count:]
    others = [each for each in known if each not in here]
    return [*here, *_spread(others, count - len(here))]


def _is_of(config: TrainConfig, entry: CatalogEntry) -> bool:
    return config.model.source in (entry.id, *entry.also)


def _known(config: TrainConfig) -> list[Known]:
    """Returns the models of the catalog with their shapes, the smallest first."""
    found = []
    for entry in filter(is_offered, catalog()):
        try:
            shape = table_shape(entry, config)
        except ConfigError:
            continue
        if shape is not None:
            found.append((entry, shape))
    return sorted(found, key=lambda each: each[1].parameter_count)


@dataclass(frozen=True)
class _Jobs:
    """Judges jobs on a machine, beside what they download."""

    machine: Machine
    downloads: Callable[[TrainConfig], bool]

    def source_here(self, entry: CatalogEntry, config: TrainConfig) -> str:
        """Returns the id of a model of this shape that is on this machine, or an empty text."""
        ids = dict.fromkeys((card_id(entry), entry.id, *entry.also))
        return next((each for each in ids if not self.downloads(_with_model(config, each))), "")

    def place(self, config: TrainConfig, shape: ModelShape) -> Machine:
        size = download_bytes(shape, config) if self.downloads(config) else 0
        return beside_download(self.machine, size)

    def least(self, config: TrainConfig, shape: ModelShape) -> Requirements | None:
        """Returns the least that a job takes, or None for one that contradicts the model."""
        try:
            return minimum_requirements(config, self.place(config, shape), shape)
        except ConfigError:
            return None


def _first_too_large(known: Sequence[Known], config: TrainConfig, jobs: _Jobs) -> int:
    """Returns the place of the first model that does not fit. Larger ones are taken not to fit
    either, so that a dozen of plans suffice.
    """
    low, high = 0, len(known)
    while low < high:
        middle = (low + high) // 2
        entry, shape = known[middle]
        if _fits(jobs.least(_with_model(config, card_id(entry)), shape)):
            low = middle + 1
        else:
            high = middle
    return low


def _with_model(config: TrainConfig, source: str) -> TrainConfig:
    return replace(config, model=replace(config.model, source=source))


def _spread(known: Sequence[Known], count: int) -> list[Known]:
    """Returns so many of them at even distances, the last one included."""
    if len(known) <= count:
        return list(known)
    return [known[(number + 1) * len(known) // count - 1] for number in range(count)]


def _fits(least: Requirements | None) -> bool:
    return least is not None and least.status() != FitStatus.DOES_NOT_FIT


def _example_cards(example: TrainConfig, jobs: _Jobs) -> list[dict[str, Any]]:
    """Returns the card of the model of an example; none where settings contradict it."""
    source = example.model.source.strip()
    try:
        shape = shape_of_run(example)
    except RamstreamError:
        return []
    numbers = f"{in_count(shape.parameter_count)} parameters"
    fit = _fit(example, shape, jobs)
    return [_shown(source, (source,), fit, f"{numbers} · {FOR_THE_EXAMPLE}") | {"is_example": True}]


def _card(
    entry: CatalogEntry, shape: ModelShape, config: TrainConfig, jobs: _Jobs
) -> dict[str, Any]:
    here = jobs.source_here(entry, config)
    source = config.model.source if _is_of(config, entry) else here or card_id(entry)
    job = _with_model(config, source)
    is_download = jobs.downloads(job)
    size = f"{size_text(download_bytes(shape, config))} download"
    note = size if is_download else "on this machine"
    card = _shown(source, (entry.id, *entry.also), _fit(job, shape, jobs), note)
    return card | {"is_download": is_download}


def _shown(source: str, ids: Sequence[str], fit: tuple[bool, str], note: str) -> dict[str, Any]:
    return {
        "id": source,
        "ids": list(ids),
        "title": model_title(source),
        "fits": fit[0],
        "text": fit[1],
        "note": note,
        "is_example": False,
        "is_download": False,
        "is_to_be_had": True,
    }


def _fit(config: TrainConfig, shape: ModelShape, jobs: _Jobs) -> tuple[bool, str]:
    """Returns whether a job fits, and the memory that it takes or lacks in words."""
    least = jobs.least(config, shape)
    if least is None:
        return False, "cannot be trained so"
    if not _fits(least):
        lacks = [
            f"{in_bytes(part.total - part.known_limit)} more {PART_WORDS[name]}"
            for name, part in least.parts.items()
            if part.status == FitStatus.DOES_NOT_FIT
        ]
        return False, f"needs {', '.join(lacks)}"
    # Not the least that it takes: a plan uses free memory to be faster.
    host = requirements_of(config, jobs.place(config, shape), shape).parts[PartName.HOST]
    return True, f"fits · {in_bytes(host.total)} RAM"
