"""Runs with label smoothing and noise on embeddings: they resume to the bit, and rows get the same
noise whatever micro-batches and ranks they are in.
"""

from __future__ import annotations

import json

import pytest

from engine.runs.record.events import EvalFinished, LogLine, StepFinished
from engine.training.loop.run import resume_run
from tests.support.bad_commands import bad
from tests.support.folders import make_config, make_model
from tests.support.trained_runs import events_of, execute, files_of, resumed_to_the_end, trained
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = pytest.mark.computing

BOTH = {
    "train.label_smoothing": 0.1,
    "train.neftune_alpha": 5.0,
    "data.packing": False,
    "output.checkpoint_every": 2,
    "output.keep_checkpoints": 9,
}


def train(tmp_path, name: str, at_step=None, **values):
    return trained(make_config(tmp_path, **BOTH | values), tmp_path / name, at_step)


def losses(run) -> list[float]:
    return [event.loss for event in events_of(run, StepFinished)]


def log_of(run) -> list[str]:
    return [event.text for event in events_of(run, LogLine)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, dtype):
    values = {"model.dtype": dtype}
    whole = train(tmp_path, "whole", **values)
    stopped = train(tmp_path, "stopped", {3: "stop"}, **values)
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]
    assert losses(again) == losses(whole)


@pytest.mark.parametrize(
    "values",
    [
        {"train.micro_batch_size": 1},
        {"train.micro_batch_size": 4},
        {"train.micro_batch_size": 1, "engine.rounds": 2},
        {"train.micro_batch_size": 1, "engine.gpus": 2},
    ],
    ids=str,
)
def test_rows_have_the_same_noise_in_any_micro_batches_and_on_any_ranks(tmp_path, values):
    """Sums are added in another order, which changes losses by rounding alone."""
    found = losses(train(tmp_path, "other", **values))
    assert found == pytest.approx(losses(train(tmp_path, "two")), rel=2e-5)


def test_each_changes_the_loss_of_steps_and_neither_that_of_an_evaluation(tmp_path):
    plain = {"train.label_smoothing": 0.0, "train.neftune_alpha": 0.0}
    still = {"train.learning_rate": 1e-12, "output.eval_every": 4}
    first, evaluated = [], []
    for name in ("neither", *plain):
        run = train(tmp_path, name, **still | {k: v for k, v in plain.items() if k != name})
        first.append(round(losses(run)[0], 5))
        evaluated.append([round(event.loss, 6) for event in events_of(run, EvalFinished)])
        found = "The loss of steps is smoothed by 0.1 (train.label_smoothing). Validation"
        assert any(found in line for line in log_of(run)) == (name == "train.label_smoothing")
    assert len(set(first)) == 3 and first[1] > first[0]
    assert evaluated[0] == evaluated[1] == evaluated[2] and evaluated[0]


def test_a_resume_with_other_values_says_so(tmp_path):
    run = train(tmp_path, "runs", {3: "stop"})
    again = resume_run(
        tmp_path / "runs", run.folder.id, ["train.neftune_alpha=0", "train.label_smoothing=0.2"]
    )
    assert execute(again).state == "finished"
    found = log_of(again)
    assert "train.neftune_alpha was 5.0 up to step 3 and is 0.0 from here on." in found
    assert "train.label_smoothing was 0.1 up to step 3 and is 0.2 from here on." in found


def test_a_card_tells_of_them(tmp_path):
    run = train(tmp_path, "runs", **{"output.export": True})
    card = (run.folder.export_path / "README.md").read_text(encoding="utf-8")
    assert "label_smoothing" in card and "neftune_alpha" in card


# ------------------------------------------------------------------ balanced experts


@pytest.fixture
def mixture(tmp_path):
    """The folder of tests has a mixture of experts that asks for a loss over its routers."""
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    make_model(tmp_path / "model", "mixtral", **asked)
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_balanced_experts_goes_on_to_the_bit(mixture, dtype):
    values = {"model.dtype": dtype}
    whole = train(mixture, "whole", **values)
    stopped = train(mixture, "stopped", {3: "stop"}, **values)
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_ranks_balance_what_one_rank_balances_and_an_export_asks_for_it_again(mixture):
    one = train(mixture, "one", **{"train.micro_batch_size": 1, "output.export": True})
    two = train(mixture, "two", **{"train.micro_batch_size": 1, "engine.gpus": 2})
    assert losses(two) == pytest.approx(losses(one), rel=2e-5)
    assert any("of micro-batches of 1 row (train.micro_batch_size)" in line for line in log_of(one))
    written = json.loads((one.folder.export_path / "config.json").read_text())
    assert written["output_router_logits"] is True and written["router_aux_loss_coef"] == 0.5
    file = mixture / "model" / "config.json"
    asked = json.loads(file.read_text())
    file.write_text(json.dumps(asked | {"output_router_logits": False}))
    without = train(mixture, "without", **{"train.micro_batch_size": 1})
    assert losses(one)[0] > losses(without)[0] + 0.1


BAD = {
    "train.label_smoothing=1": "train.label_smoothing: 1.0 is outside 0 to 1 (1 excluded)",
    "train.label_smoothing=-0.1": "train.label_smoothing: -0.1 is outside 0 to 1 (1 excluded)",
    "train.label_smoothing=.nan": "train.label_smoothing",
    "train.label_smoothing=some": "train.label_smoothing: 'some' is not a number",
    "train.label_smoothing=null": "train.label_smoothing: null is not a number",
    "train.neftune_alpha=-5": "train.neftune_alpha: -5.0 is below 0; 5 is usual",
    "train.neftune_alpha=.inf": "train.neftune_alpha",
    "train.neftune_alpha=true": "train.neftune_alpha: true is not a number",
    "train.neftune_alpha=[5]": "train.neftune_alpha",
    "train.neftune_noise_alpha=5": "did you mean neftune_alpha",
}


@pytest.mark.parametrize("setting", BAD)
@pytest.mark.parametrize("what", ["train", "check"])
def test_bad_values_are_one_sentence(tmp_path, capsys, what, setting):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path).save(preset)
    arguments = [what, str(preset), "--set", setting]
    assert BAD[setting] in bad(capsys, "--runs-dir", str(tmp_path / "runs"), *arguments)
