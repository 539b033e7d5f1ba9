"""The skeleton runs the model's own code before and after its blocks.

The Hugging Face model is built without weights, and the `forward` of every decoder block is
replaced by a recorder. The rest of the model's code is left as its family wrote it, so that nothing
here is specific to a family.

The capture pass finds out with which arguments every block is called:

- The model's own `forward` runs. It looks up the embedding and makes masks, rotary embeddings and
  whatever else the family needs.
- Each recorder keeps the arguments passed to its block, and returns the hidden state unchanged.
- The recorder of the last block raises `_Captured`, so that neither the norm nor the head runs.
- The result is the input of the first block and the arguments of every block. With these, each
  block can be run alone and at any time.

A pass through the tail works in the same way:

- The model's own `forward` runs again, and now the recorders return a given hidden state.
- The model's own final norm, head, logit scale and soft cap turn it into logits.

A model whose code does not allow this is refused by name, such as one that runs its blocks in
another order or more than once, or that changes the hidden state between two blocks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from engine.errors import ModelError
from engine.model.blocks.block_inputs import BlockArguments
from engine.model.blocks.hidden_layout import HiddenLayout
from engine.model.build import attention_masks
from engine.model.build.attention_documents import Documents
from engine.model.build.library import reads_more_than_text, transformers


class _Captured(Exception):
    """Raised by the last recorder, so that the norm and the head do not run in a capture pass."""


Ask = Callable[[int, BlockArguments, torch.Tensor], "Answer"]
"""Function that receives a block's position, its arguments and its input, in the family's shape."""


class Answer(NamedTuple):
    """What a trial answers for a block."""

    hidden: torch.Tensor
    """State with which the model's code continues, in the family's shape."""
    extras: tuple | None
    """Values that the model's code receives in addition to it; None for a block that returns only a
    tensor.
    """


@dataclass
class Capture:
    """Result of a capture pass: the input of the first block and the arguments of every block."""

    hidden: torch.Tensor
    """[batch, tokens, width]."""
    arguments: list[BlockArguments]


class _Recording:
    """The arguments of the blocks in one capture pass, in order."""

    def __init__(self, ask: Ask | None) -> None:
        self.ask = ask
        self.arguments: list[BlockArguments] = []
        self.first: torch.Tensor | None = None
        """State that the first block received, in the family's shape."""
        self.returned: torch.Tensor | None = None
        """State that the last recorder has returned."""

    def add(self, arguments: BlockArguments, hidden: torch.Tensor, returned: torch.Tensor) -> None:
        """Adds a block that was given `hidden` and returned `returned`, in the family's shape."""
        if self.first is None:
            self.first = hidden
        self.arguments.append(arguments)
        self.returned = returned


