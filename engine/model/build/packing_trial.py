"""A trial finds out which attention a model can use, and whether documents that share a row stay
apart. Both are tested rather than assumed.

- A tiny random model is built from the same configuration, with the same kinds of layers but with
  small widths and windows (engine/model/build/tiny_config.py).
- Single documents must give the same loss and gradients with an attention as with the eager one.
  Otherwise the attention does not fit the family.
- Documents packed into one row must give the same results as each of them alone. Otherwise packing
  is not safe.

Recurrent and convolutional layers carry state from document to document. The trial detects them in
any family.
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

from engine.machine.short_memory import refuse_short_memory
from engine.model.blocks.position_wise import PositionWise, position_wise
from engine.model.build.attention import register
from engine.model.build.attention_masks import forward
from engine.model.build.library import empty_model
from engine.model.build.skeleton import find_layers
from engine.model.build.tiny_config import VOCABULARY, shrunk
from engine.planning.shape.activation_sizes import DOCUMENTS

ROWS = ((19, 2, 25), (3, 30, 8))
"""The lengths of the documents in each row of the test, in tokens. With attention that selects
tokens by score, documents see each other only in some rows, so two rows are tested.
"""
ALONE = (2, 23)
"""Numbers of rows and of their tokens that run to find position-wise modules."""
TOLERANCE = 1e-4
"""Rounding makes gradients differ by at most this share in nearly all families. If documents see
each other, the difference is hundreds of times larger.
"""
_LARGEST_TOLERANCE = 1e-2
"""In no family does rounding make gradients differ by more. Gemma 3n and Gemma 4 come nearer to it
than others, since they do not scale their attention, and Gemma 3n cuts small activations off.
"""
_NUDGES = 4
"""Weights are changed by one rounding so often, to see what that does."""
_LARGEST = 80_000_000
"""Largest number of parameters of a tiny model. A family with unknown names for its sizes could
otherwise fill the memory.
"""
_SEEN = "documents that share a row see each other"


@dataclass(frozen=True)
class Packing:
    """The outcome of a trial: which attention is right and whether packing is safe."""

    attention: str | None
    """Implementation that gives the right results. None if the tiny model could not be tested."""
    problem: str
    """The reason why documents may not share a row, worded as the end of a sentence. It is empty
    when they may.
    """
    parts: frozenset[str] = frozenset()
    """Modules of these classes took part in the trial."""
    position_wise: frozenset[PositionWise] = frozenset()
    """These modules of blocks compute each token by itself."""
    longest: int | None = None
    """Largest number of tokens of a row. In longer rows, the rotary embedding of all documents
    depends on the longest document.
    """

    @property
    def safe(self) -> bool:
        return not self.problem

    def problem_of(self, row_length: int) -> str:
        """Returns the reason why documents may not share rows of at most `row_length` tokens.

        It is empty when they may.
        """
        if self.problem or self.longest is None or row_length <= self.longest:
            return self.problem
        return f"its rotary embedding depends on the length of a row beyond {self.longest:,} tokens"

    def of(self, model: nn.Module) -> Packing:
        """Returns the outcome for `model` itself. Packing is not safe if it has a part that the
        tiny model lacked.
        """
        missing = sorted(_parts(model) - self.parts)
        if missing and self.safe:
            return replace(self, problem=f"its {missing[0]} could not be tested in a small model")
        return self


@dataclass(frozen=True)
class _Result:
    """The summed loss and the flat gradient [parameters] after one pass over some rows."""

    loss: float
    gradient: torch.Tensor

    def difference(self, other: _Result) -> float:
        """Returns by which share this result differs from another one."""
        of_gradients = float((self.gradient - other.gradient).norm() / other.gradient.norm())
        return max(of_gradients, abs(self.loss - other.loss) / abs(other.loss))


def _is_rounding(tiny: Any, difference: float) -> bool:
    """Returns whether results of the model `tiny` that differ so much may differ by rounding."""
    if difference < TOLERANCE or difference > _LARGEST_TOLERANCE:
        return difference < TOLERANCE
    model = _model(tiny, "eager")
    truth, generator = _alone(model), torch.Generator().manual_seed(1)
    most = 0.0
    for _ in range(_NUDGES):
        nudged = _model(tiny, "eager")
        with torch.no_grad():
            for parameter in nudged.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                parameter.mul_(1 + signs * torch.finfo(parameter.dtype).eps)
        most = max(most, _alone(nudged).difference(truth))
    return difference < 10 * most


class _Holder:
    """Passes a configuration through a cache whose key is the configuration's text: all holders are
    equal.
    """

    def __init__(self, config: Any):
        self.config = config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Holder)

    def __hash__(self) -> int:
        return 0


_testing = threading.Lock()
"""Only one thread tests at a time, so that no configuration is tested twice."""


def packing_of(config: Any, attention: str = "auto") -> Packing:
    """Finds out which attention and packing fit `config`, a configuration of transformers.

    For the attention `auto`, it finds the best one that is exact. A model that cannot be tested
    raises no error. The test takes about a second, once for all configurations that have the same
    tiny model.
    """
    with _testing:
        try:
            tiny = shrunk(config)
            text = json.dumps(tiny.to_dict(), default=repr, sort_keys=True)
            found = _packing_of(text, attention, _Holder(tiny))
        except Exception as error:  # noqa: BLE001  a configuration class raises anything
            refuse_short_memory(error, "in the trial of packing")
            kind = type(error).__name__
            found = Packing(None, f"no small model of it can be made to test that ({kind})")
    return replace(found, longest=_longest_of_one_rope(config.get_text_config()))


def _longest_of_one_rope(config: Any) -> int | None:
    """Returns the number of tokens up to which rotary embeddings that change for longer rows
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
    """Tests a tiny configuration. `_text` is its key in the cache."""
    register()
    if attention == "auto":
        return _best(holder.config)
    try:
        model = _model(holder.config, attention)
        return _judged(attention, holder.config, model, _alone(model))
    except Exception as error:  # noqa: BLE001  a family's code raises anything
        refuse_short_memory(error, "in the trial of packing")
        return _not_run(error)


