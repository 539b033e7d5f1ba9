"""Which attention a model can use, and whether documents that share a row stay apart: found out,
not believed.

A tiny random model of the same configuration, with the same kinds of layers, widths and windows
made small, is given documents packed into one row and each of them alone. Where loss and gradients
are equal, packing is safe. Recurrent and convolutional layers carry something from document to
document and are found here, whatever the family is called.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import threading
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from engine.model.attention import register
from engine.model.attention_masks import forward
from engine.model.layout import DOCUMENTS
from engine.model.library import empty_model

ROWS = ((19, 2, 25), (3, 30, 8))
"""Tokens of the documents of each row of the test. Under attention that picks its tokens by their
scores, the documents of some rows alone see each other.
"""
TOLERANCE = 1e-4
"""Relative difference of gradients that is still rounding; where documents see each other it is
hundreds of times larger.
"""
_VOCABULARY, _LAYERS, _HEADS, _LOCAL = 61, 4, 4, 5
_LARGEST = 80_000_000
"""Parameters of a tiny model at most: a family whose sizes go by unknown names could fill the
memory.
"""


@dataclass(frozen=True)
class Packing:
    """The outcome for one configuration. `attention`: the implementation that gives the right
    results, None where the tiny model could not tell. `problem`: why documents may not share a row,
    as the end of a sentence; empty when they may.
    """

    attention: str | None
    problem: str
    parts: frozenset[str] = frozenset()
    """Classes of the modules that took part."""
    longest: int | None = None
    """Rows may be no longer: beyond, the rotary embedding of a row's documents depends on the
    longest of them.
    """

    @property
    def safe(self) -> bool:
        return not self.problem

    def problem_of(self, row_length: int) -> str:
        """Why documents may not share rows of at most `row_length` tokens; empty when they may."""
        if self.problem or self.longest is None or row_length <= self.longest:
            return self.problem
        return f"its rotary embedding depends on the length of a row beyond {self.longest:,} tokens"

    def of(self, model: nn.Module) -> Packing:
        """The outcome for `model` itself: a part that the tiny model lacked was not tested."""
        missing = sorted(_parts(model) - self.parts)
        if missing and self.safe:
            return replace(self, problem=f"its {missing[0]} could not be tested in a small model")
        return self


def packing_of(config: Any, attention: str = "auto") -> Packing:
    """Test the family and settings of `config`, a transformers configuration. attention: `auto`
    looks for the best one that is exact. Never raises for a model that cannot be tested; takes
    about a second, once for all configurations that come to the same tiny model.
    """
    with _testing:
        try:
            tiny = shrunk(config)
            found = _packing_of(
                json.dumps(tiny.to_dict(), default=repr, sort_keys=True), attention, _Holder(tiny)
            )
        except (
            Exception
        ) as error:  # whatever a configuration class raises for values that it does not expect
            found = Packing(
                None, f"no small model of it can be made to test that ({type(error).__name__})"
            )
    return replace(found, longest=_longest_of_one_rope(config.get_text_config()))


def _longest_of_one_rope(config: Any) -> int | None:
    """Tokens up to which rotary embeddings that are made anew for longer rows (`dynamic`,
    `longrope`) stay the same.
    """
    given = getattr(config, "rope_parameters", None) or {}
    kinds = (
        [given]
        if "rope_type" in given
        else [kind for kind in given.values() if isinstance(kind, dict)]
    )
    limits = []
    for kind in kinds:
        if kind.get("rope_type") == "longrope":
            limits.append(
                kind.get("original_max_position_embeddings")
                or getattr(config, "original_max_position_embeddings", None)
                or config.max_position_embeddings
            )
        elif kind.get("rope_type") == "dynamic":
            limits.append(config.max_position_embeddings)
    return min(limits, default=None)


class _Holder:
    """Carries a configuration past a cache whose key is its text."""

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)

    def __hash__(self) -> int:
        return 0


_testing = threading.Lock()


@functools.lru_cache(maxsize=1024)
def _packing_of(_text: str, attention: str, holder: _Holder) -> Packing:
    register()
    tiny = holder.config
    if attention != "auto":
        try:
            return _tested(tiny, attention)
        except Exception as error:  # as below
            return Packing(
                None, f"a small model of it could not be run to test that ({type(error).__name__})"
            )
    truth, failure, best = None, None, None
    try:
        truth = _alone(_model(tiny, "eager"))
    except (
        Exception
    ) as error:  # whatever a family's code raises: the real model is judged when it is built
        return Packing(
            None, f"a small model of it could not be run to test that ({type(error).__name__})"
        )
    for candidate in (DOCUMENTS, "sdpa", "eager"):
        try:
            found = _tested(tiny, candidate, truth)
        except Exception as error:  # an attention that the family does not have
            failure = error
            continue
        if found is not None and (found.safe or candidate == DOCUMENTS):
            return (
                found  # no attention can help where this one does not: something else carries over
            )
        best = best or found
    return best or Packing(
        None, f"a small model of it could not be run to test that ({type(failure).__name__})"
    )


def _tested(
    tiny: Any, attention: str, truth: tuple[float, torch.Tensor] | None = None
) -> Packing | None:
    """None where single documents come out otherwise than in `truth`: this attention is not the
    family's.
    """
    model = _model(tiny, attention)
    alone = _alone(model)
    if truth is not None and not _equal(alone, truth):
        return None
    parts = frozenset(_parts(model))
    if not torch.isfinite(alone[1]).all():
        return Packing(attention, "a small model of it gave no finite numbers to compare", parts)
    packed = _gradients(
        model, [ids for ids, _ in _rows()], [[np.arange(n) for n in lengths] for lengths in ROWS]
    )
    seen = "documents that share a row see each other"
    return Packing(attention, "" if _equal(packed, alone) else seen, parts)


def _equal(ours: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> bool:
    difference = float((ours[1] - theirs[1]).norm() / theirs[1].norm())
    return difference < TOLERANCE and abs(ours[0] - theirs[0]) < TOLERANCE * abs(theirs[0])


# ---------------------------------------------------------------------- the comparison


def _rows() -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Token ids of each row, and of its documents."""
    generator = np.random.default_rng(7)
    rows = [generator.integers(3, _VOCABULARY, sum(lengths)) for lengths in ROWS]
    return [(ids, np.split(ids, np.cumsum(lengths)[:-1])) for ids, lengths in zip(rows, ROWS)]


