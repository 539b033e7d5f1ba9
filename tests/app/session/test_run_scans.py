"""The list of runs says what each folder takes on the disk."""

from __future__ import annotations

import os
import time

from app.session.run_scans import RunScans


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
