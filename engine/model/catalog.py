"""Shapes of some models are bundled, so that what these models take is known without a network, and
without torch or transformers. They are published models (`assets/models.json`) and the starter
(`assets/starter-shape.json`).

The facts are those of the models' own configurations; the counts are what `engine.model.shape`
gives for them on the meta device, written by `assets/make/models.py`.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.model.shape import ModelShape
from engine.model.shape_rows import unpack
from engine.paths import PROGRAM_ROOT

FILE = PROGRAM_ROOT / "assets" / "models.json"
STARTER_FILE = PROGRAM_ROOT / "assets" / "starter-shape.json"


@dataclass(frozen=True, eq=False)
class CatalogEntry:
    """An entry describes a published model, and others of exactly its shape."""

    id: str
    """The model whose configuration `config` is has this id on the Hugging Face hub."""
    also: tuple[str, ...]
    """Models of these ids have the same shape."""
    contexts: Mapping[str, int]
    """Some of `also` differ in the longest row: these have their own max_position_embeddings."""
    title: str
    family: str
    published: str
    """The publisher gives this many parameters, such as 7.61B. It is the hub's count where the
    publisher rounds to 7B.
    """
    published_active: str | None
    """A token passes through this many parameters of a mixture of experts; None for dense models.
    """
    source: str
    """The configuration is published at this address."""
    config: Mapping[str, Any]
    """The shape depends on these values, which `transformers.AutoConfig.for_model` takes."""
    _shape: Mapping[str, Any] = field(repr=False)

    def config_of(self, model_id: str) -> dict[str, Any]:
        """Returns `config` as it is for `model_id`, which is this model or one of `also`."""
        config = dict(self.config)
        for known, positions in self.contexts.items():
            if known.lower() == model_id.lower():
                config["max_position_embeddings"] = positions
        return config

    def shape(
        self, dtype: str = "bfloat16", attention: str = "auto", source: str | None = None
    ) -> ModelShape | None:
        """Returns the shape of this model, or of `source` if that is one of `also`.

        Returns None where no counts are bundled: for another attention than `auto`, or for a model
        that is too large to be counted in float32.
        """
        if attention != "auto":
            return None
        source = source or self.id
        positions = self.config_of(source).get(
            "max_position_embeddings", self._shape["max_position_embeddings"]
        )
        return unpack(self._shape, dtype, source, max_position_embeddings=positions)


@functools.cache
def catalog() -> tuple[CatalogEntry, ...]:
    """Reads all bundled models, family by family, in the order of the file."""
    with FILE.open(encoding="utf-8") as file:
        return tuple(
            CatalogEntry(
                id=row["id"],
                also=(*row["also"], *row["contexts"]),
                contexts=row["contexts"],
                title=row["title"],
                family=row["family"],
                published=row["published"],
                published_active=row["published_active"],
                source=row["source"],
                config=row["config"],
                _shape=row["shape"],
            )
            for row in json.load(file)["models"]
        )


@functools.cache
def _by_id() -> dict[str, CatalogEntry]:
    """Returns the entries by all of their ids, in lower case."""
    return {known.lower(): entry for entry in catalog() for known in (entry.id, *entry.also)}


def entry_of(source: str) -> CatalogEntry | None:
    """Returns the entry of a hub id, in whatever case it is written; None if there is none."""
    return _by_id().get(source.strip().lower())


def catalog_shape(
    source: str, dtype: str = "bfloat16", attention: str = "auto"
) -> ModelShape | None:
    """Returns the bundled shape of the hub id `source`, which becomes its name.

    Returns None for what the catalog does not answer.
    """
    entry = entry_of(source)
    return None if entry is None else entry.shape(dtype, attention, source.strip())


def starter_shape(config: bytes, dtype: str, attention: str, source: str) -> ModelShape | None:
    """Returns the bundled shape of the starter, named `source`, if `config` is what the starter's
    config.json holds. So a copy of its folder is answered as well.

    Returns None for any other content, and for another attention than `auto`.
    """
    if attention != "auto" or hashlib.sha256(config).hexdigest() != _starter()["config_sha256"]:
        return None
    return unpack(_starter()["shape"], dtype, source)


@functools.cache
def _starter() -> dict[str, Any]:
    return json.loads(STARTER_FILE.read_text(encoding="utf-8"))
