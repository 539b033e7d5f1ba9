"""A trial finds out which attention a model can use, and whether documents that share a row stay
apart. Neither is believed.

- A tiny random model of the same configuration is built, with the same kinds of layers, and with
  widths and windows made small (engine/model/tiny_config.py).
- Single documents give the same loss and gradients under an attention as under the eager one, or
  that attention is not the family's.
- Documents packed into one row give the same as each of them alone, or packing is not safe.

Recurrent and convolutional layers carry something from document to document. They are found here,
whatever the family is called.
"""

from __future__ import annotations

import copy
import functools
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as torch_functional
from torch import nn

from engine.model.attention import register
from engine.model.attention_masks import forward
from engine.model.layout import DOCUMENTS
from engine.model.library import empty_model
from engine.model.tiny_config import VOCABULARY, shrunk

ROWS = ((19, 2, 25), (3, 30, 8))
"""The documents of each row of the test have these many tokens. Under attention that picks its
tokens by their scores, documents see each other in some rows alone: two rows are tried.
"""
TOLERANCE = 1e-4
"""Gradients differ by this share, at most, from rounding. Where documents see each other, the
difference is hundreds of times larger.
"""
_LARGEST = 80_000_000
"""A tiny model has at most this many parameters: a family whose sizes go by unknown names could
fill the memory.
"""
_SEEN = "documents that share a row see each other"


@dataclass(frozen=True)
class Packing:
    """An outcome says which attention is right and whether packing is safe."""

    attention: str | None
    """This implementation gives the right results; None where the tiny model could not tell."""
    problem: str
    """Documents may not share a row for this reason, the end of a sentence; empty when they may."""
    parts: frozenset[str] = frozenset()
    """Modules of these classes took part."""
    longest: int | None = None
    """Rows may be no longer: beyond, the rotary embedding of a row's documents depends on the
    longest of them.
    """

    @property
    def safe(self) -> bool:
        return not self.problem

    def problem_of(self, row_length: int) -> str:
        """Gives the reason why documents may not share rows of at most `row_length` tokens.

        It is empty when they may.
        """
        if self.problem or self.longest is None or row_length <= self.longest:
            return self.problem
        return f"its rotary embedding depends on the length of a row beyond {self.longest:,} tokens"

    def of(self, model: nn.Module) -> Packing:
        """Returns the outcome for `model` itself: a part that the tiny model lacked was not
        tested.
        """
        missing = sorted(_parts(model) - self.parts)
        if missing and self.safe:
            return replace(self, problem=f"its {missing[0]} could not be tested in a small model")
        return self


@dataclass(frozen=True)
class _Result:
    """One pass over some rows ends with the summed loss and the flat gradient [parameters]."""

    loss: float
    gradient: torch.Tensor

    def equals(self, other: _Result) -> bool:
        """Tells whether only rounding makes a difference."""
        difference = float((self.gradient - other.gradient).norm() / other.gradient.norm())
        return difference < TOLERANCE and abs(self.loss - other.loss) < TOLERANCE * abs(other.loss)


class _Holder:
    """Carries a configuration past a cache whose key is its text: all holders are equal."""

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)

    def __hash__(self) -> int:
        return 0


_testing = threading.Lock()
"""One thread tests at a time, so that no configuration is tested twice."""


def packing_of(config: Any, attention: str = "auto") -> Packing:
    """Finds out which attention and packing fit `config`, a configuration of transformers.

    The attention `auto` looks for the best one that is exact. Never raises for a model that cannot
    be tested. Takes about a second, once for all configurations that come to the same tiny model.
    """
    with _testing:
        try:
            tiny = shrunk(config)
            text = json.dumps(tiny.to_dict(), default=repr, sort_keys=True)
            found = _packing_of(text, attention, _Holder(tiny))
        except Exception as error:  # noqa: BLE001  a configuration class raises anything
            kind = type(error).__name__
            found = Packing(None, f"no small model of it can be made to test that ({kind})")
    return replace(found, longest=_longest_of_one_rope(config.get_text_config()))


def _longest_of_one_rope(config: Any) -> int | None:
    """Returns the tokens up to which rotary embeddings that are made anew for longer rows
    (`dynamic`, `longrope`) stay the same.
    """
    given = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in given:
        kinds = [given]
    else:  # one for each kind of layer
        kinds = [kind for kind in given.values() if isinstance(kind, dict)]
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


@functools.lru_cache(maxsize=1024)
def _packing_of(_text: str, attention: str, holder: _Holder) -> Packing:
    """Tests a tiny configuration, which `_text` stands for in the cache."""
    register()
    if attention == "auto":
        return _best(holder.config)
    try:
        model = _model(holder.config, attention)
        return _judged(attention, model, _alone(model))
    except Exception as error:  # noqa: BLE001  a family's code raises anything
        return _not_run(error)


