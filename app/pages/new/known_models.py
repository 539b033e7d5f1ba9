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

_KINDS = re.compile(r"-(instruct|it|chat|base|pt|hf)\b")
_TUNED = {"instruct": "Instruct", "it": "Instruct", "chat": "Chat"}
"""Words in the ids of models that were tuned to answer, and what lists say of them."""
_BASES = ("base", "pt")
_PICTURES = re.compile(r"VLM?$|InternVL")
"""Families of models whose task is to look at pictures."""


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
    return sorted(([each, _listed(each)] for each in _ids()), key=lambda row: row[0].lower())


def _listed(source: str) -> str:
    """Returns the name of a model in a list where others of its shape stand, too."""
    kind = _kind(source)
    words = _TUNED.get(kind) or ("base" if kind in _BASES else "")
    title = model_title(source)
    is_said = not words or words.lower() in title.lower()
    return title if is_said else f"{title} {words}"


def _kind(source: str) -> str:
    """Returns the word in an id for how the model was tuned, or an empty text."""
    found = _KINDS.findall(source.strip().lower())
    return next((word for word in found if word in _TUNED or word in _BASES), "")


def _ids() -> Iterator[str]:
    for entry in catalog():
        yield from (entry.id, *entry.also)


def card_id(entry: CatalogEntry) -> str:
    """Returns the id that stands for a model of the catalog: of the one that was tuned to answer,
    where there is one. Models for other tasks that have the same shape are none of those.
    """
    same = (each for each in (entry.id, *entry.also) if _plain(each) == _plain(entry.id))
    return next((each for each in same if _kind(each) in _TUNED), entry.id)


def is_offered(entry: CatalogEntry) -> bool:
    """Returns whether a model is offered for data that are texts: those that were made to look at
    pictures are not. A person may name any.
    """
    return _PICTURES.search(entry.family) is None


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
    """Returns a sentence on the model of an example that is to learn other data, to which what to
    do is added, or an empty text.
    """
    example = example_on_other_data(config)
    if example is None:
        return ""
    name = example.title[:1].lower() + example.title[1:]
    return f"The {name} only knows its example."
