"""All formats are in one list. What comes first is preferred where the columns fit several."""

from __future__ import annotations

from engine.examples.format import Format
from engine.examples.of_gemini import GEMINI
from engine.examples.of_pairs import ALPACA, PROMPT_COMPLETION
from engine.examples.of_preferences import ARENA, PREFERENCE
from engine.examples.of_texts import SEGMENTS, TEXT, TOKENS
from engine.examples.of_trees import OASST
from engine.examples.of_turns import MESSAGES, SHAREGPT

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
"""It finds each format by its name in `data.format`."""
