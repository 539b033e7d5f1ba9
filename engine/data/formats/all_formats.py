"""All formats in one list. Earlier ones are preferred where the columns fit several."""

from __future__ import annotations

from engine.data.formats.format import Format
from engine.data.formats.of_gemini import GEMINI
from engine.data.formats.of_pairs import ALPACA, PROMPT_COMPLETION
from engine.data.formats.of_preferences import ARENA, PREFERENCE
from engine.data.formats.of_texts import SEGMENTS, TEXT, TOKENS
from engine.data.formats.of_trees import OASST
from engine.data.formats.of_turns import MESSAGES, SHAREGPT

_ALL: tuple[Format, ...] = (
    PREFERENCE,
    ARENA,
    MESSAGES,
    SHAREGPT,
    GEMINI,
    ALPACA,
    PROMPT_COMPLETION,
    OASST,
    SEGMENTS,
    TOKENS,
    TEXT,
)
FORMATS: dict[str, Format] = {made.name: made for made in _ALL}
"""Formats by their names in `data.format`."""
