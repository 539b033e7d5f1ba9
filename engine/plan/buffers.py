"""Buffers are what ops read and write, and contents are what a buffer is known to hold. Both are
plain values with a text form. No torch.

A buffer is named by what it is for, not by an address. Two ops that name the same buffer are
ordered by it. Each op states which `Content` it expects to find in a buffer and which it leaves
there, so that a plan can be proved to read nothing wrong.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

EMBED, HEAD = "embed", "head"
"""These are the names of the units before and after the blocks."""


class Word(StrEnum):
    """A `Word` is a string with a fixed set of values.

    It hashes as a string does, because a plan looks words up by the hundred thousand and an enum's
    own hash is a call of Python code.
    """

    __hash__ = str.__hash__


class BufferKind(Word):
    """The kind of a buffer says what the buffer is for."""

    # On the host.
    WEIGHTS = "weights"
    """It is the `weight_high` plane of a unit, or a piece of that plane."""
    STATES = "optimizer states"
    """It stands for the unit's other planes except the gradient, or for a piece of them."""
    GRADIENT = "gradient"
    """It is the unit's gradient plane."""
    HOST_BOUNDARY = "host boundary"
    """It keeps the input of a block for one micro-batch."""
    CLIP = "clip"
    """It is the clip factor, once the host knows it."""
    # On the device.
    SLOT = "slot"
    """It holds the weights of one unit while the unit computes. A piece of a slot is a buffer of
    its own where an optimizer on the device writes to the slot piece by piece.
    """
    HIDDEN = "hidden"
    """It is the hidden state of a micro-batch, or the gradient of that state."""
    SAVED = "saved"
    """It is what a block keeps of one micro-batch from forward to backward."""
    STORE_RING = "store ring"
    """It carries a boundary on its way to the host."""
    FETCH_RING = "fetch ring"
    """It carries a boundary on its way back from the host."""
    SUM = "sum"
    """It is an fp32 sum of gradients."""
    STAGING = "staging"
    """It carries a rounded gradient on its way to the host."""
    NORM = "norm"
    """It is the squared norm of a unit's gradient."""
    LOSS = "loss"
    SUMMARY = "summary"
    """It keeps the loss, the norms and the clip factor of the step."""
    UPDATE = "update buffer"
    """It holds a piece of every plane of a unit whose optimizer runs on the device."""
    UPDATE_GRADIENT = "update gradient"
    """It is the gradient's part of an update buffer, which is filled on its own."""
    ARENA = "arena"
    """It is a stretch of memory that fp32 sums and one update buffer share."""
    LENDABLE = "lendable"
    """It is memory that activations of the last blocks and spare update buffers share."""


class Buffer(NamedTuple):
    """A buffer has a kind, and is told from others of its kind by unit, by number (of the buffer or
    of the micro-batch) and by piece.
    """

    kind: BufferKind
    unit: str = ""
    number: int | None = None
    piece: int | None = None

    def __str__(self) -> str:
        return _text(*self)

    @property
    def whole(self) -> Buffer:
        """Returns the buffer that this one is a piece of."""
        return self._replace(piece=None)

    def part(self, piece: int) -> Buffer:
        """Returns one piece of this buffer."""
        return self._replace(piece=piece)


class ContentKind(Word):
    """The kind of a content says what is in a buffer."""

    READY = "ready"
    """The buffer holds what it is there for; nothing else is ever in it."""
    WEIGHTS = "weights"
    """It is the weights of a unit."""
    HIDDEN = "hidden"
    """It is the hidden state after a block, in one round. Without a unit it is the state before the
    first block.
    """
    GRADIENT = "gradient"
    """It is the gradient of the input of a unit, in one round."""
    BOUNDARY = "boundary"
    """It is the input of a block, told by micro-batch or by round."""
    ACTIVATIONS = "activations"
    """It is all that backward needs of a block. Views into the content's `slot` are among it."""
    SUM = "sum"
    """It is the sum of a unit's gradients. On the host and in a staging buffer it is rounded."""
    EARLIER_SUM = "earlier sum"
    """It is the sum of the rounds before."""
    FETCHED = "fetched"
    """It is the states of a piece of a unit, as they are on the host."""
    UPDATED = "updated"
    """It is the same states after AdamW."""
    STATES = "states"
    """It is optimizer states of any unit, in memory that is shared with fp32 sums."""
    LENT = "lent"
    """The memory of activations serves as spare update buffers."""


class Content(NamedTuple):
    """A content has a kind, and belongs to a unit, to a round or micro-batch (`number`) and to a
    piece. `slot` is the slot that kept activations point into.
    """

    kind: ContentKind
    unit: str = ""
    number: int | None = None
    piece: int | None = None
    slot: Buffer | None = None

    def __str__(self) -> str:
        where = "" if self.slot is None else f" in {self.slot}"
        return _text(self.kind, self.unit, self.number, self.piece) + where


READY = Content(ContentKind.READY)

_FORM = re.compile(r"([a-z ]+?)(?:\(([^()]*)\))?(?: (\d+))?(?:/(\d+))?")


def _text(kind: Word, unit: str, number: int | None, piece: int | None) -> str:
    """Returns `kind(unit) number/piece`, without the parts that are not given."""
    text: str = kind.value
    if unit:
        text += f"({unit})"
    if number is not None:
        text += f" {number}"
    if piece is not None:
        text += f"/{piece}"
    return text


def _parts(text: str) -> tuple[str, str, int | None, int | None]:
    """Returns kind, unit, number and piece of what `_text` has written."""
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no buffer and no content")
    kind, unit, number, piece = found.groups()
    return kind, unit or "", _number(number), _number(piece)


def _number(digits: str | None) -> int | None:
    return None if digits is None else int(digits)


def read_buffer(text: str) -> Buffer:
    """Returns the buffer whose `str` is `text`. Raises ValueError for any other text."""
    kind, unit, number, piece = _parts(text)
    return Buffer(BufferKind(kind), unit, number, piece)


def read_content(text: str) -> Content:
    """Returns the content whose `str` is `text`. Raises ValueError for any other text."""
    text, _, slot_text = text.partition(" in ")
    kind, unit, number, piece = _parts(text)
    slot = read_buffer(slot_text) if slot_text else None
    return Content(ContentKind(kind), unit, number, piece, slot)
