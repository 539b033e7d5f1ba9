"""Runs that learn from pairs take the steps of TRL's trainers, in float32: the same losses, norms
and figures.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.events import StepFinished
from engine.train.references import FILE
from engine.train.run import start_run
from tests.support.made_pairs import made_answers, marked_config, pair_config, write_rows
from tests.support.trained_runs import events_of, execute

pytest.importorskip("trl")
as_trl = pytest.importorskip("tests.support.as_trl")
pytestmark = pytest.mark.computing

STEPS = {
    "train.steps": 10,
    "train.batch_size": 6,
    "train.learning_rate": 1e-3,
    "train.schedule": "constant",
    "train.warmup_steps": 0,
    "train.eps": 1e-5,
    "train.max_grad_norm": 1.0,
    "output.eval_every": 0,
}
FORMS = {
    "sigmoid": {},
    "a small beta": {"preference.beta": 0.02},
    "ipo": {"preference.loss": "ipo"},
    "robust": {"preference.loss": "robust", "preference.label_smoothing": 0.2},
    "with the sft term": {"preference.sft_weight": 0.7},
}
NOT_RECORDED = {
    "logits/chosen",
    "logits/rejected",
    "entropy",
    "mean_token_accuracy",
    "num_tokens",
}
"""TRL has these figures too."""


def steps_of_run(tmp_path, config) -> list[StepFinished]:
    run = start_run(config, tmp_path / "runs")
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    return events_of(run, StepFinished)


def compare(ours: list[StepFinished], theirs) -> None:
    assert len(ours) == len(theirs) == 10
    for mine, other in zip(ours, theirs):
        assert mine.loss == pytest.approx(other.loss, rel=2e-5, abs=1e-6), mine.step
        assert mine.grad_norm == pytest.approx(other.grad_norm, rel=1e-4), mine.step
        assert mine.preference.keys() == other.figures.keys() - NOT_RECORDED, mine.step
        for name, value in mine.preference.items():
            expected = other.figures[name]
            assert value == pytest.approx(expected, rel=1e-4, abs=2e-5), (mine.step, name)


@pytest.mark.parametrize("micro_batch", [6, 2])
@pytest.mark.parametrize("form", FORMS)
def test_dpo(tmp_path, form, micro_batch):
    values = STEPS | FORMS[form] | {"train.micro_batch_size": micro_batch}
    config = pair_config(tmp_path, **values)
    theirs, references = as_trl.dpo_of_trl(config, tmp_path / "trl")
    ours = steps_of_run(tmp_path, config)
    assert len(ours[0].preference) == 6
    compare(ours, theirs)
    assert abs(ours[0].preference["rewards/margins"]) < 1e-5  # nothing was learned yet
    (folder,) = (tmp_path / "runs").iterdir()
    with np.load(folder / FILE) as kept:
        found = kept["side0"]
    for pair in zip(*references):
        distance = np.abs(found - np.array(pair)).max(axis=1).min()
        assert distance < 2e-5  # the run has these two numbers for one of its pairs


@pytest.mark.parametrize("micro_batch", [6, 2])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_orpo(tmp_path, beta, micro_batch):
    own = {"preference.objective": "orpo", "preference.beta": beta}
    config = pair_config(tmp_path, **STEPS | own | {"train.micro_batch_size": micro_batch})
    ours = steps_of_run(tmp_path, config)
    assert len(ours[0].preference) == 9
    compare(ours, as_trl.orpo_of_trl(config, tmp_path / "trl"))
    (folder,) = (tmp_path / "runs").iterdir()
    assert not (folder / FILE).exists()


KTO = {
    "usual": {},
    "a larger beta": {"preference.beta": 0.5},
    "weights": {"preference.desirable_weight": 1.5, "preference.undesirable_weight": 0.5},
}


@pytest.mark.parametrize("micro_batch", [6, 2])
@pytest.mark.parametrize("form", KTO)
def test_kto(tmp_path, form, micro_batch):
    own = STEPS | KTO[form] | {"train.micro_batch_size": micro_batch}
    config = marked_config(tmp_path, **own)
    ours = steps_of_run(tmp_path, config)
    compare(ours, as_trl.kto_of_trl(config, tmp_path / "trl"))
    assert any(step.preference["kl"] > 0 for step in ours)


@pytest.mark.parametrize("micro_batch", [6, 2])
def test_kto_in_the_order_of_the_data_takes_the_other_answers_that_trl_does(tmp_path, micro_batch):
    """TRL reads the data in order, and gives each prompt the answer before in its batch."""
    longest = " ".join(["one"] * 8)
    rows = [{"prompt": longest, "completion": longest, "label": True}, *made_answers(59)]
    write_rows(tmp_path / "answers.jsonl", rows)
    own = {"data.shuffle": False, "data.eval_fraction": 0.0, "data.max_seq_len": 64}
    config = marked_config(tmp_path, **STEPS | own | {"train.micro_batch_size": micro_batch})
    ours = steps_of_run(tmp_path, config)
    compare(ours, as_trl.kto_of_trl(config, tmp_path / "trl", as_trl.marked_in_order))
    assert any(step.preference["kl"] > 0 for step in ours)
