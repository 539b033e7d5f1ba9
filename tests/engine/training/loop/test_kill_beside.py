"""A run that is killed while steps go on beside its checkpoint leaves checkpoints of one step each.

`python -m tests.engine.training.loop.test_kill_beside` kills a run at fourteen moments of the
writing, and with `--every 2` at each second one of them. Every session of a run is a process of its
own, forked from one without threads. Its writer is slow, so that several steps are applied while
one checkpoint is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.killed import get_ready, know_model, run_alone
from tests.support.killed_beside import (
    files_of,
    finish,
    forked,
    kill_at,
    watch_calls,
    write_in_chunks,
)

STEPS = 20
MOMENTS = (
    *(("write", part / 7) for part in range(7)),
    *(("fsync", part / 3) for part in range(3)),
    *((kind, part) for kind in ("rename", "renamed") for part in (0.2, 0.8)),
)
"""The process is killed in a call of this kind; the number is the part of such calls that an
undisturbed run has made by then.
"""
ROOMS = (1 << 30, 100_000)
"""There is RAM for copies of all planes that an update is to change, or of some; then updates
wait.
"""
RESUMED = 5
"""One of this many killed runs is resumed."""


@pytest.mark.slow("it kills a run many times, for some twenty seconds")
@pytest.mark.parametrize("every", [1, 2])
def test_a_checkpoint_is_one_step_s_state_whenever_the_process_dies(every):
    shown = run_alone("tests.engine.training.loop.test_kill_beside", "--every", f"{every}")
    kills = len(MOMENTS[::every])
    assert re.search(rf"^{kills} of {kills} kills", shown, re.MULTILINE), shown


# ---------------------------------------------------------------------- in the child


# ---------------------------------------------------------------------- processes


def still(config, runs: Path) -> None:
    """Trains a run that stands still for each checkpoint, and keeps them all."""
    from engine.planning.fit import checkpoint_sizes
    from engine.training.loop.run import start_run

    write_in_chunks(ROOMS[0], seconds=0.0)
    checkpoint_sizes.SMALL_BYTES = 1 << 40
    finish(start_run(config.with_values({"output.keep_checkpoints": STEPS}), runs))


def undisturbed(config, runs: Path) -> None:
    """Trains a run beside its checkpoints, and writes down how many calls wrote them."""
    from engine.runs.record.events import CheckpointWritten
    from engine.training.loop.run import start_run
    from tests.support.trained_runs import events_of

    counts: Counter[str] = Counter()
    write_in_chunks(ROOMS[0])
    watch_calls(lambda kind: counts.update([kind]))
    run = start_run(config, runs)
    finish(run)
    steps = [event.step for event in events_of(run, CheckpointWritten)]
    # Every step asks for a checkpoint, and none is begun while one is written. How many steps go on
    # meanwhile depends on what else the machine does.
    assert len(steps) >= 3
    assert any(later > step + 1 for step, later in pairwise(steps)), (
        f"steps do not go on beside a checkpoint: {steps}"
    )
    (runs / "counts.json").write_text(json.dumps(counts))


def killed(config, runs: Path, room: int, act: Callable[[str], None]) -> None:
    from engine.training.loop.run import start_run

    run = start_run(config, runs)
    write_in_chunks(room)
    watch_calls(act)
    finish(run)


def check(runs: Path, steps: dict[int, dict[str, bytes]], resumes: bool) -> None:
    """Checks that each checkpoint of a killed run has the planes of its step to the bit, that the
    newest one can be loaded, and that a resume ends with the bits of an undisturbed run.
    """
    from engine.config.settings import ModelConfig
    from engine.model.build.build import build_model
    from engine.model.build.pretrained_files import load_config
    from engine.runtime.host.host_states import HostStates
    from engine.training.checkpoints.restore import load_checkpoint, newest_checkpoint
    from engine.training.loop.run import resume_run

    (run_id,) = [path.name for path in runs.iterdir()]
    checkpoints = runs / run_id / "checkpoints"
    found = files_of(checkpoints)
    for step, files in found.items():
        assert files == steps[step], f"the checkpoint of step {step} has other bits"
    newest = newest_checkpoint(checkpoints)
    assert (newest.step if newest else None) == max(found, default=None)
    run = resume_run(runs, run_id)
    if newest is not None:
        assert not newest.skipped, newest.skipped
        model_settings: ModelConfig = run.folder.config.model
        model = build_model(load_config(model_settings.source), model_settings)
        states = HostStates(model.layouts, model.dtype)
        states.allocate_weights()
        states.allocate_states()
        # All checksums are verified here.
        assert load_checkpoint(newest.path, states, model.persistent_buffers()).step == newest.step
        states.close()
    if not resumes:
        run.close()
        return
    write_in_chunks(ROOMS[0], seconds=0.0)
    finish(run)
    assert files_of(checkpoints)[STEPS] == steps[STEPS], "a resume ends with other bits"
    assert not list(checkpoints.glob(".*")), "leftovers of a killed write are cleared up"


def steps_beside(runs: Path) -> int:
    """Returns how many steps a killed run had applied after that of its newest checkpoint."""
    from engine.runs.summaries.listing import list_runs

    (run,) = list_runs(runs)
    return run.step - max(files_of(Path(run.path) / "checkpoints"), default=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1)
    moments = MOMENTS[:: parser.parse_args().every]
    get_ready("tests.engine.training.loop.test_kill_beside")

    from tests.support.folders import make_config

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place)
        values = {
            "train.steps": STEPS,
            "output.checkpoint_every": 1,
            "output.keep_checkpoints": 2,
            "output.eval_every": 0,
            "model.dtype": "bfloat16",
        }
        config = make_config(root, **values)
        know_model(config)
        forked(partial(still, config, root / "still"))
        (folder,) = (root / "still").iterdir()
        steps = files_of(folder / "checkpoints")
        assert sorted(steps) == list(range(1, STEPS + 1))
        forked(partial(undisturbed, config, root / "undisturbed"))
        counts = json.loads((root / "undisturbed" / "counts.json").read_text())
        kills, beside = 0, []
        for place_of, (kind, part) in enumerate(moments):
            runs = root / f"killed-{place_of}"
            # How many checkpoints are written depends on the time of a step.
            act = kill_at(kind, 1 + round(0.7 * part * counts[kind]))
            kills += forked(partial(killed, config, runs, ROOMS[place_of % len(ROOMS)], act))
            beside.append(steps_beside(runs))
            forked(partial(check, runs, steps, place_of % RESUMED == 0))
    print(
        f"{kills} of {len(moments)} kills: every checkpoint is one step's, to the bit; steps "
        f"applied after the newest one: {beside}; {time.monotonic() - began:.0f} s"
    )
    # Where no further step was applied, nothing could have been mixed.
    return 0 if sum(count > 1 for count in beside) >= len(moments) // 2 else 1


if __name__ == "__main__":
    sys.exit(main())
