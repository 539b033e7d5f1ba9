"""Changes to what a run changes of its model: tokens that are added, and longer rows."""

from __future__ import annotations

from tests.support.changes.record import Change

ROWS = "engine/training/weights/resize_embeddings.py"
SPECIAL = "engine/data/tokens/special_tokens.py"
ROPE = "engine/model/build/rope_scaling.py"
ROW_TESTS = "tests/engine/model/test_new_rows.py"
ROPE_TESTS = "tests/engine/model/test_rope_scaling.py"

RUN_MODELS = (
    Change(
        "new-rows-of-a-sum",
        ROWS,
        "    mean /= len(old)\n",
        "",
        "New rows begin at the sum of the old ones, and not at their mean.",
        (ROW_TESTS,),
    ),
    Change(
        "new-rows-drawn-too-wide",
        ROWS,
        "_SCALE = 1e-9",
        "_SCALE = 1e-2",
        "New rows are far from the mean of the old ones.",
        (ROW_TESTS,),
    ),
    Change(
        "an-added-token-that-is-typed-is-text",
        SPECIAL,
        "        special -= set(own)\n",
        "",
        "A token that the user added is split where somebody typed it.",
        (ROW_TESTS,),
    ),
    Change(
        "positions-not-raised",
        ROPE,
        "        text.max_position_embeddings = int(own * factor)\n",
        "",
        "An export that is scaled by yarn says that its rows are as short as before.",
        (ROPE_TESTS,),
    ),
)