def _best(tiny: Any) -> Packing:
    """Tries the attentions in order of preference, and returns the first safe outcome."""
    try:
        truth = _alone(_model(tiny, "eager"))
    except Exception as error:  # noqa: BLE001  the real model is judged when it is built
        refuse_short_memory(error, "in the trial of packing")
        return _not_run(error)
    failure: Exception | None = None
    best: Packing | None = None
    for candidate in (DOCUMENTS, "sdpa", "eager"):
        try:
            model = _model(tiny, candidate)
            alone = _alone(model)
            if not _is_rounding(tiny, alone.difference(truth)):
                continue  # this attention does not fit the family
            found = _judged(candidate, tiny, model, alone)
        except Exception as error:  # noqa: BLE001  the family does not have this attention
            refuse_short_memory(error, "in the trial of packing")
            failure = error
            continue
        # If documents see each other even with DOCUMENTS, no other attention can help: other layers
        # carry state over.
        if found.safe or candidate == DOCUMENTS:
            return found
        if best is None:
            best = found
    return best or _not_run(failure)


def _not_run(error: Exception | None) -> Packing:
    kind = type(error).__name__
    return Packing(None, f"a small model of it could not be run to test that ({kind})")


def _judged(attention: str, tiny: Any, model: nn.Module, alone: _Result) -> Packing:
    """Compares packed rows with `alone`, the result of their documents one after another."""
    parts, each = frozenset(_parts(model)), _position_wise(model)
    if not torch.isfinite(alone.gradient).all():
        return Packing(
            attention, "a small model of it gave no finite numbers to compare", parts, each
        )
    rows = [ids for ids, _ in _rows()]
    packed = _result(model, rows, ROWS)
    is_safe = _is_rounding(tiny, packed.difference(alone))
    return Packing(attention, "" if is_safe else _SEEN, parts, each)


def _position_wise(model: nn.Module) -> frozenset[PositionWise]:
    """Returns the modules of the model's blocks that compute each token by itself."""
    ids = torch.from_numpy(np.random.default_rng(9).integers(3, VOCABULARY, ALONE))
    layers = find_layers(model, model.config)
    return position_wise(layers, lambda: forward(model, ids, None, None), ALONE)


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

    The documents of a row have the given lengths, which the model receives as positions. A row
    without lengths is one document, and the model receives no positions for it. The last token of
    each document has no target.
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
        if gradient is None:  # the parameter was not used
            flat.append(torch.zeros(parameter.numel()))
        else:
            flat.append(gradient.reshape(-1))
    return _Result(float(total.detach()), torch.cat(flat))


def _model(tiny: Any, attention: str) -> nn.Module:
    """Returns a model with random weights. Raises ValueError if it would be too large.

    The weights come from a separate generator, because a run may be drawing from torch's own.
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
    """Returns noise [*shape]: matrices preserve the scale of their input, norms are near 1, and all
    other values are near 0.
    """
    noise = torch.randn(shape, generator=generator)
    if len(shape) > 1:
        return noise / shape[-1] ** 0.5
    is_norm = "norm" in name.lower() and not name.endswith("bias")
    return 0.1 * noise + (1.0 if is_norm else 0.0)


def _parts(model: nn.Module) -> set[str]:
    return {type(module).__name__ for module in model.modules()}