def _alone(model: nn.Module) -> tuple[float, torch.Tensor]:
    documents = [document for _, documents in _rows() for document in documents]
    return _gradients(model, documents, [None] * len(documents))


def _gradients(
    model: nn.Module, rows: list[np.ndarray], positions: list[list[np.ndarray] | None]
) -> tuple[float, torch.Tensor]:
    """Summed loss and flat gradient of rows given one after another; each document's last token has
    no target.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    total = torch.zeros(())
    for ids, parts in zip(rows, positions):
        given = (
            {} if parts is None else {"position_ids": torch.from_numpy(np.concatenate(parts))[None]}
        )
        ends = np.cumsum([len(ids)] if parts is None else [len(p) for p in parts]) - 1
        labels = np.append(ids[1:], -100)
        labels[ends] = -100
        with torch.enable_grad():
            logits = forward(model, torch.from_numpy(ids)[None], **given).logits[0].float()
            total = total + F.cross_entropy(logits, torch.from_numpy(labels), reduction="sum")
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    return float(total.detach()), torch.cat(
        [
            torch.zeros(p.numel()) if g is None else g.reshape(-1)
            for p, g in zip(parameters, gradients)
        ]
    )


def _model(tiny: Any, attention: str) -> nn.Module:
    """A model of random weights. They come from a generator of their own: a run may be drawing from
    torch's.
    """
    model = empty_model(copy.deepcopy(tiny), torch.float32, attention)
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
        raise ValueError("the small model is large")
    generator = torch.Generator().manual_seed(3)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                noise = noise / parameter.shape[-1] ** 0.5
            else:
                noise = 0.1 * noise + (
                    1.0 if "norm" in name.lower() and not name.endswith("bias") else 0.0
                )
            made[id(parameter)] = nn.Parameter(noise)
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = made[id(parameter)]
    return model.eval()


def _parts(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}


# ---------------------------------------------------------------------- a tiny configuration

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(.*_)?vocab_size(_.*)?", _VOCABULARY),
    (
        r"(.*_)?(intermediate|ffn_hidden|feed_forward)_size(_mlp)?|(.*_)?ffn_dim|n_inner|d_inner|dff|dim_ff|d_ff",
        48,
    ),
    (r"(num_(local_|routed_)?|n_routed_|moe_num_)experts|zero_expert_num", 8),
    (r"(q|kv|o)_lora_rank", 32),
    (r"(mamba_|ssm_)?chunk_size", 16),
    (r"(n|num_expert)_groups?", 2),
    (r"topk_group", 1),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|num_selected_experts", 2),
    (r"(.*_)?n(um)?_shared_experts", 1),
    (
        r"sliding_window(_size)?|window_size|attention_(chunk|window)_size|local_attention|attention_window|index_topk|"
        r"keep_window_size",
        _LOCAL,
    ),
)
"""(pattern of an integer's name, its size in the test), never made larger."""
_DEPTHS = r"num_hidden_layers|n_layers?|num_layers"
_WIDTHS = r"hidden_size|d_model|n_embd|word_embed_proj_dim|embedding_size"
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def shrunk(config: Any) -> Any:
    """A configuration of the same family, kinds of layers and head sizes, with few heads, layers,
    experts and tokens.

    Head sizes stay, since rotary settings are tied to them.
    """
    values = config.to_dict()
    for name in (
        "architectures",
        "transformers_version",
        "model_type",
        "dtype",
        "torch_dtype",
        "_name_or_path",
    ):
        values.pop(name, None)
    for name in config.sub_configs:
        if isinstance(values.get(name), dict) and hasattr(getattr(config, name), "to_dict"):
            values[name] = shrunk(getattr(config, name)).to_dict()
    if getattr(config, "num_hidden_layers", None):
        _fewer_layers(values, config.num_hidden_layers)
        _narrower(values, config)
    for name, value in list(values.items()):
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, (int, float)) and re.fullmatch(
            r".*(dropout|pdrop|layerdrop|jitter|drop_rate).*", name
        ):
            values[name] = type(value)(0)
        elif isinstance(value, int):
            size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, name)), value)
            values[name] = min(value, size)
        if name.endswith("token_id"):
            values[name] = _TOKENS.get(name, 0)
    values["use_cache"] = False
    if "tie_word_embeddings" in values:
        values["tie_word_embeddings"] = False  # which tells no document from another
    return type(config)(**values)


