"""What autograd keeps for the blocks of a model is counted once for all tests that run the model.

A third of the time of a run with a tiny model goes into this count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from engine.model.build import activations, measure_shape
from engine.model.build.activations import Counted
from engine.model.build.units import StreamedModel
from engine.planning.shape.sequence_tiling import TiledBlock

_counted: dict[Any, list[Counted] | None] = {}
_tiled: dict[Any, list[TiledBlock | None]] = {}


def counting_once() -> Iterator[None]:
    """Gives a scope in which models that are alike in all that is counted are counted once."""

    def count(model: StreamedModel) -> list[Counted] | None:
        key = _all_that_counts(model)
        if key not in _counted:
            _counted[key] = activations.count_activations(model)
        return _counted[key]

    measured = measure_shape.tiled_blocks

    def measure(model: StreamedModel) -> list[TiledBlock | None]:
        key = _all_that_counts(model)
        if key not in _tiled:
            _tiled[key] = measured(model)
        return _tiled[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_shape, "count_activations", count)
        patch.setattr(measure_shape, "tiled_blocks", measure)
        yield


def _all_that_counts(model: StreamedModel) -> tuple:
    """Returns the configuration of a model, its modules, and how its parameters are trained."""
    config = model.skeleton.model.config
    settings = {**config.to_dict(), "_name_or_path": ""}  # each test has a folder of its own
    return (
        repr(settings),
        config.get_text_config()._attn_implementation,
        model.dtype,
        repr(model.skeleton.model),
        tuple((repr(unit.block), activations.block_shapes(model, unit)) for unit in model.blocks),
    )
