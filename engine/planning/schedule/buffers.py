"""Buffers are what ops read and write, and contents are what a buffer is known to hold. Both are
plain values with a text form. No torch.

A buffer is identified by its purpose, not by an address. If two ops name the same buffer and one of
them writes it, they are ordered. Each op declares the `Content` that it expects in a buffer and the
one that it leaves there, so that a plan can be proved to read only the intended contents.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

EMBED, HEAD = "embed", "head"
"""Names of the units before and after the blocks."""


class Word(StrEnum):
    """A string with a fixed set of values.

    It uses the hash of `str`, because planning does hundreds of thousands of lookups and an enum's
    own hash runs Python code.
    """

    __hash__ = str.__hash__


class BufferKind(Word):
    """The kind of a buffer says what the buffer is for."""

    # On the host.
    WEIGHTS = "weights"
    """The `weight_high` plane of a unit, or a chunk of that plane, with the `weight_low` of the
    weights that stay in fp32.
    """
    STATES = "optimizer states"
    """All planes of the unit except `weight_high` and the gradient, or a chunk of them. Those of a
    unit that lives on the device are there. Of a unit whose moments are on the disk, these alone.
    """
    GRADIENT = "gradient"
    """The unit's gradient plane."""
    GRADIENT_RING = "gradient ring"
    """Host memory that a kept gradient passes through on its way to the optimizer."""
    STATES_RING = "states ring"
    """Host memory in which a chunk of the moments that are on the disk is updated."""
    HOST_BLOCK_INPUT = "host input"
    """Host memory that keeps the input of a block for one micro-batch."""
    DISK_BLOCK_INPUT = "disk input"
    """A part of a file that keeps the input of a block for one micro-batch."""
    DISK_RING = "disk ring"
    """Host memory that a block input passes through on its way to the disk and back."""
    CLIP = "clip"
    """The clip factor on the host, which is set by the op `clip`."""
    # On the device.
    SLOT = "slot"
    """Weights of one unit while the unit computes. Where an optimizer on the device writes the slot
    chunk by chunk, each chunk counts as a separate buffer.
    """
    HIDDEN = "hidden"
    """The hidden state of a micro-batch, or the gradient of that state."""
    SAVED = "saved"
    """What a block keeps from forward to backward for one micro-batch."""
    OFFLOAD_RING = "offload ring"
    """Device memory that a block input passes through on its way to the host."""
    FETCH_RING = "fetch ring"
    """Device memory that a block input passes through on its way back from the host."""
    MAIN_GRAD = "main_grad"
    """An fp32 accumulator of gradients."""
    MAIN_GRAD_SHARD = "main_grad shard"
    """This rank's shard of the fp32 accumulator of a unit over the rounds."""
    STAGING = "staging"
    """Device memory that a rounded gradient passes through on its way to the host."""
    NORM = "norm"
    """The squared norm of a unit's gradient."""
    LOSS = "loss"
    BARRIER_PASSED = "barrier"
    """Mark that every rank has updated its shard of a unit."""
    TOTALS = "totals"
    """The loss and the squared norms of all ranks together."""
    SUMMARY = "summary"
    """The loss, the norms and the clip factor of the step."""
    UPDATE = "update buffer"
    """A chunk of every plane of a unit whose optimizer runs on the device."""
    UPDATE_GRADIENT = "update gradient"
    """The part of an update buffer for the gradient, which is filled by a separate copy."""
    ARENA = "arena"
    """A contiguous range of memory that fp32 accumulators and one update buffer share."""


class Buffer(NamedTuple):
    """A buffer has a kind. Unit, number (of the buffer or of the micro-batch) and chunk distinguish
    it from others of its kind.
    """

    kind: BufferKind
    unit: str = ""
    number: int | None = None
    chunk: int | None = None

    def __str__(self) -> str:
        return _text(*self)

    @property
    def whole(self) -> Buffer:
        """The buffer that this one is a chunk of."""
        return self._replace(chunk=None)

    def part(self, chunk: int) -> Buffer:
        """Returns one chunk of this buffer."""
        return self._replace(chunk=chunk)


class ContentKind(Word):
    """The kind of a content says what is in a buffer."""

    READY = "ready"
    """The one thing that the buffer is ever used for."""
    WEIGHTS = "weights"
    """Weights of a unit."""
    SHARD = "shard"
    """This rank's shard of a unit, and elsewhere nothing that is needed."""
    HIDDEN = "hidden"
    """The hidden state after a block, in one round. Without a unit it is the state before the first
    block.
    """
    GRADIENT = "gradient"
    """The gradient of the input of a unit, in one round."""
    BLOCK_INPUT = "input"
    """The input of a block, identified by micro-batch or by round."""
    ACTIVATIONS = "activations"
    """Everything that the backward of a block needs, including views into the content's `slot`."""
    MAIN_GRAD = "main_grad"
    """The accumulator of a unit's gradients. On the host and in a staging buffer it is rounded."""
    EARLIER_MAIN_GRAD = "earlier main_grad"
    """The sum over the earlier rounds."""
    FETCHED = "fetched"
    """Optimizer states of a chunk of a unit, as fetched from the host or read from the disk."""
    UPDATED = "updated"
    """Optimizer states of that chunk after AdamW."""
    STATES = "states"
    """Optimizer states of any unit, in the memory that is shared with fp32 accumulators."""


class Content(NamedTuple):
    """A content has a kind, and belongs to a unit, to a round or micro-batch (`number`) and to a
    chunk. For kept activations, `slot` is the slot that they hold views into.
    """

    kind: ContentKind
    unit: str = ""
    number: int | None = None
    chunk: int | None = None
    slot: Buffer | None = None

    def __str__(self) -> str:
        where = "" if self.slot is None else f" in {self.slot}"
        return _text(self.kind, self.unit, self.number, self.chunk) + where


READY = Content(ContentKind.READY)


def _text(kind: Word, unit: str, number: int | None, chunk: int | None) -> str:
    """Returns `kind(unit) number/chunk`, without the parts that are not given."""
    text: str = kind.value
    if unit:
        text += f"({unit})"
    if number is not None:
        text += f" {number}"
    if chunk is not None:
        text += f"/{chunk}"
    return text
