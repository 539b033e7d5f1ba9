"""Formats without turns: a text, segments of a text, and tokens that another program made."""

from __future__ import annotations

from typing import Any

from engine.data.formats.example import Example, Segments, Text, Tokens
from engine.data.formats.format import Format, is_text
from engine.data.formats.row_parts import Parts
from engine.data.formats.values import is_blank, type_text, valid_text
from engine.errors import DataError

_UNTRAINED = -100
_HIGHEST = (1 << 31) - 1


def _read_text(parts: Parts) -> Example | None:
    text = parts.text("text")
    return Text(text) if text.strip() else None


TEXT = Format(
    name="text",
    has_answers=False,
    required={"text": ("text", "content")},
    read=_read_text,
    looks_like=lambda first: is_text(first["text"]),
    needs="a column text",
)


# ---------------------------------------------------------------------- segments


def _read_segments(parts: Parts) -> Example | None:
    value = parts.value("segments")
    if is_blank(value):
        return None
    if not isinstance(value, list | tuple):
        raise DataError(
            f"The column {parts.place('segments')} is {type_text(value)}; write a list."
        )
    found = []
    for number, segment in enumerate(value, 1):
        keys = segment if isinstance(segment, dict) else {}
        text, label = keys.get("text"), keys.get("label")
        if not isinstance(text, str) or not isinstance(label, bool):
            raise DataError(
                f"Segment {number} of {parts.place('segments')} is not {{label, text}}; write "
                "label as true or false."
            )
        found.append((valid_text(text), label))
    return Segments(tuple(found)) if any(text for text, _ in found) else None


SEGMENTS = Format(
    name="segments",
    has_answers=False,
    required={"segments": ("segments",)},
    read=_read_segments,
    looks_like=lambda first: _first_has(first["segments"], {"text", "label"}),
    needs="a column segments: a list of {label, text}",
    weak=frozenset({"segments"}),
    is_fixed=True,
)


def _first_has(value: Any, keys: set[str]) -> bool:
    is_list = isinstance(value, list | tuple) and bool(value)
    return is_list and isinstance(value[0], dict) and keys <= set(value[0])


# ---------------------------------------------------------------------- tokens


def _read_tokens(parts: Parts) -> Example | None:
    ids = _numbers(parts, "input_ids")
    if not ids:
        return None
    if not 0 <= min(ids) <= max(ids) <= _HIGHEST:
        raise DataError(f"A token in {parts.place('input_ids')} is outside 0 to {_HIGHEST:,}.")
    loss_mask = [True] * len(ids)
    if "labels" in parts.columns:
        loss_mask = _labeled(parts, ids)
    if "mask" in parts.columns:
        mask = _same_length(parts, "mask", ids)
        loss_mask = [old and bool(new) for old, new in zip(loss_mask, mask)]
    begin, end = _without_padding(parts, ids)
    _refuse_several(parts, ids, begin, end)
    return Tokens(ids[begin:end], loss_mask[begin:end]) if end > begin else None


def _labeled(parts: Parts, ids: list[int]) -> list[bool]:
    """Returns which tokens are trained: those whose label is the token itself, and not -100."""
    labels = _same_length(parts, "labels", ids)
    for place, (label, token) in enumerate(zip(labels, ids)):
        if label not in (_UNTRAINED, token):
            raise DataError(
                f"Label {place} of {parts.place('labels')} is neither its token nor -100; write "
                "labels that are not shifted."
            )
    return [label != _UNTRAINED for label in labels]


def _without_padding(parts: Parts, ids: list[int]) -> tuple[int, int]:
    """Returns the first token that is no padding, and the one behind the last."""
    if "attention_mask" not in parts.columns:
        return 0, len(ids)
    seen = _same_length(parts, "attention_mask", ids)
    places = [place for place, is_seen in enumerate(seen) if is_seen]
    if not places:
        return 0, 0
    begin, end = places[0], places[-1] + 1
    if len(places) != end - begin or not set(seen) <= {0, 1}:
        raise DataError(
            f"The column {parts.place('attention_mask')} hides tokens between others, or numbers "
            "several texts; give one text a row."
        )
    return begin, end


def _refuse_several(parts: Parts, ids: list[int], begin: int, end: int) -> None:
    """Refuses a row that other programs packed of several texts: each would see the others."""
    if "position_ids" not in parts.columns:
        return
    if 0 in _same_length(parts, "position_ids", ids)[begin + 1 : end]:
        raise DataError(
            f"The column {parts.place('position_ids')} begins anew within the row, so the row "
            "holds several texts; give one text a row."
        )


def _same_length(parts: Parts, part: str, ids: list[int]) -> list[int]:
    numbers = _numbers(parts, part)
    if len(numbers) != len(ids):
        raise DataError(
            f"The column {parts.place(part)} has {len(numbers):,} numbers for {len(ids):,} tokens; "
            "write one for each."
        )
    return numbers


def _numbers(parts: Parts, part: str) -> list[int]:
    value = parts.value(part)
    if value is None:
        return []
    is_list = isinstance(value, list | tuple)
    if not is_list or not all(isinstance(number, int) for number in value):
        raise DataError(f"The column {parts.place(part)} is not a list of whole numbers.")
    return [int(number) for number in value]


TOKENS = Format(
    name="tokens",
    has_answers=False,
    required={"input_ids": ("input_ids",)},
    optional={
        "labels": ("labels",),
        "attention_mask": ("attention_mask",),
        "mask": ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask"),
        "position_ids": ("position_ids",),
    },
    read=_read_tokens,
    looks_like=lambda first: (
        isinstance(first["input_ids"], list)
        and all(isinstance(token, int) for token in first["input_ids"][:8])
    ),
    needs="a column input_ids: a list of token ids",
    weak=frozenset({"input_ids"}),
    is_fixed=True,
)
