"""The preview shows how long the examples of a data set are, in numbers, in a figure and in
words.
"""

from __future__ import annotations

import json

import plotly.graph_objects as go
import pytest

from app.pages.new.data_figures import lengths_figure, lengths_text, packing_text
from engine.config.data_settings import DataConfig
from engine.data.batches.preview import preview
from tests.support.folders import make_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def previewed(tmp_path, tokenizer, counts, **changes):
    path = tmp_path / "data.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": "a", "completion": " ".join(["b"] * count)}) + "\n"
            for count in counts
        )
    )
    return preview(DataConfig(source=str(path), **({"max_seq_len": 16} | changes)), tokenizer)


def test_lengths_are_counted_and_rows_packed_as_a_run_packs_them(tmp_path, tokenizer):
    found = previewed(tmp_path, tokenizer, [3, 3, 5, 30])
    lengths, histogram = found["lengths"], found["histogram"]
    assert len(lengths) == 4
    assert sum(histogram["counts"]) == 4
    assert max(lengths) > 16
    assert histogram["edges"][0] == min(lengths) and histogram["edges"][-1] > max(lengths)
    kept = sum(min(length, 16) for length in lengths)
    assert found["packed_rows"] == 3 and found["percent_filled"] == round(100 * kept / 48, 1)
    figure = lengths_figure(found)
    go.Figure(json.loads(json.dumps(figure).replace("--rs-text", "#000")))
    assert figure["data"][0]["y"] == histogram["counts"]
    told = figure["data"][0]["customdata"]
    assert told[-1].endswith(" tokens: 1 example") and told[0].endswith(": 2 examples")
    assert figure["layout"]["shapes"][0]["x0"] == 16
    text = lengths_text(found)
    assert text.startswith("Typical example: ") and f"({min(lengths)}–{max(lengths)})" in text
    filled = f"Packed, 4 examples fill 3 rows of 16 tokens to {found['percent_filled']:g} %."
    assert packing_text(found) == filled
    assert "2 examples of more than 16 tokens are cut." in lengths_text(found | {"rows_cut": 2})
    assert text.endswith("1 example of more than 16 tokens is cut.")


def test_without_packing_or_differences_nothing_is_said_of_them(tmp_path, tokenizer):
    found = previewed(tmp_path, tokenizer, [4, 4], packing=False)
    assert found["packed_rows"] is None and not lengths_figure(found)["layout"]["shapes"]
    tokens = found["lengths"][0]
    assert lengths_text(found) == f"Every example has {tokens} tokens. None is cut."
    assert packing_text(found) == ""


def test_no_example_is_no_figure_of_nothing():
    nothing = {
        "lengths": [],
        "histogram": {"edges": [], "counts": []},
        "max_seq_len": 8,
        "rows_cut": 0,
        "packed_rows": None,
    }
    assert lengths_text(nothing) == "" and lengths_figure(nothing)["data"][0]["x"] == []
