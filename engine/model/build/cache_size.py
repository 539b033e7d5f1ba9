"""How much a row's key-value cache takes for each of its tokens."""

from __future__ import annotations

import torch

from engine.model.build.activations import FusedAttention, block_shapes, first_of
from engine.model.build.library import transformers
from engine.model.build.specimens import Specimens, arguments_on_meta, on_meta
from engine.model.build.units import StreamedModel
from engine.planning.shape.activation_sizes import DOCUMENTS

_TOKENS = 61
"""Length of the row that is tried; no other dimension has this size."""


def cache_numel(model: StreamedModel) -> int:
    """Counts the elements per token of the keys and values of all blocks, as answers keep them.

    Returns 0 for a model that keeps anything else, and for one whose code reads values, which the
    meta device lacks.
    """
    if model.skeleton.model.config.get_text_config()._attn_implementation != DOCUMENTS:
        return 0
    try:
        of_blocks = _numel_of_blocks(model)
    except Exception:  # noqa: BLE001  without values, a family's code may raise anything
        return 0
    kept = [numel for numel in of_blocks if numel]
    # The last blocks may take keys and values of earlier ones.
    return sum(kept) if of_blocks[: len(kept)] == kept else 0


def _numel_of_blocks(model: StreamedModel) -> list[int]:
    """Returns the elements that each block adds to a cache of the library for a token, 0 for one
    that adds none. A block that keeps anything but keys and values of each token raises an error.
    """
    library = transformers()
    kinds = [block_shapes(model, unit) for unit in model.blocks]
    specimens = Specimens(model, kinds)
    cache = library.DynamicCache()
    found = {}
    with torch.no_grad(), FusedAttention():
        ids = torch.zeros(1, _TOKENS, dtype=torch.long)
        captured = model.skeleton.capture(ids, None, True, cache)
        (given,) = model.skeleton.caches(captured)
        if given is not cache:
            raise ValueError("The blocks are given another cache.")
        hidden = captured.hidden.to("meta")
        for kind, position in first_of(kinds).items():
            block = on_meta(model, model.blocks[position]).eval()
            arguments = arguments_on_meta(captured.arguments[position])
            try:
                specimens.run(position, arguments, block, hidden)
            except Exception:
                # What follows attention, such as products of experts, may have no kernel here.
                if position >= len(cache.layers):
                    raise
            found[kind] = 0
            if position >= len(cache.layers):
                continue
            layer = cache.layers[position]
            if type(layer) is not library.cache_utils.DynamicLayer:
                raise ValueError("A block keeps more than keys and values.")
            for tensor in (layer.keys, layer.values):
                rows, heads, tokens, width = tensor.shape
                if (rows, tokens) != (1, _TOKENS):
                    raise ValueError("A block keeps the keys of some tokens only.")
                found[kind] += heads * width
    return [found[kind] for kind in kinds]
