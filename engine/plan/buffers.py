"""What ops read and write: buffers, and what a buffer is known to hold. Plain values with a text
form. No torch.

A buffer is named by what it is for, not by an address. Two ops that name the same buffer are
ordered by it; what each expects to find there, and what it leaves, is a `Content`, so that a plan
can be proved to read nothing wrong.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

EMBED, HEAD = "embed", "head"
"""The units before and after the blocks."""


class Word(StrEnum):
    """A string with a fixed set of values. It hashes as a string does: a plan looks words up by the
    hundred thousand, and an enum's own hash is a call of Python.
    """

    __hash__ = str.__hash__


class BufferKind(Word):
    # On the host.
    WEIGHTS = "weights"
    """The `weight_high` plane of a unit, or a piece of it."""
    STATES = "optimizer states"
    """The unit's other planes, but for the gradient, or a piece of them."""
    GRADIENT = "gradient"
    """The unit's gradient plane."""
    HOST_BOUNDARY = "host boundary"
    """The input of a block, of one micro-batch."""
    CLIP = "clip"
    """The clip factor, known to the host."""
    # On the device.
    SLOT = "slot"
    """Weights of one unit while it computes; a piece of it where an optimizer writes to it piece by
    piece.
    """
    HIDDEN = "hidden"
    """Hidden state of a micro-batch, or its gradient."""
    SAVED = "saved"
    """What a block keeps from forward to backward, of one micro-batch."""
    STORE_RING = "store ring"
    """A boundary on its way to the host."""
    FETCH_RING = "fetch ring"
    """A boundary on its way back."""
    SUM = "sum"
    """An fp32 sum of gradients."""
    STAGING = "staging"
    """A rounded gradient on its way to the host."""
    NORM = "norm"
    """Squared norm of a unit's gradient."""
    LOSS = "loss"
    SUMMARY = "summary"
    """Loss, norms and clip factor of the step."""
    UPDATE = "update buffer"
    """A piece of every plane of a unit whose optimizer runs on the device."""
    UPDATE_GRADIENT = "update gradient"
    """The gradient's part of an update buffer, which is filled on its own."""
    ARENA = "arena"
    """Memory that fp32 sums and one update buffer share."""
    LENDABLE = "lendable"
    """Memory that activations of the last blocks and spare update buffers share."""


class Buffer(NamedTuple):
    """`kind`, and which one of its kind: by unit, by number (of the buffer or of the micro-batch)
    and by piece.
    """

    kind: BufferKind
    unit: str = ""
    number: int | None = None
    piece: int | None = None

    def __str__(self) -> str:
        return _text(*self)

    @property
    def whole(self) -> Buffer:
        """The buffer that this one is a piece of."""
        return self._replace(piece=None)

    def part(self, piece: int) -> Buffer:
        return self._replace(piece=piece)


class ContentKind(Word):
    READY = "ready"
    """What it is there for; nothing else is ever in it."""
    WEIGHTS = "weights"
    """Of a unit."""
    HIDDEN = "hidden"
    """After a block, or, without a unit, before the first; by round."""
    GRADIENT = "gradient"
    """Of the input of a unit, by round."""
    BOUNDARY = "boundary"
    """Input of a block, by micro-batch or by round."""
    ACTIVATIONS = "activations"
    """All that backward needs of a block; views into `slot` are among them."""
    SUM = "sum"
    """Of a unit's gradients; on the host and in a staging buffer, rounded."""
    EARLIER_SUM = "earlier sum"
    """Of the rounds before."""
    FETCHED = "fetched"
    """States of a piece of a unit, as they are on the host."""
    UPDATED = "updated"
    """The same after AdamW."""
    STATES = "states"
    LENT = "lent"


class Content(NamedTuple):
    """What is in a buffer: `kind`, and of which unit, round or micro-batch (`number`) and piece.
    `slot`: the one that kept activations point into.
    """

    kind: ContentKind
    unit: str = ""
    number: int | None = None
    piece: int | None = None
    slot: Buffer | None = None

    def __str__(self) -> str:
        return _text(*self[:4]) + ("" if self.slot is None else f" in {self.slot}")


READY = Content(ContentKind.READY)

_FORM = re.compile(r"([a-z ]+?)(?:\(([^()]*)\))?(?: (\d+))?(?:/(\d+))?")


def _text(kind: str, unit: str, number: int | None, piece: int | None) -> str:
    """`kind(unit) number/piece`, without what is not given."""
    return (
        kind.value
        + (f"({unit})" if unit else "")
        + ("" if number is None else f" {number}")
        + ("" if piece is None else f"/{piece}")
    )


def _parts(text: str) -> tuple[str, str, int | None, int | None]:
    found = _FORM.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} names no buffer and no content")
    kind, unit, number, piece = found.groups()
    return (
        kind,
        unit or "",
        None if number is None else int(number),
        None if piece is None else int(piece),
    )


def read_buffer(text: str) -> Buffer:
    """The buffer whose `str` this is. Raises ValueError for any other text."""
    kind, *rest = _parts(text)
    return Buffer(BufferKind(kind), *rest)


def read_content(text: str) -> Content:
    """The content whose `str` this is. Raises ValueError for any other text."""
    text, _, slot = text.partition(" in ")
    kind, *rest = _parts(text)
    return Content(ContentKind(kind), *rest, read_buffer(slot) if slot else None)
