"""Every message arrives as it was sent, and bytes that are no message get one sentence."""

from __future__ import annotations

import json
import random
import warnings
from enum import Enum
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec import inspect
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.runtime.distributed import codec, messages
from engine.runtime.distributed.codec import (
    MessageError,
    config_of,
    config_text,
    decode,
    encode,
    kinds,
)
from engine.runtime.distributed.messages import Failed, Losses, Message, ShardReply
from tests.support.sets import slow_but

TIMES = 40
DTYPES = (np.uint8, np.int64, np.float32, np.bool_, np.float64, np.int32)


class Made:
    """Makes values of any type that messages have."""

    def __init__(self, seed: int):
        self.drawn = random.Random(seed)

    def message(self, kind: type[Message]) -> Message:
        return self.value(inspect.type_info(kind))

    def value(self, info: Any) -> Any:
        drawn = self.drawn
        match info:
            case inspect.StructType() | inspect.DataclassType() | inspect.NamedTupleType():
                fields = {each.name: self.value(each.type) for each in info.fields}
                return info.cls(**fields)
            case inspect.UnionType(types):
                return self.value(drawn.choice(types))
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return drawn.random() < 0.5
            case inspect.IntType():
                return drawn.choice([0, 1, -1, drawn.getrandbits(31), 2**63 - 1, -(2**63)])
            case inspect.Metadata(kind):
                return self.value(kind)
            case inspect.FloatType() if (info.le, info.lt) != (None, None):
                return 0.5 * drawn.random()  # within the limits of all settings in messages
            case inspect.FloatType():
                return drawn.choice([0.0, -0.0, 1e-300, 0.1, float("inf"), drawn.random()])
            case inspect.StrType():
                letters = "a. ü\n\0\u2028𝄞\"'"
                return "".join(drawn.choices(letters, k=drawn.choice([0, 1, 5, 300])))
            case inspect.LiteralType(values):
                return drawn.choice(values)
            case inspect.EnumType(cls):
                return drawn.choice(list(cls))
            case inspect.VarTupleType(item):
                return tuple(self.some(item))
            case inspect.ListType(item) | inspect.CollectionType(item):
                return self.some(item)
            case inspect.TupleType(items):
                return tuple(map(self.value, items))
            case inspect.DictType(key, value):
                return {self.value(key): self.value(value) for _ in range(drawn.randrange(4))}
            case inspect.CustomType(cls) if cls is np.ndarray:
                return self.array()
            case inspect.CustomType():
                return drawn.choice(DTYPES)
            case inspect.AnyType():
                return drawn.choice([None, True, 3, 0.5, "text", ["a", {"b": None}]])
        raise AssertionError(f"{info} is in a message, and this test cannot make one")

    def some(self, item: Any) -> list:
        return [self.value(item) for _ in range(self.drawn.randrange(4))]

    def array(self) -> np.ndarray:
        shape = [self.drawn.randrange(5) for _ in range(self.drawn.randrange(4))]
        values = np.random.default_rng(self.drawn.getrandbits(32)).integers(0, 2, [*shape, 2])
        array = values.astype(self.drawn.choice(DTYPES))[..., 0]  # of every second element
        return array if self.drawn.random() < 0.5 else np.ascontiguousarray(array)


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are the same, but for the kind of lists."""
    if isinstance(one, np.ndarray):
        is_alike = (one.dtype, one.shape) == (other.dtype, other.shape)
        return is_alike and one.tobytes() == other.tobytes() and other.flags.writeable
    if isinstance(one, Enum):
        return type(one) is type(other) and one == other
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(is_same, one, other))
    if hasattr(one, "__dataclass_fields__") or isinstance(one, msgspec.Struct):
        names = getattr(one, "__dataclass_fields__", None) or one.__struct_fields__
        return type(one) is type(other) and all(
            is_same(getattr(one, name), getattr(other, name)) for name in names
        )
    return type(one) is type(other) and repr(one) == repr(other)


def test_these_are_all_kinds():
    of_module = {
        each
        for each in vars(messages).values()
        if isinstance(each, type) and issubclass(each, Message) and each is not Message
    }
    assert of_module == set(kinds()) and len({kind.__name__ for kind in of_module}) == 28


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_every_message_arrives_as_it_was_sent(kind):
    made = Made(7)
    for _ in range(TIMES):
        message = made.message(kind)
        assert is_same(message, decode(encode(message))), message


def test_random_bytes_get_one_sentence():
    drawn = random.Random(3)
    for _ in range(20_000):
        sentence_of(drawn.randbytes(drawn.randrange(60)))


@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_damaged_messages_are_read_by_type_or_get_one_sentence(kind):
    made = Made(11)
    for _ in range(TIMES):
        content = bytearray(encode(made.message(kind)))
        for _ in range(made.drawn.randrange(1, 4)):
            content[made.drawn.randrange(len(content))] = made.drawn.getrandbits(8)
        sentence_of(
            content[: made.drawn.choice([len(content), made.drawn.randrange(len(content))])]
        )


def sentence_of(content: bytes | bytearray) -> str:
    try:
        assert isinstance(decode(content), kinds())
    except MessageError as error:
        sentence = str(error)
        assert sentence.startswith("It is no message of this program (") and sentence.endswith(").")
        assert "\n" not in sentence and len(sentence) < 300
        return sentence
    return ""


DEEP = b"\x82\xa4type\xa5Hello\xa8settings"
HOSTILE = {
    "a list longer than any memory": b"\x83\xa4type\xa6Losses\xa6totals\xdd\xff\xff\xff\xff",
    "a map longer than any memory": DEEP + b"\xdf\xff\xff\xff\xff",
    "lists in lists": DEEP + b"\x81\xa1a" + b"\x91" * 100_000,
    "an unknown kind": b"\x81\xa4type\xa6System",
    "an unknown field": b"\x82\xa4type\xa4Done\xa1a\x01",
    "no kind": b"\x80",
    "text": b"\xa4Done",
    "a wrong type": b"\x82\xa4type\xa2Go\xa6number\xa1a",
    "a pickle": b"\x80\x04\x95\x1a\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94",
}
ARRAYS = {
    "objects": ["|O", [1], b"\0" * 8],
    "void": ["|V8", [1], b"\0" * 8],
    "another size": ["<f4", [3], b"\0" * 8],
    "a size below zero": ["<f4", [-1, -2], b"\0" * 8],
    "sizes that are truth": ["|u1", [True, 8], b"\0" * 8],
    "sizes beyond all": ["<f4", [2**62, 4, 0], b""],
    "many axes": ["|u1", [1] * 99, b"\0"],
    "text for bytes": ["|u1", [1], "a"],
    "a list": [[1], [1], b"\0"],
    "nothing": [],
    "a number": 3,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_bytes_get_one_sentence(name):
    assert sentence_of(HOSTILE[name])


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_are_none_get_one_sentence(name):
    made = {"type": "ShardReply", "content": ARRAYS[name]}
    assert "array" in sentence_of(msgspec.msgpack.encode(made))


def test_what_is_no_plain_data_is_not_sent():
    for wrong in (np.array([object()]), torch.zeros(1), lambda: 0):
        with pytest.raises(TypeError):
            encode(ShardReply(wrong))


def test_a_message_that_is_too_long_is_told(monkeypatch):
    monkeypatch.setattr(codec, "MOST_BYTES", 1 << 10)
    with pytest.raises(MessageError, match="^A message of the kind Failed has .* the most; eval"):
        encode(Failed("a" * 2000, ""))
    assert decode(encode(Losses((), ()))) == Losses((), ())


# --------------------------------------------------------------------- the model's configuration

# One of speech has a size that the library itself does not keep; the other is gpt2 by another name.
OTHERS = {"moshi", "gpt-sw3"}
# Of the families' names alone: the other mapping imports the configurations of all of them.
FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - OTHERS)
USUAL = [name for name in ("llama", "qwen3_moe", "gpt2", "gemma3_text") if name in FAMILIES]


@pytest.mark.parametrize(
    "family", slow_but(FAMILIES, USUAL, "it makes the configurations of all families")
)
def test_a_configuration_arrives_as_rank_0_changed_it(family):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            config = CONFIG_MAPPING[family]()
        except Exception as error:
            pytest.skip(f"transformers makes none without values: {error}")
    config.dtype = torch.bfloat16
    if family in USUAL:
        config.vocab_size = 321
    again = config_of(config_text(config))
    assert type(again) is type(config)
    ours, theirs = config.to_dict(), again.to_dict()
    for values in (ours, theirs):
        values.pop("transformers_version", None)
    # Where the library keeps a tuple, it reads a list.
    assert json.dumps(theirs, sort_keys=True) == json.dumps(ours, sort_keys=True)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"model_type": "os"}', '{"model_type": []}'])
def test_a_configuration_that_is_none_gets_a_sentence(text):
    with pytest.raises(MessageError, match=r"^The model's configuration cannot be read \(.*\)\.$"):
        config_of(text)
