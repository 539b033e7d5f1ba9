"""`torchrun ... launch.py train PRESET`: on one node and on two, it trains what a run that starts
its own processes trains; what differs between nodes is refused before the first step; and a run
whose processes are killed goes on from its newest checkpoint.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import launch as launch_py
from engine.runs.record.events import LogLine, PlanBuilt, RunEnded, RunStarted, StepFinished
from engine.runs.summaries.listing import list_runs
from engine.runtime.distributed.launched_group import MOST_TOLD
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.launches import SETTINGS, events_in, launch, planes_in, preset_of
from tests.support.made_pairs import pair_config
from tests.support.other_account import needs_root
from tests.support.rank_runs import assert_close
from tests.support.sets import slow_but
from tests.support.strangers import attacked
from tests.support.trained_launches import figures, trained
from tests.support.worker_groups import forked_workers, workers_of  # noqa: F401  a fixture

PROCESSES = "it starts processes and waits for them, for ten seconds or more"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("launched")


@pytest.fixture(scope="module")
def preset(folder) -> str:
    return preset_of(folder / "preset")


@pytest.fixture(scope="module")
def plain(folder, preset) -> Path:
    """Returns the folder of a run that starts its second rank itself."""
    values = SETTINGS | {"engine.gpus": 2}
    run = start_run(make_config(folder / "preset", **values), folder / "plain")
    assert run.execute().state == "finished"
    assert not workers_of(os.getpid())
    return folder / "plain"


@pytest.fixture(scope="module")
def two_nodes(folder, preset) -> Path:
    """Returns the folder of a run."""
    return trained(folder, preset, 2, 1)


def cut_after_checkpoint(run: Path, step: int) -> None:
    """Leave what a process left that was killed once it had written this checkpoint."""
    kept = []
    for line in (run / "events.jsonl").read_text(encoding="utf-8").splitlines(keepends=True):
        kept.append(line)
        values = json.loads(line)
        if (values["kind"], values.get("step")) == ("checkpoint_written", step):
            break
    (run / "events.jsonl").write_text("".join(kept), encoding="utf-8")
    for checkpoint in (run / "checkpoints").iterdir():
        if checkpoint.name != f"step-{step}":
            shutil.rmtree(checkpoint)


DIVIDED = ["--set", "engine.across_nodes=shard"]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("ranks", slow_but([1, 2], [1], PROCESSES))
def test_planes_that_are_divided_among_nodes_have_the_bits_of_one_node(
    folder, preset, plain, ranks
):
    """It evaluates, samples, writes checkpoints and exports weights, of which no node has all. One
    process goes on from a checkpoint, or two nodes that have copies.
    """
    runs = folder / f"divided-{ranks}"
    with launch(2, ranks, [[preset, "--runs-dir", str(runs), *DIVIDED]] * 2) as started:
        codes, out, err = started.ended()
    assert codes == [0, 0] and "Traceback" not in err, (out, err)
    assert "divided among 2 nodes of " in out
    (built,) = events_in(runs, PlanBuilt)
    assert (built.choices["nodes_per_replica"], built.choices["replicas"]) == (2, 1)
    assert built.choices["ranks"] == 2 * ranks
    if ranks == 1:  # one node with two ranks has the same group
        assert figures(runs) == figures(plain)
        for step in (3, 6, 8):
            ours, theirs = planes_in(runs, step), planes_in(plain, step)
            assert ours.keys() == theirs.keys()
            assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    (measured,) = [line for line in log_of(runs) if "Gbit/s" in line]
    assert measured.startswith("Each of the 2 nodes receives ")
    figures_before = figures(runs)
    (run,) = list_runs(runs)
    cut_after_checkpoint(runs / run.id, 6)
    resumed = ["--resume", run.id, "--runs-dir", str(runs)]
    if ranks == 1:
        assert launch_py.main(["train", *resumed, "--set", "engine.gpus=1"]) == 0
    else:
        copied = [*resumed, "--set", "engine.across_nodes=replicate"]
        with launch(2, ranks, [copied] * 2) as started:
            codes, out, err = started.ended()
        assert codes == [0, 0] and "on 2 nodes of 2 ranks each" in out, (out, err)
    assert events_in(runs, RunStarted)[-1].resumed_step == 6
    np.testing.assert_allclose(figures(runs), figures_before, rtol=1e-5)


def log_of(runs: Path) -> list[str]:
    return [event.text for event in events_in(runs, LogLine)]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("shape", slow_but([(2, 1), (1, 2), (2, 2)], [(2, 1)], PROCESSES), ids=str)
def test_it_trains_what_a_run_with_processes_of_its_own_trains(
    folder, preset, plain, two_nodes, shape
):
    runs = two_nodes if shape == (2, 1) else trained(folder, preset, *shape)
    np.testing.assert_allclose(figures(runs), figures(plain), rtol=1e-5)
    for step in (3, 6, 8):
        assert_close(planes_in(runs, step), planes_in(plain, step))
    if shape == (1, 2):  # the same ranks, started by somebody else
        assert figures(runs) == figures(plain)


@pytest.mark.slow(PROCESSES)
def test_its_bits_repeat(folder, preset, two_nodes):
    """Also where all processes are started in the plain way."""
    first, second = two_nodes, trained(folder, preset, 2, 1, 0, subprocess.Popen)
    assert figures(first) == figures(second)
    ours, theirs = (planes_in(runs, 8) for runs in (first, second))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


# --------------------------------------------------------------------- strangers


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@needs_root
@pytest.mark.slow(PROCESSES)
def test_another_account_that_attacks_it_runs_nothing_and_it_goes_on(
    folder, preset, plain, tmp_path
):
    """It reads and writes torchrun's store, says that it is rank 0, and sends pickled objects."""
    runs = folder / "attacked"
    with launch(2, 1, [[preset, "--runs-dir", str(runs)]] * 2) as started:
        with attacked([agent.pid for agent in started.agents], tmp_path):
            started.wait_for_step(runs, 1)
        codes, _, err = started.ended()
    assert not list(tmp_path.iterdir())
    assert codes == [0, 0] and "Traceback" not in err, err
    np.testing.assert_allclose(figures(runs), figures(plain), rtol=1e-5)
    found = [line for line in err.splitlines() if "was sent away" in line]
    # The stranger comes too late where ranks find each other at once.
    assert len(found) <= MOST_TOLD, err


