"""A run that is killed with SIGKILL at any moment and resumed equals the undisturbed run bit for
bit.

`python -m tests.engine.training.loop.test_kill --kills 50` kills a run at least fifty times, and at
least once at each kind of moment. Every session of a run is a process of its own, forked from one
that has imported everything and has no threads, so that most of its time is spent on the run.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.killed import after, before, die, get_ready, know_model, run_alone

pytestmark = pytest.mark.slow("it starts processes and waits for them, for five seconds or more")

STEPS, CHECKPOINT_EVERY = 18, 4
MOMENTS = ("any time", "checkpoint", "update", "record")


def test_killed_anywhere_resumed_and_equal_to_the_bit():
    shown = run_alone("tests.engine.training.loop.test_kill", "--kills", "6")
    assert re.search(r"^(\d+) of \1 kills", shown, re.MULTILINE), shown
    assert all(re.search(rf"\d at {moment}", shown) for moment in MOMENTS), shown


# ---------------------------------------------------------------------- the moment of the kill, ins


def kill_in_checkpoint(draw: random.Random) -> None:
    """Kills the process while it writes a unit, or before or after any sync, rename or deletion.

    An undisturbed run makes more of each than are counted down.
    """
    import shutil

    from engine import safe_files
    from engine.training.checkpoints import chunk_files

    where = draw.choice(["meter", "fsync", "rename", "renamed", "rmtree"])
    countdown = [draw.randint(1, {"meter": 60, "fsync": 25}.get(where, 4))]

    def due() -> None:
        countdown[0] -= 1
        if countdown[0] == 0:
            die()

    if where == "meter":
        real_add = chunk_files.Meter.add

        def add(self, count):
            due()
            real_add(self, count)

        chunk_files.Meter.add = add
    elif where == "fsync":
        os.fsync = before(os.fsync, due)
    elif where in ("rename", "renamed"):
        around = before if where == "rename" else after
        safe_files.rename = around(safe_files.rename, due)
    else:
        shutil.rmtree = before(shutil.rmtree, due)


def kill_in_update(draw: random.Random) -> None:
    """Kills the process when half of a unit's planes are updated."""
    from engine.runtime.host.host_adamw import HostAdamW

    real_update, countdown = HostAdamW.update, [draw.randint(1, 5 * STEPS)]

    def update(self, *arguments):
        countdown[0] -= 1
        if countdown[0] == 0:
            whole = self._kernel

            def half(*given):
                *chunks, planes, scalars = given
                whole(*chunks, tuple(plane[: plane.size // 2] for plane in planes), scalars)
                die()

            self._kernel = half
        real_update(self, *arguments)

    HostAdamW.update = update


def kill_in_record(draw: random.Random) -> None:
    """Kills the process when part of a line is written."""
    from engine.runs.record.recorder import RunRecorder

    countdown = [draw.randint(1, 40)]

    def write(self, line):
        countdown[0] -= 1
        if countdown[0] == 0:
            os.write(self._descriptor, line[: draw.randrange(1, len(line))])
            die()
        real_write(self, line)

    real_write, RunRecorder._write = RunRecorder._write, write


HOOKS = {"checkpoint": kill_in_checkpoint, "update": kill_in_update, "record": kill_in_record}


# ---------------------------------------------------------------------- lives


def live(config, runs: Path, moment: str | None, draw: random.Random, longest: float) -> bool:
    """Starts the run in a process, or resumes it if there is one; returns whether the process was
    killed. Fails if it ends unkilled with a state other than `finished`.
    """
    from engine.training.loop.run import resume_run, start_run

    if threading.active_count() != 1 or len(os.listdir("/proc/self/task")) != 1:
        raise AssertionError("a process with threads cannot be forked")
    child = os.fork()
    if child == 0:
        try:
            there = sorted(path.name for path in runs.iterdir()) if runs.exists() else []
            run = resume_run(runs, there[0]) if there else start_run(config, runs)
            if (
                moment in HOOKS
            ):  # only once the run's settings exist, without which it cannot be resumed
                HOOKS[moment](draw)
            ended = run.execute()
            if ended.state != "finished":
                print(ended.reason, file=sys.stderr, flush=True)
            os._exit(0 if ended.state == "finished" else 3)
        except BaseException as error:
            print(f"{moment}: {error!r}", file=sys.stderr, flush=True)
            os._exit(4)
    if moment == "any time":
        # Some of these moments come before the run has a folder, or after its end.
        time.sleep(draw.uniform(0.0, longest))
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or os.waitstatus_to_exitcode(status) == 0, (
        f"a life with {moment} ended with {status}"
    )
    return killed


def check_equal(runs: Path, whole: Path) -> None:
    """Checks that the planes equal those of the undisturbed run bit for bit, and that the record is
    complete and has its losses.
    """
    from engine.runs.record.following import replay
    from engine.runs.record.snapshot import RunSnapshot
    from engine.runs.summaries.listing import list_runs

    run, reference = list_runs(runs)[0], list_runs(whole)[0]
    assert run.state == "finished" and run.step == STEPS
    folder, other = (Path(r.path) / "checkpoints" / f"step-{STEPS}" for r in (run, reference))
    names = {path.name for path in folder.iterdir()}
    assert names == {path.name for path in other.iterdir()}
    for name in names - {"manifest.json"}:
        assert (folder / name).read_bytes() == (other / name).read_bytes(), f"{name} differs"
    assert not list(folder.parent.glob(".*")), "leftovers of a killed write are cleared up"
    ours, theirs = RunSnapshot(), RunSnapshot()
    for snapshot, path in ((ours, run.path), (theirs, reference.path)):
        for seq, record in enumerate(replay(Path(path) / "events.jsonl"), start=1):
            assert record.seq == seq
            snapshot.apply(record)
    assert ours.steps.step == theirs.steps.step and ours.steps.loss == theirs.steps.loss
    assert ours.steps.grad_norm == theirs.steps.grad_norm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    get_ready("tests.engine.training.loop.test_kill")

    from engine.runs.summaries.listing import list_runs
    from tests.support.folders import make_config

    draw = random.Random(arguments.seed)
    kills, equal, moments = 0, 0, Counter()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        config = make_config(
            root,
            **{
                "train.steps": STEPS,
                "output.checkpoint_every": CHECKPOINT_EVERY,
                "output.eval_every": 7,
                "model.dtype": "bfloat16",
            },
        )
        know_model(config)
        began = time.monotonic()
        live(config, root / "whole", None, draw, 0.0)
        longest = time.monotonic() - began
        trial = 0
        while kills < arguments.kills or len(moments) < len(MOMENTS):
            trial += 1
            runs = root / f"trial-{trial}"
            here = []
            for k in range(draw.choice([1, 1, 2, 3])):
                moment = MOMENTS[(trial + k) % len(MOMENTS)]
                if live(config, runs, moment, draw, longest):
                    here.append(moment)
                if runs.exists() and any(run.state == "finished" for run in list_runs(runs)):
                    break
            else:
                live(config, runs, None, draw, 0.0)
            check_equal(runs, root / "whole")
            kills += len(here)
            equal += len(here)
            moments.update(here)
            print(
                f"trial {trial}: killed at {', '.join(here) or 'nothing'}; planes equal", flush=True
            )
        seconds = time.monotonic() - began
    found = ", ".join(f"{count} at {moment}" for moment, count in sorted(moments.items()))
    print(
        f"{equal} of {kills} kills, {trial} runs: planes bit-identical to the undisturbed run's "
        f"({found}); {seconds:.0f} s, one life {longest:.1f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
