"""The arguments of blocks are kept where they are from step to step, as recordings need them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from engine.model.blocks.block_inputs import BlockArguments
from engine.model.build.attention_documents import Documents, Pattern

LEAST_CHUNKS = 16
"""The variable-length kernel is told of at least this many documents."""


def next_power(number: int, least: int = 1) -> int:
    """Returns the smallest power of two that is at least `number` and `least`."""
    return 1 << (max(number, least) - 1).bit_length()


class Sizes(NamedTuple):
    """Number of sequences (documents, or parts of them) in a micro-batch, and length of the
    longest, that recordings allow for.
    """

    sequences: int
    longest: int


def sizes_of(documents: Iterable[Documents | None]) -> Sizes:
    """Returns the sizes for micro-batches with these documents. They are the same for all, so that
    many steps share their recordings. Whole rows need no sizes, which are 0 if there are no others.
    """
    cut = [each for each in documents if each is not None and not each.whole]
    if not cut:
        return Sizes(0, 0)
    count = max(each.count for each in cut)
    longest = max(each.longest for each in cut)
    return Sizes(next_power(count, LEAST_CHUNKS), next_power(longest))


class FixedDocuments:
    """Takes the place of the documents of a micro-batch in the variable-length kernel. Empty
    documents at the end make up their number.

    It has nothing else of `Documents`, so work that asks for more cannot be recorded.
    """

    def __init__(self, documents: Documents, chunk: int | None, sizes: Sizes):
        self._chunk = chunk
        self._sequences, self.longest = sizes
        count = len(self._bounds(documents)) - 1
        self._sequences = next_power(count, self._sequences)
        self._starts = documents.upload(self._padded(documents))

    def starts(self, chunk: int | None) -> torch.Tensor:
        """Returns int32 [sequences + 1] on the device, as `Documents.starts` does."""
        assert chunk == self._chunk  # a pattern asks for its own
        return self._starts

    def take(self, documents: Documents) -> bool:
        """Makes these the documents. Returns False where there are too many, or a longer one."""
        fits = len(self._bounds(documents)) - 1 <= self._sequences
        if not fits or documents.longest > self.longest:
            return False
        self._starts.copy_(documents.upload(self._padded(documents)), non_blocking=True)
        return True

    def _bounds(self, documents: Documents) -> np.ndarray:
        return documents.bounds(self._chunk)

    def _padded(self, documents: Documents) -> np.ndarray:
        bounds = self._bounds(documents)
        more = self._sequences + 1 - len(bounds)
        return np.pad(bounds, (0, more), mode="edge").astype(np.int32)


class StaticArguments:
    """Arguments of all blocks for the micro-batches of one shape.
    Their tensors are copies that stay where they are. `take` fills them anew.
    """

    def __init__(self, given: Sequence[BlockArguments], sizes: Sizes):
        self._sizes = sizes
        leaves, self._structure = _flat(given)
        self._tensors: list[torch.Tensor] = []
        self._patterns: list[Pattern] = []
        self._places: dict[int, int] = {}
        self._others = [_signature(leaf) for leaf in leaves]
        self._shared = _places(leaves)
        values = iter([self._fix(leaf) for leaf in leaves])
        self.arguments: list[BlockArguments] = [
            _arguments_of(_built(structure, values), each.hidden_keyword)
            for structure, each in zip(self._structure, given)
        ]
        """The blocks are called with these arguments, in forward order."""

    def _fix(self, leaf: Any) -> Any:
        """Returns a copy of a tensor or a pattern that will stay where it is, and the same one for
        the same leaf. Anything else is returned unchanged.
        """
        if isinstance(leaf, torch.Tensor):
            if id(leaf) not in self._places:
                self._places[id(leaf)] = len(self._tensors)
                self._tensors.append(leaf.detach().clone())
            return self._tensors[self._places[id(leaf)]]
        if isinstance(leaf, Pattern):
            if id(leaf) not in self._places:
                self._places[id(leaf)] = len(self._patterns)
                documents: Any = leaf.documents
                if not documents.whole:  # whole rows of one shape are always the same
                    documents = FixedDocuments(documents, leaf.chunk, self._sizes)
                self._patterns.append(Pattern(documents, leaf.window, leaf.chunk))
            return self._patterns[self._places[id(leaf)]]
        return leaf

    def take(self, given: Sequence[BlockArguments]) -> bool:
        """Copies the tensors of other arguments to these. Returns False where they differ in more
        than the values of tensors; nothing of these may be used then.
        """
        leaves, structure = _flat(given)
        alike = structure == self._structure and _places(leaves) == self._shared
        if not alike or [_signature(leaf) for leaf in leaves] != self._others:
            return False
        tensors = _distinct(leaves, torch.Tensor)
        if tensors:
            torch._foreach_copy_(self._tensors, [each.detach() for each in tensors])
        fixed = [each.documents for each in self._patterns]
        given_now = [each.documents for each in _distinct(leaves, Pattern)]
        return all(_takes(mine, theirs) for mine, theirs in zip(fixed, given_now))


def _takes(fixed: Documents | FixedDocuments, documents: Documents) -> bool:
    """Returns whether these documents fit in the place of those of the first step, and puts them
    there.
    """
    if isinstance(fixed, FixedDocuments):
        return fixed.take(documents)
    return fixed.lengths == documents.lengths


def _flat(given: Sequence[BlockArguments]) -> tuple[list[Any], list[Any]]:
    """Returns the leaves of all arguments, and for each block their structure."""
    leaves: list[Any] = []
    structure = [_structure((each.args, each.kwargs), leaves) for each in given]
    return leaves, structure


def _arguments_of(values: Any, hidden_keyword: str | None) -> BlockArguments:
    args, kwargs = values
    return BlockArguments(args, kwargs, hidden_keyword)


def _structure(value: Any, leaves: list[Any]) -> Any:
    """Returns how tuples, lists and dicts are nested in a value, and appends what is in them."""
    if isinstance(value, dict):
        return dict, [(key, _structure(inner, leaves)) for key, inner in value.items()]
    if isinstance(value, (tuple, list)):
        return type(value), [_structure(inner, leaves) for inner in value]
    leaves.append(value)
    return None


def _built(structure: Any, leaves: Iterator[Any]) -> Any:
    """Returns a value of this structure with the next `leaves`."""
    if structure is None:
        return next(leaves)
    kind, inner = structure
    if kind is dict:
        return {key: _built(each, leaves) for key, each in inner}
    parts = [_built(each, leaves) for each in inner]
    return kind(*parts) if hasattr(kind, "_fields") else kind(parts)  # some tuples have names


def _signature(leaf: Any) -> Any:
    """Returns what must be the same in each step."""
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, leaf.device
    if isinstance(leaf, Pattern):
        return leaf.window, leaf.chunk
    return leaf


def _places(leaves: Sequence[Any]) -> list[int]:
    """Returns for each tensor or pattern which distinct one it is."""
    first: dict[int, int] = {}
    changing = [leaf for leaf in leaves if isinstance(leaf, (torch.Tensor, Pattern))]
    return [first.setdefault(id(leaf), len(first)) for leaf in changing]


def _distinct(leaves: Sequence[Any], kind: type) -> list[Any]:
    """Returns the leaves of one kind, each once, in order."""
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, kind)}.values())
