"""A run that is killed while it writes its best weights has whole ones, those before or the new.

`python -m tests.engine.training.loop.test_kill_best` kills a run at moments of the writing. Every
session is a process of its own, forked from one without threads. Steps go on meanwhile.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.support.killed import get_ready, run_alone
from tests.support.killed_beside import (
    files_of,
    finish,
    forked,
    kill_at,
    watch_calls,
    write_in_chunks,
)

MOMENTS = (("write", 2), ("write", 20), ("fsync", 1), ("fsync", 7), ("rename", 1), ("renamed", 1))
"""The process is killed in this call of a kind, once the second evaluation is over."""
ROOM = 1 << 30


@pytest.mark.slow("it kills a run six times, for some twenty seconds")
def test_the_best_weights_are_whole_whenever_the_process_dies():
    shown = run_alone("tests.engine.training.loop.test_kill_best")
    assert re.search(r"^6 of 6 kills", shown, re.MULTILINE), shown


def every_step(config, runs: Path) -> None:
    """Trains a run that keeps a checkpoint of weights alone of every evaluated step."""
    from engine.training.loop.run import start_run

    values = {
        "output.checkpoint": "weights",
        "output.checkpoint_every": 6,
        "output.keep_checkpoints": 9,
    }
    finish(start_run(config.with_values(values), runs))


def killed(config, runs: Path, act: Callable[[str], None]) -> None:
    from engine.runs.record.events import EvalFinished
    from engine.training.loop.run import start_run

    run = start_run(config, runs)
    armed = []

    def arm(record) -> None:
        if isinstance(record.event, EvalFinished) and record.event.step == 12:
            # Steps may be faster than the weights of step 6 are written.
            while not (run.folder.path / "best" / "step-6").exists():
                time.sleep(0.005)
            armed.append(True)

    run.recorder.subscribe(arm)
    write_in_chunks(ROOM)
    watch_calls(lambda kind: act(kind) if armed else None)
    finish(run)


def check(runs: Path, steps: dict[int, dict[str, bytes]], named: bool) -> None:
    """Checks that what is kept is whole and of one step, and that the run, which has no checkpoint,
    begins anew and keeps its best. `named` says that the new weights had their name.
    """
    from engine.training.checkpoints.restore import newest_checkpoint
    from engine.training.loop.run import resume_run

    (folder,) = runs.iterdir()
    best = folder / "best"
    found = files_of(best)
    assert found and all(files == steps[step] for step, files in found.items())
    newest = newest_checkpoint(best)
    assert newest is not None and not newest.skipped
    assert newest.step == max(found) == (12 if named else 6), newest
    finish(resume_run(runs, folder.name))
    assert [path.name for path in best.iterdir()] == ["step-18"]
    assert files_of(best)[18] == steps[18]


def main() -> int:
    get_ready("tests.engine.training.loop.test_kill_best")

    from tests.support.overfitting import overfitting

    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        config = overfitting(root)
        forked(partial(every_step, config, root / "whole"))
        (folder,) = (root / "whole").iterdir()
        steps = files_of(folder / "checkpoints")
        kills = 0
        for number, (kind, count) in enumerate(MOMENTS):
            runs = root / f"killed-{number}"
            kills += forked(partial(killed, config, runs, kill_at(kind, count)))
            forked(partial(check, runs, steps, kind == "renamed"))
    print(f"{kills} of {len(MOMENTS)} kills: what is kept is whole, and of one step")
    return 0 if kills == len(MOMENTS) else 1


if __name__ == "__main__":
    sys.exit(main())
