"""The models of the catalog, those of the examples, and this machine as texts."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator

from app.form.examples import example_of, example_on_other_data
from app.form.source_names import short_name
from app.labels import in_bytes
from engine.config.settings import TrainConfig
from engine.machine.read_machine import Machine
from engine.planning.shape.catalog import CatalogEntry, catalog, entry_of
from engine.text import counted

_CHAT = ("-instruct", "-it")
"""Ends of the ids of models that were tuned to answer."""
_KINDS = re.compile(r"-(instruct|it|chat|base|pt|hf)\b")


def machine_text(machine: Machine) -> str:
    """Returns one line that describes a machine, without what changes while a page is open."""
    cores = counted(machine.cpu_cores, "CPU core")
    gpus = ", ".join(f"{gpu.name} ({in_bytes(gpu.total)})" for gpu in machine.gpus)
    return f"{cores} · {in_bytes(machine.ram_limit)} of RAM · {gpus or 'no GPU'}"


@functools.cache
def known_models() -> list[list[str]]:
    """Returns the hub id and the title of every model whose shape is bundled.

    The fit panel of such a model needs no request to the hub.
    """
    return sorted(([each, model_title(each)] for each in _ids()), key=lambda row: row[0].lower())


def _ids() -> Iterator[str]:
    for entry in catalog():
        yield from (entry.id, *entry.also)


def card_id(entry: CatalogEntry) -> str:
    """Returns the id that stands for a model of the catalog: of the one that was tuned to answer,
    where there is one.
    """
    return next((each for each in entry.also if each.lower().endswith(_CHAT)), entry.id)


def model_title(source: str) -> str:
    """Returns the name of a model wherever it is told: on its card, in the Summary and in lists."""
    example = example_of(source)
    if example is not None:
        return example.title
    entry = entry_of(source)
    if entry is not None and _plain(source) == _plain(entry.id):
        return entry.title
    return short_name(source)  # another model of the same shape, or one that is not known


def _plain(source: str) -> str:
    """Returns an id without the words for the kind of tuning, which have no part in a title."""
    return _KINDS.sub("", source.strip().lower())


def remark_on_example(config: TrainConfig) -> str:
    """Returns a sentence on the model of an example that is to learn other data, or an empty
    text.
    """
    example = example_on_other_data(config)
    if example is None:
        return ""
    name = example.title[:1].lower() + example.title[1:]
    return f"The {name} only knows its example. Choose another model."
