"""Results of benchmarks are kept line by line, and damage costs the damaged lines alone."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from engine.errors import RunError
from engine.runs.summaries import lines_file
from engine.runs.summaries.benchmark_results import (
    RESULTS_FILE,
    BenchmarkResult,
    Benchmarks,
    append_benchmarks,
    latest,
    read_benchmarks,
)
from tests.support.hostile import HOSTILE

ONE = BenchmarkResult(
    task="arc_easy",
    metric="acc",
    value=0.5,
    error=0.01,
    higher_is_better=True,
    shots=5,
    limit=None,
    samples=2376,
    weights="best",
    step=30,
    dtype="bfloat16",
    chat=False,
    time=1.7e9,
    harness="0.4.13",
    task_version="1.0",
)
NOTHING = replace(ONE, value=None, error=None, higher_is_better=None, shots=None, step=None)


def test_what_is_written_is_read(tmp_path):
    assert read_benchmarks(tmp_path) == Benchmarks()
    append_benchmarks(tmp_path, [ONE, NOTHING])
    append_benchmarks(tmp_path, [replace(ONE, task=HOSTILE)])
    read = read_benchmarks(tmp_path)
    assert read.results == [ONE, NOTHING, replace(ONE, task=HOSTILE)] and read.problem == ""


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"task": "x"}',
        b"[" * 9999,
        b"VALUE 1e999",
        b'VALUE "0.5"',
        b"VALUE NaN",
        b'WEIGHTS "worst"',
    ],
)
def test_a_damaged_line_is_left_out_and_told(tmp_path, line):
    append_benchmarks(tmp_path, [ONE])
    file = tmp_path / RESULTS_FILE
    whole = file.read_bytes()
    line = (
        whole.strip().replace(b'"value":0.5', b'"value":' + line[6:]) if line[:1] == b"V" else line
    )
    line = whole.strip().replace(b'"best"', line[8:]) if line[:1] == b"W" else line
    file.write_bytes(whole + line + b"\n" + whole)
    read = read_benchmarks(tmp_path)
    assert read.results == [ONE, ONE]
    assert read.problem == f"A line of {RESULTS_FILE} is damaged and left out."


def test_a_torn_line_does_not_spoil_the_next_one(tmp_path):
    append_benchmarks(tmp_path, [ONE])
    with (tmp_path / RESULTS_FILE).open("ab") as file:
        file.write(b'{"task":"ar')
    append_benchmarks(tmp_path, [NOTHING])
    assert read_benchmarks(tmp_path).results == [ONE, NOTHING]


def test_a_file_that_cannot_be_read_is_told(tmp_path, monkeypatch):
    (tmp_path / RESULTS_FILE).mkdir()
    read = read_benchmarks(tmp_path)
    assert not read.results and read.problem.startswith(f"{RESULTS_FILE} cannot be read (")
    with pytest.raises(RunError, match="The results cannot be written"):
        append_benchmarks(tmp_path, [ONE])
    (tmp_path / RESULTS_FILE).rmdir()
    append_benchmarks(tmp_path, [ONE])
    monkeypatch.setattr(lines_file, "LARGEST_FILE", 10)
    assert "at most 10 are read" in read_benchmarks(tmp_path).problem


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path, monkeypatch):
    append_benchmarks(tmp_path, [ONE])
    write = os.write

    def half(descriptor, content):
        if len(content) < 100:
            raise OSError(28, "No space left on device")
        return write(descriptor, content[: len(content) - 50])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(RunError, match="No space left on device"):
        append_benchmarks(tmp_path, [NOTHING])
    monkeypatch.undo()
    assert read_benchmarks(tmp_path) == Benchmarks([ONE])


def test_two_that_write_at_once_lose_nothing(tmp_path):
    def write(number):
        for step in range(50):
            append_benchmarks(tmp_path, [replace(ONE, task=str(number), step=step)])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    read = read_benchmarks(tmp_path)
    assert len(read.results) == 150 and not read.problem


def test_the_latest_of_what_was_measured_alike_stays():
    again, other = replace(ONE, value=0.6, time=1.8e9), replace(ONE, limit=10)
    assert latest([ONE, other, again]) == [again, other]
