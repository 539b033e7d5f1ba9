"""Published models whose shapes are bundled (`assets/models.json`), so that what they take is known without a network,
and without torch or transformers.

The facts are those of the models' own configurations; the counts are what `engine.shape` gives for them on the meta
device, written by `assets/make_models.py`.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.layout import Activations
from engine.paths import PROGRAM_ROOT
from engine.plan import EMBED, HEAD
from engine.shape import ModelShape, UnitShape

FILE = PROGRAM_ROOT / "assets" / "models.json"

MODEL_FIELDS = ("model_type", "attention", "tied", "packs", "hidden_size", "vocab_size", "active_parameters",
                "max_position_embeddings", "learned_positions", "sliding_window", "mask_kinds", "argument_numel",
                "attention_heads", "attention_width")
"""Fields of ModelShape that are the same in every dtype. Units are kept by kind."""

ACTIVATION_FIELDS = ("activations", "masked_activations", "compiled_activations")


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
    """Parameters as the publisher gives them, such as 7.61B; the hub's count where the publisher rounds to 7B."""
    published_active: str | None
    """Parameters that a token passes through, of a mixture of experts."""
    source: str
    """Where the configuration is published."""
    config: Mapping[str, Any]
    """What the shape depends on, for `transformers.AutoConfig.for_model`."""
    _shape: Mapping[str, Any] = field(repr=False)

    def config_of(self, model_id: str) -> dict[str, Any]:
        """`config` of this model, or of one of `also`."""
        positions = {known.lower(): count for known, count in self.contexts.items()}.get(model_id.lower())
        return dict(self.config) | ({} if positions is None else {"max_position_embeddings": positions})

    def shape(self, dtype: str = "bfloat16", attention: str = "auto", source: str | None = None) -> ModelShape | None:
        """The shape of this model, or of `source` if that is one of `also`; None where no counts are bundled: another
        attention than `auto`, or a model too large to be counted in float32."""
        if attention != "auto" or dtype not in self._shape["logit_bytes"]:
            return None
        source = source or self.id
        values = {name: self._shape[name] for name in MODEL_FIELDS}
        values["max_position_embeddings"] = self.config_of(source).get("max_position_embeddings",
                                                                       values["max_position_embeddings"])
        units = [kind for kind, count in self._shape["units"] for _ in range(count)]
        names = (EMBED, *(f"block {position}" for position in range(len(units) - 2)), HEAD)
        return ModelShape(source=source, dtype=dtype, logit_bytes=self._shape["logit_bytes"][dtype], **values, units=tuple(
            _unit(name, self._shape["kinds"][kind], dtype) for name, kind in zip(names, units, strict=True)))


def _unit(name: str, kind: Mapping[str, Any], dtype: str) -> UnitShape:
    """`kind` gives the bytes of activations in each dtype: per token and per pair, plain, masked and compiled."""
    counts = kind.get(dtype)
    activations = {} if counts is None else {
        field_name: Activations(*counts[2 * place:2 * place + 2]) for place, field_name in enumerate(ACTIVATION_FIELDS)}
    return UnitShape(name, kind["numel"], kind["parameters"], kind["widest"], **activations)


@functools.cache
def catalog() -> tuple[CatalogEntry, ...]:
    """All bundled models, family by family, in the order of the file."""
    with FILE.open(encoding="utf-8") as file:
        return tuple(CatalogEntry(
            row["id"], (*row["also"], *row["contexts"]), row["contexts"], row["title"], row["family"], row["published"],
            row["published_active"], row["source"], row["config"], row["shape"]) for row in json.load(file)["models"])


@functools.cache
def _by_id() -> dict[str, CatalogEntry]:
    return {known.lower(): entry for entry in catalog() for known in (entry.id, *entry.also)}


def entry_of(source: str) -> CatalogEntry | None:
    """The entry of a hub id, in whatever case it is written; None for what is not in the catalog."""
    return _by_id().get(source.strip().lower())


def catalog_shape(source: str, dtype: str = "bfloat16", attention: str = "auto") -> ModelShape | None:
    """The bundled shape of a hub id, named as `source` is; None for what the catalog does not answer."""
    entry = entry_of(source)
    return None if entry is None else entry.shape(dtype, attention, source.strip())


def cached_config(source: str) -> Path | None:
    """The configuration of this model in the Hugging Face cache, or None. It is the truth where it differs from the
    catalog, and reading it needs no network.

    The folders are those of huggingface_hub (its cache is documented at
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache), whose own functions take longer to import than a
    bundled shape takes to answer.
    """
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.path.expandvars(own or os.path.join(home, "hub"))).expanduser()
    model = hub / f"models--{source.strip().replace('/', '--')}"
    try:
        revision = (model / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    file = model / "snapshots" / revision / "config.json"
    return file if file.is_file() else None