def _fewer_layers(values: dict[str, Any], depth: int) -> None:
    """Keep one layer of each kind, by what the lists with an entry for every layer say, and the
    first ones.
    """
    lists = {
        name: value
        for name, value in values.items()
        if isinstance(value, (list, tuple)) and len(value) == depth
    }
    kinds: dict[tuple, int] = {}
    for position in range(depth):
        kinds.setdefault(tuple(repr(value[position]) for value in lists.values()), position)
    chosen = set(list(kinds.values())[: 2 * _LAYERS])
    for position in range(depth):
        if len(chosen) < min(_LAYERS, depth):
            chosen.add(position)
    for name, value in lists.items():
        values[name] = [value[position] for position in sorted(chosen)]
    for name, value in values.items():
        if isinstance(value, int) and re.fullmatch(_DEPTHS, name):
            values[name] = max(1, value * len(chosen) // depth)


def _narrower(values: dict[str, Any], config: Any) -> None:
    """Fewer heads, and a hidden size that fits them."""
    heads, hidden = (
        getattr(config, "num_attention_heads", None),
        getattr(config, "hidden_size", None),
    )
    if not isinstance(heads, int) or not isinstance(hidden, int) or heads <= _HEADS:
        return
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int):
            continue
        if value == hidden and re.fullmatch(_WIDTHS, name):
            values[name] = _HEADS * max(1, hidden // heads)
        elif re.fullmatch(
            r"(.*_)?num_attention_heads|n_heads?|num_heads|index_n_heads|linear_num_value_heads",
            name,
        ):
            values[name] = min(value, _HEADS)
        elif re.fullmatch(
            r"(.*_)?num_(key_value|kv)_heads|multi_query_group_num|linear_num_key_heads", name
        ):
            values[name] = _HEADS if value >= heads else min(value, _HEADS // 2)
