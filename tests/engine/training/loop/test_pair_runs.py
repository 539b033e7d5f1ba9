"""Runs that learn from pairs: any plan gives the same bits, a stopped run goes on to the bit, and
answers are compared with the weights before the first step, whoever found them.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.data.batches.loader import prepare_data
from engine.runs.record.events import (
    DataPrepared,
    EvalFinished,
    ExactMatchMeasured,
    JobProgressed,
    LogLine,
    StepFinished,
)
from engine.training.loop.reference_logps import FILE
from engine.training.loop.run import resume_run
from tests.support.failing import command
from tests.support.folders import make_model
from tests.support.made_pairs import made_pairs, marked_config, pair_config
from tests.support.rows import write_rows
from tests.support.trained_runs import events_of, execute, files_of, resumed_to_the_end, trained

pytestmark = pytest.mark.computing
EVERY = {"output.checkpoint_every": 2, "output.keep_checkpoints": 9}


def train(tmp_path, name: str, at_step=None, **values):
    has_marks = values.get("train.objective") == "kto"
    make = marked_config if has_marks else pair_config
    return trained(make(tmp_path, **EVERY | values), tmp_path / name, at_step)


def figures_of(run) -> list[tuple]:
    return [(s.loss, s.grad_norm, s.preference) for s in events_of(run, StepFinished)]


PLANS = {
    "one slot": {"engine.slots": 1, "engine.blocks_kept_in_slots": 0},
    "block inputs on the host": {"engine.activation_checkpointing": "offload"},
    "all activations": {"engine.activation_checkpointing": "none"},
    "recomputed": {"engine.activation_checkpointing": "full", "engine.blocks_kept_in_slots": 2},
}


@pytest.mark.slow("it sweeps over many plans and delays; a plain run has one way to sum gradients")
@pytest.mark.parametrize("objective", ["dpo", "orpo", "kto"])
def test_any_plan_gives_the_same_bits(tmp_path, objective):
    own = {"train.objective": objective}
    usual = train(tmp_path, "usual", **own)
    for name, plan in PLANS.items():
        other = train(tmp_path, name, **own | plan)
        assert figures_of(other) == figures_of(usual), name
        assert files_of(other)[8] == files_of(usual)[8], name


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_micro_batches_change_roundings_alone(tmp_path):
    whole = train(tmp_path, "whole", **{"train.micro_batch_size": 4})
    single = train(tmp_path, "single", **{"train.micro_batch_size": 1})
    for one, other in zip(events_of(whole, StepFinished), events_of(single, StepFinished)):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
        assert one.tokens == other.tokens
        for name, value in one.preference.items():
            assert value == pytest.approx(other.preference[name], rel=1e-3, abs=1e-4), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("objective", "step"), [("dpo", 1), ("dpo", 5), ("kto", 5)])
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, dtype, objective, step):
    own = {"model.dtype": dtype, "train.objective": objective}
    whole = train(tmp_path, "whole", **own)
    stopped = train(tmp_path, "stopped", {step: "stop"}, **own)
    before = (stopped.folder.path / FILE).read_bytes()
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]
    assert figures_of(again)[-3:] == figures_of(whole)[-3:]
    assert (again.folder.path / FILE).read_bytes() == before
    passes = [e for e in events_of(again, JobProgressed) if e.job == "reference" and not e.done]
    assert len(passes) == 1  # that of the first session


def test_a_run_without_its_references_is_not_resumed(tmp_path):
    stopped = train(tmp_path, "stopped", {5: "stop"})
    (stopped.folder.path / FILE).unlink()
    ended = execute(resume_run(tmp_path / "stopped", stopped.folder.id))
    assert ended.state == "failed"
    assert "reference.npz is missing or damaged" in ended.reason


def test_another_objective_does_not_go_on_with_a_run(tmp_path):
    stopped = train(tmp_path, "stopped", {5: "stop"})
    for value in ("orpo", "sft"):
        again = resume_run(tmp_path / "stopped", stopped.folder.id, [f"train.objective={value}"])
        ended = execute(again)
        assert ended.state == "failed"
        assert ended.reason.startswith("train.objective of run ")


def test_references_of_the_data_are_those_of_the_pass(tmp_path):
    found = train(tmp_path, "found", **{"data.eval_fraction": 0.0, "data.shuffle": False})
    with np.load(found.folder.path / FILE) as kept:
        references = kept["side0"]
    rows = made_pairs(40)
    names = ("ref_chosen_logps", "ref_rejected_logps")
    for row, pair in zip(rows, references.tolist()):
        row |= dict(zip(names, pair))
    reported = write_rows(tmp_path / "told.jsonl", rows)
    own = {"data.source": str(reported), "data.eval_fraction": 0.0, "data.shuffle": False}
    read = train(tmp_path, "read", **own)
    assert not (read.folder.path / FILE).exists()
    assert figures_of(read) == figures_of(found)
    (data,) = events_of(read, DataPrepared)
    assert "ref_chosen_logps" in data.summary["warnings"][0]


@pytest.mark.parametrize("off", [0.0, 1.19])
def test_references_of_another_model_are_told(tmp_path, off):
    """TRL takes such columns as they are, so they are kept: the reference may be another model."""
    found = train(tmp_path, "found", **{"data.eval_fraction": 0.0, "data.shuffle": False})
    with np.load(found.folder.path / FILE) as kept:
        references = kept["side0"] - off
    rows = [
        row | {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        for row, (chosen, rejected) in zip(made_pairs(40), references.tolist())
    ]
    reported = write_rows(tmp_path / "told.jsonl", rows)
    own = {"data.source": str(reported), "data.eval_fraction": 0.0, "data.shuffle": False}
    read = train(tmp_path, "read", **own)
    first = figures_of(read)[0][2]
    reward = first["rewards/chosen"]
    assert reward == pytest.approx(0.1 * off, abs=1e-4)
    warned = [line.text for line in events_of(read, LogLine) if "references" in line.text]
    assert len(warned) == (1 if off else 0)
    assert not off or "rewards do not start at 0" in warned[0]


def test_references_of_some_rows_are_computed_for_all_and_told(tmp_path):
    rows = made_pairs(40)
    rows[3] |= {"ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}
    found = write_rows(tmp_path / "told.jsonl", rows)
    own = {"data.source": str(found), "data.eval_fraction": 0.0, "train.steps": 1}
    run = train(tmp_path, "told", **own)
    assert abs(figures_of(run)[0][2]["rewards/chosen"]) < 1e-5
    shown = [line.text for line in events_of(run, LogLine) if "reference" in line.text]
    assert len(shown) == 1 and "Some rows lack ref_chosen_logps" in shown[0]


def test_validation_pairs_are_evaluated(tmp_path):
    run = train(tmp_path, "runs", **{"train.steps": 12, "output.eval_every": 4})
    evals = events_of(run, EvalFinished)
    assert [each.step for each in evals] == [0, 4, 8, 12]
    before, after = evals[0], evals[-1]
    assert before.loss == pytest.approx(np.log(2), abs=1e-6)
    assert before.preference["rewards/margins"] == pytest.approx(0, abs=1e-6)
    assert after.loss < before.loss
    assert after.preference["rewards/margins"] > 0
    assert after.preference["rewards/accuracies"] == 1.0


def test_marked_answers_are_evaluated(tmp_path):
    own = {"train.objective": "kto", "train.steps": 12, "output.exact_match_samples": 4}
    run = train(tmp_path, "runs", **own)
    before, after = events_of(run, EvalFinished)[0], events_of(run, EvalFinished)[-1]
    assert before.loss == pytest.approx(0.5, abs=1e-6)
    assert before.preference["kl"] == pytest.approx(0, abs=1e-5)
    assert after.loss < before.loss
    assert after.preference["rewards/margins"] > 0
    samples = events_of(run, ExactMatchMeasured)[0].samples
    assert all(sample["expected"].startswith("one") for sample in samples)  # no bad answer


def test_parts_of_a_model_learn_from_pairs(tmp_path):
    own = {"train.method": "parts", "train.last_blocks": 1, "output.export": True}
    run = train(tmp_path, "runs", **own)
    assert events_of(run, StepFinished)[-1].preference["rewards/margins"] > 0
    exported = load_file(run.folder.export_path / "model.safetensors")
    source = run.folder.config.model.source
    plain = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = {name: each.detach() for name, each in plain.named_parameters()}
    assert exported.keys() == before.keys()
    changed = {name for name in before if not torch.equal(exported[name], before[name])}
    last = f"model.layers.{plain.config.num_hidden_layers - 1}."
    assert changed == {name for name in before if name.startswith(last)}


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_adapters_learn_from_pairs_resume_to_the_bit_and_are_exported(tmp_path):
    own = {"train.method": "lora", "train.lora_rank": 4, "model.dtype": "float32"}
    own |= {"output.export": True, "output.export_form": "adapter", "output.eval_every": 4}
    whole = train(tmp_path, "whole", **own)
    stopped = train(tmp_path, "stopped", {5: "stop"}, **own)
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]
    assert figures_of(again)[-3:] == figures_of(whole)[-3:]
    written, resumed = (
        (run.folder.export_path / "adapter_model.safetensors").read_bytes()
        for run in (whole, again)
    )
    assert written == resumed
    reported = events_of(whole, EvalFinished)[-1].preference
    assert reported["rewards/margins"] > 0
    source = whole.folder.config.model.source
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = mean_of_chosen(whole.folder.config, base)
    found = mean_of_chosen(
        whole.folder.config, PeftModel.from_pretrained(base, whole.folder.export_path)
    )
    assert found == pytest.approx(reported["logps/chosen"], rel=1e-4)
    assert 0.1 * (found - before) == pytest.approx(reported["rewards/chosen"], rel=1e-3, abs=1e-4)


def mean_of_chosen(config, model) -> float:
    """The mean log-probability that plain transformers give the chosen validation answers."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.source)
    rows = prepare_data(config.read_data, tokenizer, config.train.seed).eval
    sums = []
    for pair in range(len(rows)):
        line = rows.sequences(pair)[0]
        with torch.no_grad():
            logits = model(torch.tensor(line.input_ids[None], dtype=torch.long)).logits[0]
        labels = torch.tensor(line.labels, dtype=torch.long)
        kept = labels >= 0
        each = torch.log_softmax(logits[kept], dim=-1)
        sums.append(each.gather(1, labels[kept, None]).sum().item())
    return float(np.mean(sums))


