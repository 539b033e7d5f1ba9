"""Rows are changed as the rows of careless programs are: values of other types, lost and renamed
keys, nesting, odd numbers and odd texts.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from random import Random
from typing import Any

from tests.support.invented.texts import PIECES

_SAYS_WHAT_IS_TRAINED = frozenset(
    {
        *("weight", "train", "training", "loss_weight", "label", "kto_tag", "winner", "role"),
        *("from", "rank", "type", "input_ids", "labels", "rejected", "history"),
    }
)
"""With another value under these keys, a row may ask for other tokens to be trained."""
_deep: Any = "end"
for _ in range(70):
    _deep = [_deep]
_VALUES = (
    *(None, True, False, 0, 1, -1, 7, 0.5, 1e308, float("nan"), float("inf"), 10**40, 10**400),
    *("", " ", "\n\n", "hello", "\ud800", "a\udfffb", "x" * 3000, " " * 2000, "a\n" * 50),
    *("[[", "{", "null", "[]", "{}", '[{"a": 1}]', "[1]", "NaN", "\x00", "\ue000\ue001"),
    *([], {}, [None], [[]], [[[]]], {"a": {}}, {"": ""}, ["a", "b"], [1, 2], _deep),
    *({"type": "text"}, {"text": "hello"}, {"bytes": "a", "path": None}, {"url": "x"}),
)
_KEYS = (
    *(
        "",
        " ",
        "a\nb",
        "x" * 300,
        "日本",
        "\ud800",
        "\x00",
        "id",
        "meta",
        "score",
        "url",
        "'",
        "{a}",
    ),
    *("name", "date", "tool_call_id", "k" * 59 + "\n", "a.b", "%s"),
)
_NAMES = (
    *("role", "content", "from", "value", "text", "type", "parts", "weight", "train", "label"),
    *("prompt", "completion", "input", "output", "instruction", "system", "tools", "history"),
    *("messages", "conversations", "chosen", "rejected", "image", "images", "function_call"),
    *("tool_calls", "refusal", "segments", "input_ids", "attention_mask", "replies", "winner"),
)
_LEAVES = ("user", "assistant", "system", "tool", "human", "gpt", "model_a", "tie", "function")


def changed(row: dict[str, Any], random: Random, freely: bool) -> dict[str, Any]:
    """Returns the row with a few changes. Unless they are made `freely`, no text changes its part
    in the row: what is a question does not become an answer.
    """
    row = _copy(row)
    for _ in range(random.randint(1, 3)):
        places = list(_places(row, () if freely else _SAYS_WHAT_IS_TRAINED))
        if not places:
            break
        container, key = random.choice(places)
        kinds = (_replace, _replace, _remove, _nest, _add, _lengthen)
        more = (_rename, _swap, _replace_by_name) if freely else ()
        random.choice((*kinds, *more))(container, key, random)
    return row


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(inner) for key, inner in value.items()}
    return [_copy(inner) for inner in value] if isinstance(value, list) else value


def _places(value: Any, left_out: Container[Any], depth: int = 0) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a value with each of its keys that is not left out."""
    if depth > 8 or not isinstance(value, dict | list):
        return
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        if isinstance(value, dict) and key in left_out:
            continue
        yield value, key
        if key not in ("input_ids", "labels"):
            yield from _places(value[key], left_out, depth + 1)


def _replace(container: Any, key: Any, random: Random) -> None:
    container[key] = _copy(random.choice(_VALUES))


def _remove(container: Any, key: Any, random: Random) -> None:
    del container[key]


def _nest(container: Any, key: Any, random: Random) -> None:
    value = container[key]
    container[key] = random.choice(([value], {"a": value}, [[value]], [None, value]))


def _add(container: Any, key: Any, random: Random) -> None:
    value = _copy(random.choice(_VALUES))
    if isinstance(container, dict):
        container[random.choice(_KEYS)] = value
    else:
        container.insert(random.randint(0, len(container)), value)


def _lengthen(container: Any, key: Any, random: Random) -> None:
    if isinstance(container[key], str):
        piece = random.choice((*PIECES, "\ud800", "hello " * 300))
        container[key] = random.choice((container[key] + piece, piece + container[key]))


def _rename(container: Any, key: Any, random: Random) -> None:
    if isinstance(container, dict):
        container[random.choice(_NAMES)] = container.pop(key)


def _swap(container: Any, key: Any, random: Random) -> None:
    other = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
    container[key], container[other] = container[other], container[key]


def _replace_by_name(container: Any, key: Any, random: Random) -> None:
    container[key] = random.choice((*_LEAVES, *_NAMES))