# --------------------------------------------------------------------- what is refused


def test_other_settings_on_another_node_are_refused(folder, preset):
    runs = folder / "refused"
    own = [preset, "--runs-dir", str(runs)]
    with launch(2, 1, [own, [*own, "--set", "train.learning_rate=0.5"]]) as started:
        codes, _, err = started.ended()
    assert 0 not in codes
    found = {line for line in err.splitlines() if line.startswith("ramstream: ")}
    # Which of the two gets rank 0 is up to torchrun.
    assert len(found) == 1, err
    (sentence,) = found
    assert sentence.startswith(f"ramstream: Rank 1 of 2, on {os.uname().nodename}, was started ")
    assert "train.learning_rate at 0." in sentence and "same preset" in sentence
    assert not list_runs(runs)


@pytest.mark.slow(PROCESSES)
@pytest.mark.parametrize(
    "arguments, reported",
    [
        (["--set", "train.batch_size=3"], "train.batch_size: 3 is no multiple of the 2 ranks"),
        (["--set", "train.stepz=3"], "train.stepz"),
        (["--gpus", "4"], "--gpus: 4 are asked for, but torchrun has started 1 processes"),
    ],
)
def test_wrong_settings_are_told_in_one_sentence(folder, preset, arguments, reported):
    runs = folder / f"wrong {arguments[1]}"
    with launch(2, 1, [[preset, "--runs-dir", str(runs), *arguments]] * 2) as started:
        codes, _, err = started.ended()
    assert 0 not in codes
    lines = {line for line in err.splitlines() if line.startswith("ramstream: ")}
    assert len(lines) == 1 and reported in lines.pop(), err
    assert not [run for run in list_runs(runs) if run.step]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("shape", slow_but([(1, 2), (2, 1)], [(1, 2)], PROCESSES), ids=str)
