"""Rows that are read through a registry of LLaMA-Factory become what its own program makes of them
(`AlpacaDatasetConverter`, of which `converted` repeats what it says).
"""

from __future__ import annotations

import itertools
import json
from typing import Any

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.formats.example import Pair, Preference
from engine.data.formats.formats import map_columns
from engine.data.sources.open_source import open_source

COLUMNS = {"prompt": "q", "query": "more", "response": "a", "system": "s", "history": "h"}
RANKED = {"prompt": "q", "query": "more", "chosen": "good", "rejected": "bad"}
ROWS = [
    {"q": q, "more": more, "a": f"answer {n}", "s": system, "h": history}
    for n, (q, more, system, history) in enumerate(
        itertools.product(
            ["Translate.", "Translate\n", "", None],
            ["tree", " a\nb ", "", " ", None],
            ["", "Be short."],
            [[], [["Hi", "Hello"]], None],
        )
    )
    if q or more
]


def converted(row: dict[str, Any], columns: dict[str, str]) -> list[dict[str, str]]:
    found = []
    history = row[columns["history"]] if "history" in columns else None
    if isinstance(history, list):
        for old_prompt, old_response in history:
            found.append({"role": "user", "content": old_prompt})
            found.append({"role": "assistant", "content": old_response})
    query = []
    if row[columns["prompt"]]:
        query.append(row[columns["prompt"]])
    if row[columns["query"]]:
        query.append(row[columns["query"]])
    found.append({"role": "user", "content": "\n".join(query)})
    return found


def examples(folder, entry, rows, reads="examples"):
    (folder / "rows.json").write_text(json.dumps(rows))
    registry = folder / "dataset_info.json"
    registry.write_text(json.dumps({"a": {"file_name": "rows.json"} | entry}))
    source = open_source(DataConfig(source=f"{registry}:a"))
    read = list(source.read())
    columns = map_columns("auto", [row for _, row in read], source, DataColumns(), reads)
    return [columns.example(row, source.where(number)) for number, row in read]


def test_questions_are_joined_as_the_registrys_program_joins_them(tmp_path):
    found = examples(tmp_path, {"columns": COLUMNS}, ROWS)
    assert len(found) == len(ROWS) == 96
    for row, example in zip(ROWS, found):
        talk = example.conversation() if isinstance(example, Pair) else example
        system = [{"role": "system", "content": row["s"]}] if row["s"] else []
        answer = [{"role": "assistant", "content": row["a"]}]
        assert talk.messages == [*system, *converted(row, COLUMNS), *answer], row


def test_rankings_are_joined_as_the_registrys_program_joins_them(tmp_path):
    rows = [{"q": row["q"], "more": row["more"], "good": "yes", "bad": "no"} for row in ROWS]
    rows = [row for row in rows if (row["q"] or "").strip() or (row["more"] or "").strip()]
    found = examples(tmp_path, {"ranking": True, "columns": RANKED}, rows, reads="pairs")
    for row, example in zip(rows, found, strict=True):
        assert isinstance(example, Preference) and example.rejected is not None
        for answer, talk in (("yes", example.chosen), ("no", example.rejected)):
            asked = converted(row, RANKED)
            shown = talk.conversation() if isinstance(talk, Pair) else talk
            assert shown.messages == [*asked, {"role": "assistant", "content": answer}], row


def test_rows_without_a_registry_have_a_blank_line_between(tmp_path):
    (tmp_path / "rows.json").write_text(
        json.dumps([{"instruction": "Translate.", "input": "tree", "output": "Baum"}])
    )
    source = open_source(DataConfig(source=str(tmp_path / "rows.json")))
    ((_, row),) = source.read()
    columns = map_columns("auto", [row], source, DataColumns())
    assert columns.example(row, "item 1") == Pair("Translate.\n\ntree", "Baum", separator="\n\n")
