"""`shape_from_source` returns the shape of a model, which follows from its configuration alone.

It comes from the first of these sources that knows it:

- the shapes that this process has found before, as long as the configuration file is the same;
- the catalog, for a published model without a copy on this machine;
- the bundled shape of the starter;
- the file kept when this machine built the model before (engine/planning/shape/shape_cache.py);
- the model itself, built on the meta device and measured. Only this needs torch, which is imported
  at that point.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError, ModelError
from engine.model.hub.hub_cache import cached_config
from engine.model.hub.model_files import read_small
from engine.paths import resolve_source
from engine.planning.shape.catalog import catalog_shape, starter_shape
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.shape_cache import keep_shape, kept_shape, shape_key

FAILURE_SECONDS = 20.0
"""Seconds within which a source that failed is not tried again, because a form makes a request on
every keystroke.
"""

_KNOWN_SHAPES = 64
"""Number of shapes that a process remembers."""
_known: dict[_Key, ModelShape] = {}
_failures: dict[_Key, tuple[float, str]] = {}
"""The time and the sentence of the last failure for each key."""
_remembering = threading.Lock()
_building = threading.Lock()
"""Lock, so that one thread builds at a time."""


@dataclass(frozen=True)
class _Key:
    """All that decides a remembered shape."""

    source: str
    path: Path | None
    digest: bytes | None
    """SHA-256 of the configuration; None if it cannot be read on this machine."""
    dtype: str
    attention: str
    parts: Parts | Adapters | None
    """Parts that are trained; None where the whole model is."""
    vocabulary: int | None
    """Number of tokens for which the model has rows; None where its own configuration has it."""


@dataclass(frozen=True)
class _Place:
    """Where a source is on this machine: a local path, a configuration file, both or neither."""

    path: Path | None
    file: Path | None
    """File from which the configuration is read."""


def shape_from_source(
    model: ModelConfig, parts: Parts | Adapters | None = None, vocabulary: int | None = None
) -> ModelShape:
    """Returns the shape of `model.source`, and remembers it until the configuration file changes.
    parts: those that are trained, None for all. vocabulary: the model has rows for this many
    tokens, None for its own number. A shape with parts, or with adapters that are not
    plain, is measured, since only the model itself has names of parameters.

    The shape of a published model comes from the catalog, unless there is a copy on this machine: a
    folder with that name, or a configuration in the Hugging Face cache. Raises ModelError, in one
    sentence, for a source that cannot be read or a model that cannot be streamed, and ConfigError
    for parts that the model lacks.
    """
    source = model.source.strip()
    place = _place_of(source)
    key = _Key(source, place.path, None, model.dtype, model.attention, parts, vocabulary)
    is_elsewhere = place.file is None and place.path is None
    if is_elsewhere and not isinstance(parts, Parts) and vocabulary is None:
        bundled = catalog_shape(source, model.dtype, model.attention, parts)
        if bundled is not None:
            return bundled
    content = _content(place.file)
    digest = None if content is None else hashlib.sha256(content).digest()
    key = replace(key, digest=digest)
    known = _known.get(key)
    if known is not None:
        return known
    ready = _without_torch(content, key)
    return _build_once(key, model) if ready is None else _remember(key, ready)


def adapted_shape(model: ModelConfig, adapters: Adapters) -> ModelShape | None:
    """Returns the shape of `model.source` with these adapters, without a network.

    Returns None for a model of which nothing is on this machine or in the catalog, and for one that
    has no layers for adapters.
    """
    source = model.source.strip()
    place = _place_of(source)
    if place.file is None and place.path is None:
        return catalog_shape(source, model.dtype, model.attention, adapters)
    try:
        return shape_from_source(model, adapters)
    except (ModelError, ConfigError):
        return None


def _place_of(source: str) -> _Place:
    """Returns where the configuration of `source` is on this machine."""
    path = resolve_source(source)
    if path is None:
        return _Place(None, cached_config(source))
    if path.is_dir():
        return _Place(path, path / "config.json")
    return _Place(path, path if path.suffix == ".json" else None)


def _content(file: Path | None) -> bytes | None:
    """Returns the bytes of a file, or None if it cannot be read. Loading the configuration then
    reports why.
    """
    try:
        return None if file is None else read_small(file)
    except OSError:
        return None


def _without_torch(content: bytes | None, key: _Key) -> ModelShape | None:
    """Returns the shape that is bundled or kept for a configuration with these bytes."""
    if content is None:
        return None
    if not isinstance(key.parts, Parts) and key.vocabulary is None:
        bundled = starter_shape(content, key.dtype, key.attention, key.source, key.parts)
        if bundled is not None:
            return bundled
    kept = _kept_under(content, key)
    return None if kept is None else kept_shape(kept, key.dtype, key.source)


def _kept_under(content: bytes, key: _Key) -> str | None:
    """Returns the name of the file in which a shape is kept, or None if it cannot be kept."""
    decided = None if key.vocabulary is None else {"vocabulary": key.vocabulary}
    return shape_key(content, key.dtype, key.attention, key.parts, decided)


def _build_once(key: _Key, model: ModelConfig) -> ModelShape:
    """Builds the model, and remembers the shape or the failure by `key`."""
    with _building:
        # Another thread may have built it while this one waited.
        known = _known.get(key)
        if known is not None:
            return known
        failed = _failures.get(key)
        if failed is not None and time.monotonic() - failed[0] < FAILURE_SECONDS:
            raise ModelError(failed[1])
        try:
            return _remember(key, _build(model, key))
        except ModelError as error:
            _failures.clear()
            _failures[key] = (time.monotonic(), str(error))
            raise


def _remember(key: _Key, shape: ModelShape) -> ModelShape:
    """Remembers a shape, and returns the one remembered under `key`: another thread may have been
    faster.
    """
    with _remembering:
        while len(_known) >= _KNOWN_SHAPES:
            oldest = next(iter(_known))
            del _known[oldest]
        return _known.setdefault(key, shape)


def _build(model: ModelConfig, key: _Key) -> ModelShape:
    """Builds the model on the meta device and measures it.

    The shape is kept for later processes if the configuration has not changed since it was read.
    """
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of
    from engine.model.build.pretrained_files import load_config, with_vocabulary

    source = model.source.strip()
    place = _place_of(source)
    file = place.file
    content = _content(file)
    if place.path is None and file is not None:
        # A configuration in the Hugging Face cache is read from its folder there: the configuration
        # on the hub may have changed.
        config = load_config(str(file.parent))
    else:
        config = load_config(source)
    if place.path is None and file is None:  # it came from the hub, and is in the cache now
        file = _place_of(source).file
        content = _content(file)
    if key.vocabulary is not None:
        config = with_vocabulary(config, key.vocabulary)
    shape = shape_of(build_model(config, replace(model, source=source), key.parts), source)
    kept = None if content is None else _kept_under(content, key)
    if kept is not None and _content(file) == content:
        keep_shape(kept, shape)
    return shape