class Skeleton:
    """A causal language model whose blocks are recorders. The caller must bind its embedding, final
    norm and head to device slots. It runs only one pass at a time.
    """

    def __init__(self, model: nn.Module, layers: nn.ModuleList):
        self.model: Any = model
        self.blocks = list(layers)
        self.extras: list[tuple | None] = [None] * len(self.blocks)
        """Placeholders, for each block, for what it returns in addition to its hidden state; None
        for a block that returns only a tensor.
        """
        self.hidden_layout: HiddenLayout | None = None
        """Form of the state that blocks pass; None for [batch, tokens, width]."""
        self._recording: _Recording | None = None
        """Set while a capture pass is running."""
        self._hidden: torch.Tensor | None = None
        """State that the recorders return in a pass through the tail."""
        self._ran: list[int] = []
        """Order in which the blocks ran in a pass through the tail."""
        self._entering: list[torch.Tensor] | None = None
        """List to which a pass through the tail appends each block's input; None outside such a
        pass.
        """
        self._local_kinds: dict[int, str] = {}
        """`attention_masks.forward` caches the kinds of local attention here."""
        self._cache_type = transformers().Cache
        accepted = inspect.signature(model.forward).parameters
        names = [name for name in attention_masks.CACHE_KEYWORDS if name in accepted]
        self._cache_keyword = names[0] if names else attention_masks.CACHE_KEYWORDS[0]
        for position, block in enumerate(self.blocks):
            block.forward = self._recorder(position)

    def _recorder(self, position: int) -> Callable[..., Any]:
        """Returns the replacement for a block's `forward`."""
        last = len(self.blocks) - 1

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._recording is None:
                self._ran.append(position)
                if self._entering is not None:
                    self._entering.append(args[0] if args else kwargs["hidden_states"])
                hidden, extras = self._hidden, self.extras[position]
            else:
                hidden, extras = self._record(self._recording, position, args, kwargs)
                if position == last:
                    raise _Captured
            return hidden if extras is None else (hidden, *extras)

        return forward

    def _record(
        self, recording: _Recording, position: int, args: tuple, kwargs: dict[str, Any]
    ) -> Answer:
        """Records the arguments of a block, and returns its input and its extras."""
        if not args and "hidden_states" not in kwargs:
            raise ModelError(
                f"{type(self.model).__name__} calls its blocks without a hidden state, "
                "which cannot be streamed; choose another model."
            )
        if args:
            hidden = args[0]
            arguments = BlockArguments(args[1:], dict(kwargs), None, self.hidden_layout)
        else:
            rest = {name: value for name, value in kwargs.items() if name != "hidden_states"}
            hidden = kwargs["hidden_states"]
            arguments = BlockArguments((), rest, "hidden_states", self.hidden_layout)
        if len(recording.arguments) != position:
            raise self._runs_out_of_order()
        if position > 0 and not _is_whole(hidden, recording.returned):
            raise ModelError(
                f"{type(self.model).__name__} changes the hidden state between block "
                f"{position - 1} and block {position}, which cannot be streamed; choose another "
                "model."
            )
        answer = Answer(hidden, self.extras[position])
        if recording.ask is not None:
            answer = recording.ask(position, arguments, hidden)
        recording.add(arguments, hidden, answer.hidden)
        return answer

    def _runs_out_of_order(self) -> ModelError:
        return ModelError(
            f"{type(self.model).__name__} does not run its blocks once each and in order, "
            "which cannot be streamed; choose another model."
        )

    def expect_extras(self, extras: list[tuple | None]) -> None:
        """Makes recorders return these in addition to the hidden state, for each block."""
        self.extras = extras

    def expect_hidden_layout(self, hidden_layout: HiddenLayout) -> None:
        """Sets the layout of the states that blocks pass."""
        self.hidden_layout = hidden_layout

    # ------------------------------------------------------------------ the capture pass

    def ask_blocks(self, input_ids: torch.Tensor, ask: Ask) -> Capture:
        """Runs a capture pass on `input_ids` (int64 [batch, tokens]) that calls `ask` for every
        block, in order.
        """
        return self._capture(input_ids, {}, None, ask)

    def capture(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None,
        use_cache: bool = False,
        cache: Any = None,
        documents: Documents | None = None,
    ) -> Capture:
        """Runs the model's own forward up to its last block.

        input_ids, position_ids: int64 [batch, tokens]. Gradients flow from the `hidden` of the
        result to the embedding when they are enabled. With `use_cache` the blocks receive a
        key-value cache: `cache`, which holds the tokens before these, or a new one that the model
        makes. `documents` are those of `position_ids`; if they are not given, they are read from
        `position_ids`, which waits for the device.
        """
        given: dict[str, Any] = {"use_cache": use_cache}
        if position_ids is not None:
            given["position_ids"] = position_ids
        if cache is not None:
            given[self._cache_keyword] = cache
        return self._capture(input_ids, given, documents, None)

    def _capture(
        self,
        input_ids: torch.Tensor,
        given: dict[str, Any],
        documents: Documents | None,
        ask: Ask | None,
    ) -> Capture:
        recording = _Recording(ask)
        self._recording = recording
        try:
            attention_masks.forward(self.model, input_ids, documents, self._local_kinds, **given)
        except _Captured:
            assert recording.first is not None  # the last recorder follows the first
            first = recording.first
            hidden = first if self.hidden_layout is None else self.hidden_layout.flat(first)
            return Capture(hidden, recording.arguments)
        finally:
            self._recording = None
        raise ModelError(
            f"{type(self.model).__name__} did not run its blocks, so it cannot be streamed."
        )

    def caches(self, captured: Capture) -> list[Any]:
        """Returns the key-value cache objects passed to the blocks, each once."""
        found: dict[int, Any] = {}
        for arguments in captured.arguments:
            for value in (*arguments.args, *arguments.kwargs.values()):
                if isinstance(value, self._cache_type):
                    found[id(value)] = value
        return list(found.values())

    # ------------------------------------------------------------------ the tail

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Runs the model's own tail on `hidden` [tokens, width] (any tokens, in any order) and
        returns the logits [tokens, vocabulary].
        """
        state = hidden.unsqueeze(0)
        self._hidden = state if self.hidden_layout is None else self.hidden_layout.own(state)
        self._ran = []
        # The model looks up token ids before its blocks; the tail does not depend on them.
        ids = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=hidden.device)
        try:
            out = attention_masks.forward(self.model, ids, None, self._local_kinds)
        finally:
            self._hidden = None
        if self._ran != list(range(len(self.blocks))):
            raise self._runs_out_of_order()
        return out.logits[0]

    def probe_tail(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns logits [tokens, vocabulary] of `hidden` [tokens, width], with gradients.

        Raises ModelError if the tail also uses the input of the blocks.
        """
        self._entering = []
        try:
            logits = self.logits(hidden)
            before = graph_of(self._entering[0])
        finally:
            self._entering = None
        # A node in both graphs is a path that bypasses the blocks. Parameters may be in both, as
        # tied ones are.
        shared = before & graph_of(logits)
        if any(not hasattr(node, "variable") for node in shared):
            raise ModelError(
                f"{type(self.model).__name__} leads its embedding past the blocks into the head; "
                "that gradient would be lost, so this model is refused."
            )
        return logits