def test_the_loss_of_routers_is_added_where_the_model_asks_for_it(tmp_path):
    found = []
    for asked in (True, False):
        folder = tmp_path / str(asked)
        changes = {"output_router_logits": asked, "router_aux_loss_coef": 0.3}
        make_model(folder / "model", "qwen3_moe", **changes)
        run = train(folder, "runs", **{"train.steps": 1, "train.micro_batch_size": 4})
        found.append(events_of(run, StepFinished)[0])
    balanced, plain = found
    assert plain.loss == pytest.approx(np.log(2), abs=1e-5)
    assert balanced.loss > plain.loss + 0.1
    assert balanced.preference == plain.preference


WITHOUT = {"prompt": "say after one", "chosen": "two"}
BAD_ROWS = {
    "no column of rejected answers": ([WITHOUT] * 4, "has no pairs of answers"),
    "no rejected answer": (
        [WITHOUT | {"rejected": ""}] * 4,
        "because the pair has no rejected answer",
    ),
    "the same answer twice": (
        [WITHOUT | {"rejected": "two"}] * 4,
        "because both answers of the pair are the same",
    ),
    "no question": (
        [{"chosen": "one", "rejected": "two"}] * 4,
        "has no prompt before its answer",
    ),
    "conversations that begin differently": (
        [
            {
                "chosen": [
                    {"role": "user", "content": "say one"},
                    {"role": "assistant", "content": "two"},
                ],
                "rejected": [
                    {"role": "user", "content": "say four"},
                    {"role": "assistant", "content": "three"},
                ],
            }
        ]
        * 4,
        "begin with different turns",
    ),
    "a reference that is no logarithm": (
        [WITHOUT | {"rejected": "one", "ref_chosen_logps": 0.5, "ref_rejected_logps": -1.0}] * 4,
        "no logarithm of a probability",
    ),
}


