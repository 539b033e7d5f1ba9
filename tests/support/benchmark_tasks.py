"""Tiny tasks of lm-evaluation-harness about the words of `tests.support.folders`, as files."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.support.folders import WORDS
from tests.support.rows import write_rows

TASKS = ("tiny_choice", "tiny_answer", "tiny_text")


def make_tasks(folder: Path, rows: int = 12) -> Path:
    """A folder with one task of each kind: choices of one and of several words, answers that end at
    a word, and texts whose perplexity is measured.
    """
    folder.mkdir()
    data = folder / "rows.jsonl"
    lines = []
    for k in range(rows):
        word, after, other = (WORDS[(k + shift) % 7] for shift in (0, 1, 3))
        lines.append(
            {
                "question": " ".join(["say"] * (k % 4) + ["after", word]),
                "choices": [after, f"{other} {word}", other, f"{after} say say"],
                "answer": k % 3,
                "target": f"{after} {other}",
                "text": " ".join(WORDS[(k * j) % 10] for j in range(1, 4 + 3 * k)),
            }
        )
    write_rows(data, lines)
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 2.0},
    }
    prompt = "<user> {{question}} <end> <assistant>"
    _write(
        folder / "choice.yaml",
        common
        | {
            "task": "tiny_choice",
            "output_type": "multiple_choice",
            "doc_to_text": prompt,
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [
                {"metric": name, "aggregation": "mean", "higher_is_better": True}
                for name in ("acc", "acc_norm")
            ],
        },
    )
    _write(
        folder / "answer.yaml",
        common
        | {
            "task": "tiny_answer",
            "output_type": "generate_until",
            "doc_to_text": prompt,
            "doc_to_target": "{{target}}",
            "generation_kwargs": {"until": ["six", "say say"], "max_gen_toks": 7},
            "metric_list": [
                {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
            ],
        },
    )
    _write(
        folder / "text.yaml",
        common
        | {
            "task": "tiny_text",
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
    )
    return folder


def _write(path: Path, task: dict) -> None:
    path.write_text(yaml.safe_dump(task), encoding="utf-8")