def _best(tiny: Any) -> Packing:
    """Tries the attentions in order of preference, and returns the first safe outcome."""
    try:
        truth = _alone(_model(tiny, "eager"))
    except Exception as error:  # noqa: BLE001  the real model is judged when it is built
        return _not_run(error)
    failure: Exception | None = None
    best: Packing | None = None
    for candidate in (DOCUMENTS, "sdpa", "eager"):
        try:
            model = _model(tiny, candidate)
            alone = _alone(model)
            if not alone.equals(truth):
                continue  # this attention is not the family's
            found = _judged(candidate, model, alone)
        except Exception as error:  # noqa: BLE001  the family does not have this attention
            failure = error
            continue
        # Where documents see each other under DOCUMENTS, no other attention can help: something
        # else carries over.
        if found.safe or candidate == DOCUMENTS:
            return found
        if best is None:
            best = found
    return best or _not_run(failure)


def _not_run(error: Exception | None) -> Packing:
    kind = type(error).__name__
    return Packing(None, f"a small model of it could not be run to test that ({kind})")


def _judged(attention: str, model: nn.Module, alone: _Result) -> Packing:
    """Compares packed rows with `alone`, the result of their documents one after another."""
    parts = frozenset(_parts(model))
    if not torch.isfinite(alone.gradient).all():
        return Packing(attention, "a small model of it gave no finite numbers to compare", parts)
    rows = [ids for ids, _ in _rows()]
    packed = _result(model, rows, ROWS)
    return Packing(attention, "" if packed.equals(alone) else _SEEN, parts)


# ---------------------------------------------------------------------- the comparison


def _rows() -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Returns the token ids of each row [tokens], and those of its documents."""
    generator = np.random.default_rng(7)
    rows = [generator.integers(3, VOCABULARY, sum(lengths)) for lengths in ROWS]
    return [(ids, np.split(ids, np.cumsum(lengths)[:-1])) for ids, lengths in zip(rows, ROWS)]


def _alone(model: nn.Module) -> _Result:
    documents = [document for _, documents in _rows() for document in documents]
    return _result(model, documents, [()] * len(documents))


def _result(
    model: nn.Module, rows: list[np.ndarray], lengths_of_rows: Sequence[tuple[int, ...]]
) -> _Result:
    """Runs rows one after another.

    The documents of a row have the given lengths, which positions tell the model; a row without
    lengths is one document, and the model is told no positions. The last token of each document has
    no target.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    total = torch.zeros(())
    for ids, lengths in zip(rows, lengths_of_rows):
        given = {}
        if lengths:
            positions = np.concatenate([np.arange(length) for length in lengths])
            given["position_ids"] = torch.from_numpy(positions)[None]
        ends = np.cumsum(lengths or [len(ids)]) - 1
        labels = np.append(ids[1:], -100)
        labels[ends] = -100
        with torch.enable_grad():
            output = forward(model, torch.from_numpy(ids)[None], None, None, **given)
            logits = output.logits[0].float()
            targets = torch.from_numpy(labels)
            total = total + torch_functional.cross_entropy(logits, targets, reduction="sum")
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    flat = []
    for parameter, gradient in zip(parameters, gradients):
        if gradient is None:  # a parameter that takes no part
            flat.append(torch.zeros(parameter.numel()))
        else:
            flat.append(gradient.reshape(-1))
    return _Result(float(total.detach()), torch.cat(flat))


def _model(tiny: Any, attention: str) -> nn.Module:
    """Returns a model of random weights. Raises ValueError where it would be large.

    The weights come from a generator of their own: a run may be drawing from torch's.
    """
    model = empty_model(copy.deepcopy(tiny), torch.float32, attention)
    if sum(parameter.numel() for parameter in model.parameters()) > _LARGEST:
        raise ValueError("the small model is large")
    generator = torch.Generator().manual_seed(3)
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if id(parameter) not in made:
            made[id(parameter)] = nn.Parameter(_random(name, parameter.shape, generator))
        owner, _, attribute = name.rpartition(".")
        model.get_submodule(owner)._parameters[attribute] = made[id(parameter)]
    return model.eval()


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    """Returns noise [*shape]: matrices keep the size of what they multiply, norms are near 1, and
    all else is near 0.
    """
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    is_norm = "norm" in name.lower() and not name.endswith("bias")
    return 0.1 * noise + (1.0 if is_norm else 0.0)


def _parts(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}
