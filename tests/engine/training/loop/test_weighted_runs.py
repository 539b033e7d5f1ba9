"""Runs on answers with weights: any plan gives the same bits, a stopped run goes on to the bit, and
a bad weight ends the command in one sentence.
"""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import json

import pytest

from engine.runs.record.events import DataPrepared, EvalFinished, StepFinished
from engine.training.loop.run import resume_run, start_run
from tests.support.failing import command
from tests.support.folders import WORDS, make_config
from tests.support.rows import write_rows
from tests.support.trained_runs import events_of, execute, files_of
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = pytest.mark.computing


def rows(weights) -> list[dict]:
    """Returns 40 conversations, whose answers have these weights in turn; None for no weight."""
    found = []
    for k in range(40):
        answer = {"role": "assistant", "content": WORDS[(k + 1) % len(WORDS)]}
        weight = weights[k % len(weights)]
        own = {} if weight is None else {"weight": weight}
        asked = {"role": "user", "content": f"say after {WORDS[k % len(WORDS)]}"}
        found.append({"messages": [asked, answer | own]})
    return found


def config(tmp_path, weights, **values):
    data = write_rows(tmp_path / "weighted.jsonl", rows(weights))
    own = {
        "data.source": str(data),
        "data.max_seq_len": 32,
        "data.eval_fraction": 0.1,
        "model.dtype": "float32",
        "output.export": False,
        "output.checkpoint_every": 2,
        "output.keep_checkpoints": 9,
    }
    return make_config(tmp_path, **own | values)


def train(tmp_path, name: str, weights=(None, 0.5, 3), at_step=None, **values):
    run = start_run(config(tmp_path, weights, **values), tmp_path / name)
    ended = execute(run, at_step)
    assert ended.state == ("stopped" if at_step else "finished"), ended.reason
    return run


def figures_of(run) -> list[tuple]:
    steps = [(step.loss, step.grad_norm) for step in events_of(run, StepFinished)]
    return steps + [(one.loss, one.row_losses) for one in events_of(run, EvalFinished)]


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("packing", [True, False])
def test_any_plan_gives_the_same_bits_and_weights_matter(tmp_path, packing):
    usual = train(tmp_path, "usual", **{"data.packing": packing})
    plans = [
        {"engine.slots": 1, "engine.blocks_kept_in_slots": 0},
        {"engine.activation_checkpointing": "offload"},
    ]
    for place, plan in enumerate(plans):
        other = train(tmp_path, f"plan{place}", **{"data.packing": packing} | plan)
        assert figures_of(other) == figures_of(usual)
        assert files_of(other)[8] == files_of(usual)[8]
    plain = train(tmp_path, "plain", (None,), **{"data.packing": packing})
    for one, other in zip(figures_of(plain)[:8], figures_of(usual)[:8]):
        assert one != other
    (prepared,) = events_of(usual, DataPrepared)
    assert any("multiplied by the weight" in text for text in prepared.summary["warnings"])


def test_a_stopped_run_goes_on_to_the_bit(tmp_path):
    whole = train(tmp_path, "whole")
    stopped = train(tmp_path, "stopped", at_step={4: "stop"})
    resumed = resume_run(tmp_path / "stopped", stopped.id)
    assert execute(resumed).state == "finished"
    assert files_of(resumed)[8] == files_of(whole)[8]


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_two_ranks_train_by_the_same_mean(tmp_path, forked_workers):
    """The sum of weights is that of the whole step, on whatever rank its rows are."""
    one = train(tmp_path, "one", **{"train.micro_batch_size": 1})
    two = train(tmp_path, "two", **{"train.micro_batch_size": 1, "engine.gpus": 2})
    for ours, theirs in zip(events_of(two, StepFinished), events_of(one, StepFinished)):
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4)
    ours, theirs = (events_of(run, EvalFinished)[-1].loss for run in (two, one))
    assert ours == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("weight", [-1, "2", float("nan"), 1e9])
def test_a_bad_weight_ends_the_command_in_one_sentence(tmp_path, capsys, weight):
    tree = config(tmp_path, (None,)).to_dict()
    write_rows(tmp_path / "weighted.jsonl", rows([None] * 30 + [weight] + [None] * 9))
    preset = tmp_path / "bad.yaml"
    preset.write_text(json.dumps(tree), encoding="utf-8")
    code, _, found = command(capsys, "--runs-dir", tmp_path / "runs", "train", preset)
    assert code == 2
    assert "The weight of turn 2 of messages in line 31 of weighted.jsonl is" in found
    assert found.endswith("its losses are multiplied.")
