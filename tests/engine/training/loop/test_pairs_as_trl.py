"""Runs that learn from pairs take the steps of TRL's trainers, in float32: the same losses, norms
and figures.
"""

from __future__ import annotations

import numpy as np
import pytest

from engine.runs.record.events import LogLine, StepFinished
from engine.training.loop.reference_logps import FILE
from engine.training.loop.run import start_run
from tests.support.folders import make_model
from tests.support.made_pairs import made_answers, marked_config, pair_config
from tests.support.references import tokenizer
from tests.support.rows import write_rows
from tests.support.sets import slow_but
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
@pytest.mark.parametrize("preference_config", FORMS)
def test_dpo(tmp_path, preference_config, micro_batch):
    values = STEPS | FORMS[preference_config] | {"train.micro_batch_size": micro_batch}
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
    own = {"train.objective": "orpo", "preference.beta": beta}
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
@pytest.mark.parametrize("preference_config", KTO)
def test_kto(tmp_path, preference_config, micro_batch):
    own = STEPS | KTO[preference_config] | {"train.micro_batch_size": micro_batch}
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


# ---------------------------------------------------------------------- turns, tools and line ends

TIMER = {"type": "function", "function": {"name": "timer", "parameters": {"type": "object"}}}


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def rang(minutes: int, text: str) -> list[dict]:
    """A call, what the tool says, and an answer."""
    function = {"name": "timer", "arguments": {"minutes": minutes}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    return [call, {"role": "tool", "content": f"{minutes}"}, said(text)]


def with_chatml(tmp_path) -> None:
    """A model whose chat template has a line end behind the token that ends an answer."""
    made = tokenizer("qwen")
    make_model(tmp_path / "model", vocab_size=len(made), max_position_embeddings=512)
    made.save_pretrained(tmp_path / "model")


def with_turns() -> list[dict]:
    """Pairs of answers with tools, of several turns, and of one."""
    more = {"role": "user", "content": "More"}
    found = []
    for minutes in (5, 10):
        asked = [{"role": "user", "content": f"In {minutes} minutes, please."}]
        answers = [
            (rang(minutes, "It rings."), rang(600, "It rings.")),
            (rang(minutes, "It rings."), [said("I have no clock.")]),
            ([said("Yes"), more, said("Sure")], [said("No"), more, said("Go away")]),
            ([said("Yes, of course")], [said("No")]),
        ]
        found += [
            {"prompt": asked, "chosen": chosen, "rejected": rejected, "tools": [TIMER]}
            for chosen, rejected in answers
        ]
    return found


def in_one_batch(rows: list[dict]) -> dict:
    """Settings of a run that reads all of these rows in each step, in their order."""
    own = {"data.shuffle": False, "data.eval_fraction": 0.0, "data.max_seq_len": 512}
    return STEPS | own | {"train.batch_size": len(rows), "train.micro_batch_size": 4}


@pytest.mark.parametrize(
    "preference_config",
    slow_but(["sigmoid", "ipo"], ["sigmoid"], "a plain run has one loss of DPO"),
)
def test_dpo_of_turns_and_tools_as_trl_reads_and_trains_them(tmp_path, preference_config):
    """TRL reads the rows itself. Its references, as columns of the data, are those of the run."""
    with_chatml(tmp_path)
    rows = with_turns()
    data = write_rows(tmp_path / "turns.jsonl", rows)
    values = in_one_batch(rows) | {"data.source": str(data), "preference.loss": preference_config}
    config = pair_config(tmp_path, **values)
    tokens = as_trl.tokens_of_dpo(rows, tokenizer("qwen"), tmp_path / "tokens")
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    batch = [tuple(row[name] for name in names) for row in tokens]
    theirs, references = as_trl.dpo_of_trl(config, tmp_path / "trl", lambda *_: batch)
    compare(steps_of_run(tmp_path, config), theirs)

    columns = ("ref_chosen_logps", "ref_rejected_logps")
    found = [row | dict(zip(columns, pair)) for row, pair in zip(rows, zip(*references))]
    data = write_rows(tmp_path / "told.jsonl", found)
    config = pair_config(tmp_path, **values | {"data.source": str(data)})
    run = start_run(config, tmp_path / "told")
    assert execute(run).state == "finished"
    assert not (run.folder.path / FILE).exists()
    steps = events_of(run, StepFinished)
    assert [step.loss for step in steps] == pytest.approx([step.loss for step in theirs], rel=2e-5)
    norms = [step.grad_norm for step in theirs]
    assert [step.grad_norm for step in steps] == pytest.approx(norms, rel=1e-4)
    first = steps[0].preference
    assert max(abs(first[f"rewards/{side}"]) for side in ("chosen", "rejected")) < 1e-5
    assert not [line for line in events_of(run, LogLine) if "reference" in line.text]


def test_kto_of_turns_and_tools_as_trl_reads_and_trains_them(tmp_path):
    with_chatml(tmp_path)
    rows = [
        {
            "prompt": row["prompt"],
            "completion": row["chosen" if desirable else "rejected"],
            "label": desirable,
            "tools": row["tools"],
        }
        for place, row in enumerate(with_turns())
        for desirable in [place % 3 > 0]
    ]
    data = write_rows(tmp_path / "turns.jsonl", rows)
    config = marked_config(tmp_path, **in_one_batch(rows) | {"data.source": str(data)})
    tokens = list(as_trl.tokens_of_kto(rows, tokenizer("qwen"), tmp_path / "tokens"))
    own = [row["completion_ids"] for row in tokens]
    names = ("prompt_ids", "completion_ids", "label")
    batch = [
        {name: row[name] for name in names} | {"KL_completion_ids": other}
        for row, other in zip(tokens, [own[-1], *own[:-1]])
    ]
    theirs = as_trl.kto_of_trl(config, tmp_path / "trl", lambda *_: batch)
    compare(steps_of_run(tmp_path, config), theirs)
