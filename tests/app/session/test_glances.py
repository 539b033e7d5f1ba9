"""The list of runs says what each folder takes on the disk."""

from __future__ import annotations

import os
import time

from app.session.glances import Glances


def test_files_that_checkpoints_share_count_once(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "first").write_bytes(bytes(4096))
    os.link(folder / "first", folder / "second")
    glances = Glances(tmp_path)
    glances.ask(["run"])
    while not (known := glances.known(["run"])):
        time.sleep(0.01)  # another thread looks
    assert known["run"].folder_bytes == 4096