def test_several_processes_learn_from_preferences_what_one_learns(folder, shape):
    nodes, ranks = shape
    preset = folder / "pairs.yaml"
    made = folder / "pairs"
    made.mkdir(exist_ok=True)
    pair_config(made).save(preset)
    alone = start_run(pair_config(made), folder / f"pairs of one, {nodes}")
    assert alone.execute().state == "finished"
    runs = folder / f"pairs {nodes}"
    with launch(nodes, ranks, [[str(preset), "--runs-dir", str(runs)]] * nodes) as started:
        codes, out, err = started.ended()
    assert codes == [0] * nodes and "Traceback" not in err, (out, err)
    np.testing.assert_allclose(figures(runs), figures(alone.folder.path.parent), rtol=1e-4)
    ours, theirs = (
        [step.preference for step in events_in(place, StepFinished)]
        for place in (runs, alone.folder.path.parent)
    )
    assert len(ours) == len(theirs) == 8
    for mine, other in zip(ours, theirs):
        assert mine == pytest.approx(other, rel=1e-3, abs=1e-5)


# --------------------------------------------------------------------- restarts

LONG = {"train.steps": 120, "train.schedule": "constant", "output.eval_every": 0}
LONG |= {"output.checkpoint_every": 10, "output.keep_checkpoints": 2}


@pytest.mark.slow(PROCESSES)
@pytest.mark.parametrize("nodes, ranks, rank, more", [(1, 2, 1, []), (2, 1, 0, DIVIDED)], ids=str)
def test_a_run_whose_process_is_killed_goes_on_by_itself(folder, nodes, ranks, rank, more):
    preset = preset_of(folder / "long", **LONG)
    runs = folder / f"killed-{nodes}-{ranks}-{rank}"
    with launch(nodes, ranks, [[preset, "--runs-dir", str(runs), *more]] * nodes, 1) as started:
        started.wait_for_step(runs, 25)
        os.kill(started.workers()[rank], signal.SIGKILL)
        codes, out, err = started.ended()
    assert codes == [0] * nodes, (out, err)
    resumed = [event.resumed_step for event in events_in(runs, RunStarted)]
    assert resumed[0] is None
    assert resumed[1] >= 20
    assert len(resumed) == 2
    if more:  # what the lost node had is lost with it
        assert resumed[1] % LONG["output.checkpoint_every"] == 0
    steps = [event.step for event in events_in(runs, StepFinished)]
    assert steps[-(120 - resumed[1]) :] == list(range(resumed[1] + 1, 121))
    ends = events_in(runs, RunEnded)
    assert ends[-1].state == "finished"
    if rank:
        assert ends[0].reason.startswith(f"Rank {rank} of {nodes * ranks}")


@pytest.mark.slow(PROCESSES)
def test_without_restarts_it_ends_with_an_error_and_nothing_is_left(folder):
    preset = preset_of(folder / "long", **LONG)
    runs = folder / "no-restarts"
    with launch(2, 1, [[preset, "--runs-dir", str(runs)]] * 2) as started:
        started.wait_for_step(runs, 5)
        os.kill(started.workers()[1], signal.SIGKILL)
        codes, _, err = started.ended()
    assert 0 not in codes and "ramstream: Rank 1 of 2, on " in err
    (ended,) = events_in(runs, RunEnded)
    assert ended.state == "failed" and ended.error_type == "RankError"


@pytest.mark.slow(PROCESSES)
def test_ctrl_c_stops_and_saves_and_a_later_launch_resumes(folder):
    preset = preset_of(folder / "long", **LONG | {"train.steps": 100_000})
    runs = folder / "stopped"
    with launch(2, 1, [[preset, "--runs-dir", str(runs)]] * 2) as started:
        started.wait_for_step(runs, 5)
        for agent in started.agents:
            agent.send_signal(signal.SIGINT)
        started.ended()
    (run,) = list_runs(runs)
    assert run.state == "stopped"
    more = ["--resume", run.id, "--runs-dir", str(runs), "--set", f"train.steps={run.step + 3}"]
    with launch(2, 1, [more] * 2) as started:
        codes, out, err = started.ended()
    assert codes == [0, 0], (out, err)
    assert events_in(runs, RunStarted)[-1].resumed_step == run.step
    assert list_runs(runs)[0].step == run.step + 3
