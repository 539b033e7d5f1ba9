"""`shape_from_source`: the shape of a model from its configuration. It takes what is bundled or was
built before, or builds the model on the meta device and remembers its shape. No torch at import.
"""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace
from pathlib import Path

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.catalog import catalog_shape, starter_shape
from engine.model.hub_cache import cached_config
from engine.model.kept_shapes import keep_shape, kept_shape, shape_key
from engine.model.shape import ModelShape
from engine.paths import resolve_source

FAILURE_SECONDS = 20.0
"""A source that failed is not asked for again sooner: a form asks on every keystroke."""


def shape_from_source(model: ModelConfig) -> ModelShape:
    """The shape of `model.source`, from its configuration alone; remembered until the file changes.
    A published model is answered by the catalog, without torch, unless there is a copy of it here:
    a folder of that name, or a configuration in the Hugging Face cache. Nor does it take torch for
    the bundled starter, or for what was built on this machine before.

    Raises ModelError in one sentence for a source that cannot be read or a model that cannot be
    streamed.
    """
    source = model.source.strip()
    path, file = _configuration(source)
    if file is None and path is None:
        bundled = catalog_shape(source, model.dtype, model.attention)
        if bundled is not None:
            return bundled
    content = _content(file)
    key = (
        source,
        path,
        None if content is None else hashlib.sha256(content).digest(),
        model.dtype,
        model.attention,
    )
    known = _known.get(key)
    if known is None:
        ready = _without_torch(content, source, model)
        known = _build_once(key, model) if ready is None else _remember(key, ready)
    return known


_KNOWN_SHAPES = 64
_known: dict[tuple, ModelShape] = {}
_remembering, _building = threading.Lock(), threading.Lock()
_failures: dict[tuple, tuple[float, str]] = {}


def _configuration(source: str) -> tuple[Path | None, Path | None]:
    """(the local path that `source` names, the file that its configuration is read from), None for
    what is not here.
    """
    path = resolve_source(source)
    if path is None:
        return None, cached_config(source)
    return path, path / "config.json" if path.is_dir() else path if path.suffix == ".json" else None


def _content(file: Path | None) -> bytes | None:
    """None for what cannot be read: whoever loads the configuration says why."""
    try:
        return file.read_bytes() if file is not None and file.is_file() else None
    except OSError:
        return None


def _without_torch(content: bytes | None, source: str, model: ModelConfig) -> ModelShape | None:
    """What is bundled or kept for a configuration of these bytes."""
    if content is None:
        return None
    bundled = starter_shape(content, model.dtype, model.attention, source)
    if bundled is not None:
        return bundled
    key = shape_key(content, model.dtype, model.attention)
    return None if key is None else kept_shape(key, model.dtype, source)


def _build_once(key: tuple, model: ModelConfig) -> ModelShape:
    """Built by one thread at a time; `key` is what the answer, or the failure, is remembered by."""
    with _building:
        known = _known.get(key)  # another thread may have built it meanwhile
        if known is not None:
            return known
        failed = _failures.get(key)
        if failed is not None and time.monotonic() - failed[0] < FAILURE_SECONDS:
            raise ModelError(failed[1])
        try:
            return _remember(key, _build(model))
        except ModelError as error:
            _failures.clear()
            _failures[key] = (time.monotonic(), str(error))
            raise


def _remember(key: tuple, shape: ModelShape) -> ModelShape:
    with _remembering:
        while len(_known) >= _KNOWN_SHAPES:
            del _known[next(iter(_known))]
        return _known.setdefault(key, shape)


def _build(model: ModelConfig) -> ModelShape:
    """On the meta device, and kept for later processes if what was read is still what is there."""
    from engine.model.build import build_model
    from engine.model.measure_shape import shape_of
    from engine.model.pretrained_files import load_config

    source = model.source.strip()
    path, file = _configuration(source)
    content = _content(file)
    # From the Hugging Face cache it is read as the folder that it is in: the hub's own may be
    # another by now.
    config = load_config(source if path is not None or file is None else str(file.parent))
    if path is None and file is None:  # it came from the hub, which leaves it in the cache
        file = _configuration(source)[1]
        content = _content(file)
    shape = shape_of(build_model(config, replace(model, source=source)), source)
    key = None if content is None else shape_key(content, model.dtype, model.attention)
    if key is not None and _content(file) == content:
        keep_shape(key, shape)
    return shape
