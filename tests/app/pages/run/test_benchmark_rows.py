"""The table of benchmarks says what was measured, of which weights, and how."""

from __future__ import annotations

from app.pages.run.benchmark_rows import MOST_ROWS, benchmark_table
from engine.runs.summaries.benchmark_results import Benchmarks
from tests.support.measured import SEVERAL, measured


def test_each_result_is_a_row():
    table = benchmark_table(Benchmarks(list(SEVERAL)))
    first, _, answered, text = table["rows"]
    assert first == {
        "task": "arc_easy",
        "metric": "acc ↑",
        "value": "0.7321 ± 0.0091",
        "asked": "2,376, 0-shot",
        "weights": "best, step 120, bfloat16",
        "when": first["when"],
    }
    assert first["when"].startswith("2026-") and first["when"].endswith(", lm-eval 0.4.13")
    assert answered["metric"] == "exact_match (strict-match) ↑"
    assert (text["metric"], text["value"]) == ("word_perplexity ↓", "11.92")
    assert (text["asked"], text["weights"]) == (
        "62 at most, 0-shot",
        "exported, step 120, bfloat16",
    )
    assert table["caption"] == ""


def test_what_is_not_known_is_left_out():
    lacking = {"value": None, "error": None, "higher_is_better": None, "shots": None}
    one = measured(**lacking, samples=None, step=None, chat=True, time=1e300)
    (row,) = benchmark_table(Benchmarks([one]))["rows"]
    assert (row["metric"], row["value"], row["asked"]) == ("acc", "–", "chat template")
    assert row["weights"] == "best, bfloat16" and row["when"].startswith("–")


def test_the_newest_are_shown_and_damage_is_told():
    assert benchmark_table(Benchmarks()) == {"rows": [], "caption": ""}
    many = [measured(str(number), time=float(number)) for number in range(MOST_ROWS + 9)]
    table = benchmark_table(Benchmarks(many, "A line is damaged."))
    assert len(table["rows"]) == MOST_ROWS and table["rows"][0]["task"] == str(MOST_ROWS + 8)
    assert table["caption"] == "A line is damaged. The latest 200 of 209 results are shown."