def find_layers(module: nn.Module, config: Any) -> nn.ModuleList:
    """Returns the list of decoder blocks: the one with the most parameters among all lists of the
    length given in the configuration. In a model that also reads images or sound, only the lists of
    its language model count. Raises ModelError if there is no such list.
    """
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    whole: Any = module
    decoder = whole.get_decoder() if reads_more_than_text(config) else whole
    lists = [part for part in decoder.modules() if isinstance(part, nn.ModuleList)]
    lists = [layers for layers in lists if len(layers) == count] or lists
    if not lists:
        raise ModelError(
            f"{type(module).__name__} has no list of decoder blocks, so it cannot be streamed."
        )

    def size(layers: nn.ModuleList) -> int:
        return sum(parameter.numel() for parameter in layers.parameters())

    return max(lists, key=size)


def parameters_reached(output: torch.Tensor) -> set[int]:
    """Returns the ids of the leaf tensors in the autograd graph of `output` (of any shape)."""
    return {id(node.variable) for node in graph_of(output) if hasattr(node, "variable")}


def _is_whole(view: torch.Tensor, state: torch.Tensor | None) -> bool:
    """Returns whether `view` is `state`, or all of it as a view; both are of any shape."""
    if state is None or view is state:
        return view is state
    return view._base is not None and _place(view) == _place(state)


def _place(tensor: torch.Tensor) -> tuple:
    """Returns what is equal for tensors of any shape that are the same elements of a memory."""
    memory = tensor.untyped_storage()._cdata
    return memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def is_marked(output: torch.Tensor, mark: type[torch.autograd.Function]) -> bool:
    """Returns whether `mark` is in the autograd graph of `output`, of any shape."""
    return any(node.name() == f"{mark.__name__}Backward" for node in graph_of(output))


def graph_of(output: torch.Tensor) -> set[Any]:
    """Returns all nodes of the autograd graph of `output`, of any shape."""
    seen: set[Any] = set()
    waiting: list[Any] = [output.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting.extend(parent for parent, _ in node.next_functions)
    return seen
