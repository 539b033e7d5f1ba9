"""Models whose shapes are bundled, so that what they take is known without a network, and without
torch or transformers: published ones (`assets/models.json`) and the starter
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
    """A published model, and others of exactly its shape."""

    id: str
    """Hugging Face id of the model that `config` is of."""
    also: tuple[str, ...]
    """Ids of models with the same shape."""
    contexts: Mapping[str, int]
    """Those of `also` that differ in the longest row: their max_position_embeddings."""
    title: str
    family: str
    published: str
    """Parameters as the publisher gives them, such as 7.61B; the hub's count where the publisher
    rounds to 7B.
    """
    published_active: str | None
    """Parameters that a token passes through, of a mixture of experts."""
    source: str
    """Where the configuration is published."""
    config: Mapping[str, Any]
    """What the shape depends on, for `transformers.AutoConfig.for_model`."""
    _shape: Mapping[str, Any] = field(repr=False)

    def config_of(self, model_id: str) -> dict[str, Any]:
        """`config` of this model, or of one of `also`."""
        positions = {known.lower(): count for known, count in self.contexts.items()}.get(
            model_id.lower()
        )
        return dict(self.config) | (
            {} if positions is None else {"max_position_embeddings": positions}
        )

    def shape(
        self, dtype: str = "bfloat16", attention: str = "auto", source: str | None = None
    ) -> ModelShape | None:
        """The shape of this model, or of `source` if that is one of `also`; None where no counts
        are bundled: another attention than `auto`, or a model too large to be counted in float32.
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
    """All bundled models, family by family, in the order of the file."""
    with FILE.open(encoding="utf-8") as file:
        return tuple(
            CatalogEntry(
                row["id"],
                (*row["also"], *row["contexts"]),
                row["contexts"],
                row["title"],
                row["family"],
                row["published"],
                row["published_active"],
                row["source"],
                row["config"],
                row["shape"],
            )
            for row in json.load(file)["models"]
        )


@functools.cache
def _by_id() -> dict[str, CatalogEntry]:
    return {known.lower(): entry for entry in catalog() for known in (entry.id, *entry.also)}


def entry_of(source: str) -> CatalogEntry | None:
    """The entry of a hub id, in whatever case it is written; None for what is not in the catalog."""
    return _by_id().get(source.strip().lower())


def catalog_shape(
    source: str, dtype: str = "bfloat16", attention: str = "auto"
) -> ModelShape | None:
    """The bundled shape of a hub id, named as `source` is; None for what the catalog does not
    answer.
    """
    entry = entry_of(source)
    return None if entry is None else entry.shape(dtype, attention, source.strip())


def starter_shape(config: bytes, dtype: str, attention: str, source: str) -> ModelShape | None:
    """The bundled shape of the starter, named `source`, if `config` is what its config.json holds:
    a copy of its folder is answered as well. None for any other, and for another attention than
    `auto`.
    """
    if attention != "auto" or hashlib.sha256(config).hexdigest() != _starter()["config_sha256"]:
        return None
    return unpack(_starter()["shape"], dtype, source)


@functools.cache
def _starter() -> dict[str, Any]:
    return json.loads(STARTER_FILE.read_text(encoding="utf-8"))
