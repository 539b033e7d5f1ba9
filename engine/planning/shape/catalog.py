"""Shapes of some models are bundled, so that the memory needs of these models are known without a
network, torch or transformers. They are published models (`assets/models.json`) and the starter
(`assets/starter-shape.json`).

The facts come from the models' own configurations. The counts are computed by
`engine.planning.shape.model_shape` on the meta device, and written by `assets/make/models.py`. Of a
model that also reads images or sound, they are those of its language model; what is not trained of
it is counted beside.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from engine.config.adapters import Adapters
from engine.paths import PROGRAM_ROOT
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.serialize import unpack, with_adapters

FILE = PROGRAM_ROOT / "assets" / "models.json"
STARTER_FILE = PROGRAM_ROOT / "assets" / "starter-shape.json"


@dataclass(frozen=True, eq=False)
class CatalogEntry:
    """An entry describes a published model, and others with exactly the same shape."""

    id: str
    """The Hugging Face hub id of the model whose configuration is `config`."""
    also: tuple[str, ...]
    """Ids of models with the same shape."""
    contexts: Mapping[str, int]
    """The max_position_embeddings of those models in `also` that differ in the longest row."""
    title: str
    family: str
    published: str
    """The number of parameters stated by the publisher, such as 7.61B, or the hub's count if the
    publisher rounds to 7B: of the whole checkpoint.
    """
    published_active: str | None
    """Parameters that a token passes through in a mixture of experts; None for dense models."""
    unread: int
    """Number of further parameters of the checkpoint that transformers does not read: those of a
    draft model, or keys and values of layers that take them from another one. An export copies
    them.
    """
    source: str
    """Address at which the configuration is published."""
    config: Mapping[str, Any]
    """Values on which the shape depends, which are arguments of
    `transformers.AutoConfig.for_model`.
    """
    _shape: Mapping[str, Any] = field(repr=False)
    _adapters: Mapping[str, Any] = field(repr=False)

    def config_of(self, model_id: str) -> dict[str, Any]:
        """Returns the values of `config` for `model_id`, which is this model or one of `also`."""
        config = copy.deepcopy(dict(self.config))
        positions = self._own_positions(model_id)
        if positions is not None:
            config.get("text_config", config)["max_position_embeddings"] = positions
        return config

    def _own_positions(self, model_id: str) -> int | None:
        """Returns the longest row of one of `contexts`, and None for any other model."""
        known = {other.lower(): positions for other, positions in self.contexts.items()}
        return known.get(model_id.lower())

    def shape(
        self,
        dtype: str = "bfloat16",
        attention: str = "auto",
        source: str | None = None,
        adapters: Adapters | None = None,
    ) -> ModelShape | None:
        """Returns the shape of this model, or of `source` if that is one of `also`, with these
        adapters.

        Returns None if no counts are bundled: for an attention other than `auto`, for adapters that
        are not plain, or for a model that is too large to be counted in float32.
        """
        if attention != "auto":
            return None
        source = source or self.id
        positions = self._own_positions(source) or self._shape["max_position_embeddings"]
        whole = unpack(self._shape, dtype, source, max_position_embeddings=positions)
        if whole is not None and self.unread:
            whole = replace(whole, untouched_numel=whole.untouched_numel + self.unread)
        return _with(whole, adapters, self._adapters)


def _with(
    whole: ModelShape | None, adapters: Adapters | None, row: Mapping[str, Any]
) -> ModelShape | None:
    """Returns a shape with these adapters. row: the row of adapters of the model."""
    if whole is None or adapters is None:
        return whole
    return with_adapters(whole, row, adapters.rank) if adapters.is_plain else None


@functools.cache
def catalog() -> tuple[CatalogEntry, ...]:
    """Returns all bundled models, family by family, in file order."""
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
                unread=row.get("unread", 0),
                source=row["source"],
                config=row["config"],
                _shape=row["shape"],
                _adapters=row["adapters"],
            )
            for row in json.load(file)["models"]
        )


@functools.cache
def _by_id() -> dict[str, CatalogEntry]:
    """Returns a map from every id, in lower case, to its entry."""
    return {known.lower(): entry for entry in catalog() for known in (entry.id, *entry.also)}


def entry_of(source: str) -> CatalogEntry | None:
    """Returns the entry of a hub id, ignoring case; None if there is none."""
    return _by_id().get(source.strip().lower())


def catalog_shape(
    source: str,
    dtype: str = "bfloat16",
    attention: str = "auto",
    adapters: Adapters | None = None,
) -> ModelShape | None:
    """Returns the bundled shape of the hub id `source`, with `source` as its name.

    Returns None if the catalog has no such shape.
    """
    entry = entry_of(source)
    return None if entry is None else entry.shape(dtype, attention, source.strip(), adapters)


def starter_shape(
    config: bytes, dtype: str, attention: str, source: str, adapters: Adapters | None = None
) -> ModelShape | None:
    """Returns the bundled shape of the starter, with `source` as its name, if `config` equals the
    content of the starter's config.json. So this works for a copy of its folder as well.

    Returns None for any other content, for an attention other than `auto`, and for adapters that
    are not plain.
    """
    if attention != "auto" or hashlib.sha256(config).hexdigest() != _starter()["config_sha256"]:
        return None
    return _with(unpack(_starter()["shape"], dtype, source), adapters, _starter()["adapters"])


@functools.cache
def _starter() -> dict[str, Any]:
    return json.loads(STARTER_FILE.read_text(encoding="utf-8"))
