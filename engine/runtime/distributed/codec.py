"""Messages between ranks become bytes here, and bytes become messages.

What comes from another process is read as one of the kinds in
`engine.runtime.distributed.messages`, each field by its type, and is nothing else: no bytes name a
class or a function of this program. Whoever cannot be read gets one sentence.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import reprlib
from typing import Any

import msgspec
import numpy as np

from engine.errors import RamstreamError, first_line
from engine.model.build.library import transformers
from engine.runtime.distributed.messages import Message

MOST_BYTES = 2 << 30
"""Most bytes of a message. The longest ones have the rows of an evaluation."""
_ARRAYS = {
    "|b1": np.bool_,
    "|i1": np.int8,
    "|u1": np.uint8,
    "<i2": np.int16,
    "<u2": np.uint16,
    "<i4": np.int32,
    "<u4": np.uint32,
    "<i8": np.int64,
    "<u8": np.uint64,
    "<f2": np.float16,
    "<f4": np.float32,
    "<f8": np.float64,
}
"""Arrays have these types of elements, by the names that they have in messages."""
_MOST_AXES = 8
# Bytes may claim a list that no memory holds, or lists in lists in lists.
_UNREADABLE = (ValueError, TypeError, ArithmeticError, MemoryError, RecursionError)


class MessageError(RamstreamError):
    """Bytes are no message. The text is a sentence without a subject, such as `is not ...`."""


def encode(message: Message) -> bytes:
    """Returns a message as bytes. Raises MessageError for one that is too long."""
    content = _encoder.encode(message)
    if len(content) > MOST_BYTES:
        kind = type(message).__name__
        raise MessageError(
            f"A message of the kind {kind} has {len(content) / 2**30:.1f} GiB, and "
            f"{MOST_BYTES >> 30} GiB are the most; evaluate fewer rows."
        )
    return content


def decode(content: bytes | bytearray) -> Message:
    """Returns the message that bytes are. Raises MessageError where they are none."""
    try:
        return _decoder().decode(content)
    except _UNREADABLE as error:
        raise MessageError(f"It is no message of this program ({first_line(error)}).") from error


def config_text(config: Any) -> str:
    """Returns a model's configuration of transformers as text."""
    return json.dumps(config.to_dict())


def config_of(text: str) -> Any:
    """Returns the configuration that `config_text` wrote: one of a family that transformers has.
    Raises MessageError for any other text.
    """
    try:
        values = json.loads(text)
        family = transformers().CONFIG_MAPPING[values["model_type"]]
        return family.from_dict(values)
    except Exception as error:
        # The library raises many kinds of errors for values that no configuration has.
        raise MessageError(
            f"The model's configuration cannot be read ({first_line(error)})."
        ) from error


def _told(value: Any) -> Any:
    """Returns a value that is no plain data as plain data."""
    if isinstance(value, np.ndarray):
        if value.dtype.str not in _ARRAYS:
            raise TypeError(f"arrays of {value.dtype} are in no message")
        whole = np.ascontiguousarray(value)
        return value.dtype.str, value.shape, whole.reshape(-1).view(np.uint8).data
    if isinstance(value, type) and issubclass(value, np.generic):
        return np.dtype(value).str
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is in no message")


def _read(kind: Any, value: Any) -> Any:
    """Returns what `_told` has told, a value of this kind."""
    if kind is np.ndarray:
        return _array(value)
    if isinstance(value, str) and value in _ARRAYS:  # a type of elements
        return _ARRAYS[value]
    raise ValueError(f"{reprlib.repr(value)} is no type of elements")


def _array(value: Any) -> np.ndarray:
    match value:
        case [str(name), list(shape), bytes(content)] if name in _ARRAYS:
            kind = np.dtype(_ARRAYS[name])
            sizes = [size for size in shape if type(size) is int and size >= 0]
            is_whole = len(sizes) == len(shape) <= _MOST_AXES
            if is_whole and math.prod(sizes) * kind.itemsize == len(content):
                # A copy, since whoever gets an array may write to it.
                return np.frombuffer(content, kind).reshape(sizes).copy()
    raise ValueError("an array is not whole")


@functools.cache
def kinds() -> tuple[type[Message], ...]:
    """Returns all kinds of messages."""
    return tuple(Message.__subclasses__())


@functools.cache
def _decoder() -> msgspec.msgpack.Decoder[Any]:
    union = functools.reduce(operator.or_, kinds())
    return msgspec.msgpack.Decoder(union, dec_hook=_read)


_encoder = msgspec.msgpack.Encoder(enc_hook=_told)
