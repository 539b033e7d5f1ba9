"""The list of runs says what each folder takes on the disk."""

from __future__ import annotations

import os
import time

from app.session.run_scans import RunScans, scanned
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.app.verdict.made_runs import CONFIG
from tests.support.synthetic_run import run_events


def test_files_that_checkpoints_share_count_once(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "first").write_bytes(bytes(4096))
    os.link(folder / "first", folder / "second")
    scans = RunScans(tmp_path)
    scans.ask(["run"])
    while not (known := scans.known(["run"])):
        time.sleep(0.01)  # another thread looks
    assert known["run"].folder_bytes == 4096


def test_the_outcome_of_a_run_is_read_where_only_its_answers_are_known(tmp_path):
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(30):
        recorder.emit(event)
    recorder.close()
    scan = scanned(folder)
    assert scan.sparkline.validation_loss is None
    assert scan.outcome is not None and scan.outcome.word == "Learned"


def test_a_run_that_has_finished_is_judged_anew_at_once(tmp_path):
    """It was listed as finished, in gray, until the scan from before its end was old enough."""
    folder = create_run(tmp_path, CONFIG)
    recorder = RunRecorder(folder.path, folder.id)
    *going, ended = run_events(30)
    for event in going:
        recorder.emit(event)
    scans = RunScans(tmp_path)

    def known(finished=()):
        while not scans.ask([folder.id], finished):
            time.sleep(0.01)  # another thread looks
        return scans.known([folder.id])[folder.id]

    assert known().outcome is None
    recorder.emit(ended)
    recorder.close()
    assert known([folder.id]).outcome is not None
