"""Rows are counted as a run reads them, where that can be known before it."""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataConfig
from engine.config.settings import TrainConfig
from engine.data.tokens import column_survey
from engine.data.tokens.column_survey import count_rows

ROW = json.dumps({"prompt": "a", "completion": "b"})


def data(source) -> DataConfig:
    return TrainConfig.from_dict(
        {"model": {"source": "m"}, "data": {"source": source}, "train": {"steps": 1}}
    ).data


@pytest.fixture
def files(tmp_path):
    (tmp_path / "lines.jsonl").write_text(f"{ROW}\n\n{ROW}\n{ROW}", encoding="utf-8")
    (tmp_path / "table.csv").write_text('prompt,completion\na,"b\nc"\nd,e\n', encoding="utf-8")
    return tmp_path


def test_rows_of_files_folders_and_mixes(files):
    assert count_rows(data(str(files / "lines.jsonl"))) == 3
    assert count_rows(data(str(files / "table.csv"))) == 2
    folder = files / "folder"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.jsonl").write_text(f"{ROW}\n{ROW}", encoding="utf-8")
    assert count_rows(data(str(folder))) == 4
    mix = [{"source": str(folder), "weight": 0.5}, {"source": str(files / "table.csv")}]
    assert count_rows(data(mix)) == 4


def test_what_is_not_known_before_a_run_is_none(files, monkeypatch):
    assert count_rows(data("someone/of-the-hub")) is None
    (files / "broken.json").write_text("[{", encoding="utf-8")
    assert count_rows(data(str(files / "broken.json"))) is None
    monkeypatch.setattr(column_survey, "LARGEST_COUNTED", 10)
    assert count_rows(data(str(files / "lines.jsonl"))) is None
