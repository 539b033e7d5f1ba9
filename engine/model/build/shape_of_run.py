"""The shape of the model of a run, with the rows of tokens and the positions that the user adds.

The tokenizer has the number of rows that they need. Where it is not on this machine, they are not
counted: many models have spare rows, and a row takes a few kilobytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config.rope_settings import ROPE_SCALING, positions_with, refuse_longer_rows
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import ConfigError
from engine.model.build.added_tokens import add_tokens
from engine.model.build.find_shape import shape_from_source
from engine.model.hub.hub import is_fetched
from engine.model.hub.hub_cache import cached_config
from engine.paths import resolve_source
from engine.planning.shape.model_shape import ModelShape


def shape_of_run(config: TrainConfig) -> ModelShape:
    """Returns the shape of the model that a run of these settings trains. Raises ModelError, in one
    sentence, for a source that cannot be read or a model that cannot be streamed, and ConfigError
    for what the model lacks.
    """
    shape = shape_from_source(config.model, config.train.parts)
    if config.data.add_tokens:
        needed = _needed(config.model.source.strip(), config.data.add_tokens)
        if needed > shape.vocab_size:
            shape = shape_from_source(config.model, config.train.parts, needed)
    return _with_positions(shape, config)


def _with_positions(shape: ModelShape, config: TrainConfig) -> ModelShape:
    """Returns the shape with the positions that scaled rotary embeddings give the model."""
    model, own = config.model, shape.max_position_embeddings
    if model.rope_scaling == "none":
        return shape
    folder = _folder_of(model.source.strip())
    if folder is not None:
        _refuse_scaling(model, _stamp(folder / "config.json"))
    if shape.learned_positions or own is None:
        raise ConfigError(
            ROPE_SCALING, f"{shape.model_type} has no rotary embeddings; set it to none."
        )
    refuse_longer_rows(model, config.data.max_seq_len, own)
    return replace(shape, max_position_embeddings=positions_with(model, own))


@functools.lru_cache(maxsize=16)
def _refuse_scaling(model: ModelConfig, _stamp: int) -> None:
    """Raises ConfigError for a model whose rotary embeddings cannot be scaled. _stamp: when its
    configuration was changed.
    """
    # transformers brings torch.
    from engine.model.build.read_model import configured

    configured(model)


def _needed(source: str, tokens: Sequence[str]) -> int:
    """Returns how many rows the tokens need; 0 where their tokenizer is not on this machine."""
    path = _folder_of(source)
    if path is None:
        return 0
    stamps = [_stamp(path / name) for name in ("tokenizer.json", "tokenizer_config.json")]
    return _read(source, tuple(tokens), tuple(stamps))


def _folder_of(source: str) -> Path | None:
    """Returns the folder with the files of a model; None where they are not on this machine."""
    path = resolve_source(source)
    if path is not None:
        return path
    file = cached_config(source)
    return file.parent if file is not None and is_fetched(source) else None


def _stamp(file: Path) -> int:
    """Returns when a file was changed, in nanoseconds; 0 where there is none."""
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=16)
def _read(source: str, tokens: tuple[str, ...], _stamps: tuple[int, ...]) -> int:
    """Returns the same, from the tokenizer. _stamps: when its files were changed."""
    # transformers brings torch, which a check of a model alone need not load.
    from engine.model.build.pretrained_files import load_tokenizer

    return add_tokens(load_tokenizer(source), tokens).vocabulary
