"""Results of benchmarks, as `launch.py eval` would leave them, without asking anything."""

from __future__ import annotations

from engine.runs.summaries.benchmark_results import BenchmarkResult


def measured(task: str = "arc_easy", **changes) -> BenchmarkResult:
    """A result of a task, with these fields changed."""
    values = {
        "task": task,
        "metric": "acc",
        "value": 0.7321,
        "error": 0.0091,
        "higher_is_better": True,
        "shots": 0,
        "limit": None,
        "samples": 2376,
        "weights": "best",
        "step": 120,
        "dtype": "bfloat16",
        "chat": False,
        "time": 1.78e9,
        "harness": "0.4.13",
        "task_version": "1.0",
    }
    return BenchmarkResult(**{**values, **changes})


SEVERAL = (
    measured(),
    measured(metric="acc_norm", value=0.7012, error=0.0094),
    measured("gsm8k", metric="exact_match (strict-match)", value=0.4511, error=0.0137, shots=5),
    measured(
        "wikitext",
        metric="word_perplexity",
        value=11.9207,
        error=None,
        higher_is_better=False,
        samples=62,
        limit=62,
        weights="export",
    ),
)
"""They are of tasks of several kinds."""