ANSWER = {"prompt": "say after one", "completion": "two"}
BAD_MARKS = {
    "no mark": ([ANSWER] * 4, "none that marks answers as good or bad"),
    "an unknown mark": ([ANSWER | {"label": "fine"}] * 4, "write true for a good answer"),
    "a row without a mark": (
        [ANSWER | {"label": True}, ANSWER | {"label": None}],
        "write true for a good answer",
    ),
    "texts": ([{"text": "one two", "label": True}] * 4, "no prompts with answers"),
    "segments": (
        [{"segments": [{"text": "one", "label": True}], "label": True}] * 4,
        "no prompts with answers",
    ),
    "tokens": ([{"input_ids": [1, 2, 3], "label": True}] * 4, "no prompts with answers"),
}


@pytest.mark.parametrize("bad", BAD_MARKS)
def test_answers_without_a_mark_are_told_in_one_sentence(tmp_path, capsys, bad):
    rows, sentence = BAD_MARKS[bad]
    data = write_rows(tmp_path / "bad.jsonl", rows)
    refuse(tmp_path, capsys, sentence, {"objective": "kto"}, **{"data.source": str(data)})


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_without_a_pair_are_told_in_one_sentence(tmp_path, capsys, bad):
    rows, sentence = BAD_ROWS[bad]
    data = write_rows(tmp_path / "bad.jsonl", rows)
    refuse(tmp_path, capsys, sentence, **{"data.source": str(data)})


BAD_SETTINGS = {
    "beta of 0": ({"beta": 0}, "preference.beta"),
    "labels that are smoothed too much": (
        {"loss": "robust", "label_smoothing": 0.5},
        "preference.label_smoothing",
    ),
    "smoothing without robust": ({"label_smoothing": 0.1}, "preference.label_smoothing"),
    "a negative weight": ({"sft_weight": -1}, "preference.sft_weight"),
    "an unknown objective": ({"objective": "ppo"}, "train.objective"),
    "an unknown form": ({"loss": "hinge"}, "preference.loss"),
    "a form of DPO for ORPO": ({"objective": "orpo", "loss": "ipo"}, "preference.loss"),
    "weights of KTO for DPO": ({"desirable_weight": 2}, "preference.desirable_weight"),
    "no weight at all": (
        {"objective": "kto", "desirable_weight": 0, "undesirable_weight": 0},
        "preference.desirable_weight",
    ),
    "the SFT term of ORPO": ({"objective": "orpo", "sft_weight": 1}, "preference.sft_weight"),
}


@pytest.mark.parametrize("bad", BAD_SETTINGS)
def test_wrong_settings_are_told_in_one_sentence(tmp_path, capsys, bad):
    values, field = BAD_SETTINGS[bad]
    refuse(tmp_path, capsys, f"{field}: ", values)


def test_what_is_for_other_runs_is_refused(tmp_path, capsys):
    several = "engine.gpus: 3 does not divide train.batch_size 4, so GPUs would get unequal"
    refuse(tmp_path, capsys, several, **{"engine.gpus": 3})
    adapters = {"train.method": "lora", "train.lora_dropout": 0.1}
    refuse(tmp_path, capsys, "train.lora_dropout: 0.1 is given, but preferences", **adapters)
    for name in ("train.label_smoothing", "train.neftune_alpha"):
        refuse(tmp_path, capsys, f"{name}: 0.5 is given", **{name: 0.5})
    refuse(tmp_path, capsys, "data.train_on: preferences are", **{"data.train_on": "all"})


def refuse(tmp_path, capsys, sentence: str, preference=(), **values) -> None:
    """`launch.py train` says this in one line and ends with 2."""
    tree = pair_config(tmp_path).to_dict()
    own = dict(preference)
    tree["train"]["objective"] = own.pop("objective", tree["train"]["objective"])
    tree["preference"] |= own
    for name, value in values.items():
        section, _, key = name.partition(".")
        tree[section][key] = value
    preset = tmp_path / "bad.yaml"
    preset.write_text(json.dumps(tree), encoding="utf-8")
    code, _, found = command(capsys, "--runs-dir", tmp_path / "runs", "train", preset)
    assert code == 2
    assert sentence in found
    assert found.endswith(".")
