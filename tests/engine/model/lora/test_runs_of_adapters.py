"""Runs that train adapters: they resume to the bit, and are exported as PEFT and transformers
read them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import launch
from engine.config.export_choice import ExportChoice
from engine.errors import RunError
from engine.runs.record.events import RunStarted
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.generate import Sampler
from engine.tools.chat.chat_sources import folder_of
from engine.tools.chat.conversation import base_of, checkpoint_of
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from engine.training.weights.open_for_sampling import open_checkpoint
from tests.support.bad_commands import bad
from tests.support.chats import answer_of
from tests.support.failing import command
from tests.support.folders import make_config
from tests.support.start_weights import weights_at_start
from tests.support.trained_runs import events_of, execute, files_of, resumed_to_the_end, trained

pytestmark = pytest.mark.computing

LORA = {
    "train.method": "lora",
    "train.lora_rank": 4,
    "train.learning_rate": 1e-2,
    "output.checkpoint_every": 2,
    "output.keep_checkpoints": 9,
}
IDS = torch.tensor([[5, 17, 3, 41, 8, 22, 9]])


def train(tmp_path, name: str, at_step=None, **values):
    return trained(make_config(tmp_path, **LORA | values), tmp_path / name, at_step)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_a_stopped_run_goes_on_to_the_bit(tmp_path, dtype, dropout):
    values = {"model.dtype": dtype, "train.lora_dropout": dropout}
    whole = train(tmp_path, "whole", **values)
    stopped = train(tmp_path, "stopped", {3: "stop"}, **values)
    again = resumed_to_the_end(stopped)
    assert files_of(again)[8] == files_of(whole)[8]


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("changes", [{}, {"train.lora_save_modules": ["norm"]}])
def test_an_adapter_is_what_peft_reads(tmp_path, changes):
    """Its logits are those of the run, and differ from those of the base model."""
    values = {"model.dtype": "float32", "output.export": True, "output.export_form": "adapter"}
    run = train(tmp_path, "runs", **values | changes)
    source = run.folder.config.model.source
    base = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    before = logits(base)
    peft = PeftModel.from_pretrained(base, run.folder.export_path)
    merged = tmp_path / "merged"
    export_run(tmp_path / "runs", run.folder.id, merged, ExportChoice(form="model"))
    whole = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32)
    torch.testing.assert_close(logits(peft), logits(whole), rtol=1e-4, atol=1e-5)
    assert (logits(peft) - before).abs().max() > 1e-3
    again = tmp_path / "again"
    peft.save_pretrained(again)
    written = load_file(run.folder.export_path / "adapter_model.safetensors")
    read = load_file(again / "adapter_model.safetensors")
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)
    mine, theirs = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (run.folder.export_path, again)
    )
    for settings in (mine, theirs):
        settings["target_modules"] = sorted(settings["target_modules"])
    assert mine == {name: theirs[name] for name in mine}
    card = (run.folder.export_path / "README.md").read_text()
    assert "AutoPeftModelForCausalLM" in card and "library_name: peft" in card
    assert "| `train.lora_rank` | 4 |" in card and "Adapters of " in card


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_merged_model_answers_as_the_run_does(tmp_path, dtype):
    run = train(tmp_path, "runs", **{"model.dtype": dtype, "output.export": True})
    folder = run.folder.export_path
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    source = load_file(Path(run.folder.config.model.source) / "model.safetensors")
    exported = load_file(folder / "model.safetensors")
    assert exported.keys() == source.keys()
    for name, weight in exported.items():
        is_adapted = ".layers." in name and "proj.weight" in name
        assert torch.equal(weight, source[name].to(weight.dtype)) != is_adapted, name
    if dtype == "bfloat16":
        return  # the sum is rounded once more, which may turn an answer
    with open_checkpoint(tmp_path / "runs", run.folder.id) as opened:
        limits = AnswerLimits(12, set())
        (found,) = Sampler(opened.engine()).generate(IDS.tolist(), limits)
    reported = whole.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=None)
    assert found == reported[0, IDS.shape[1] :].tolist()


def test_adapters_begin_as_the_seed_says_and_the_base_stays(tmp_path):
    run = train(tmp_path, "runs")
    again = start_run(make_config(tmp_path, **LORA), tmp_path / "again")
    first = weights_at_start(again)
    adapters = {name: weight for name, weight in first.items() if ".lora_" in name}
    assert adapters
    for name, weight in adapters.items():
        is_zero = name.endswith("lora_B.weight")
        assert bool((weight == 0).all()) == is_zero
        if not is_zero:
            bound = 1 / weight.shape[1] ** 0.5
            assert 0.8 * bound < weight.abs().max() <= bound
    with open_checkpoint(tmp_path / "runs", run.folder.id) as opened:
        for unit in opened.model.units:
            for spec in unit.layout.parameters:
                found = opened.host_states.parameters.master(unit.name, spec.name)
                assert torch.equal(found, first[spec.full_name]) == spec.frozen, spec.full_name


def test_random_weights_are_the_same_with_adapters_beside_them(tmp_path):
    found = []
    for method in ("full", "lora"):
        values = {"model.init": "random", "train.method": method, "train.steps": 1}
        config = make_config(tmp_path, **LORA | values)
        found.append(weights_at_start(start_run(config, tmp_path / method)))
    assert any(".lora_A." in name for name in found[1])
    assert all(torch.equal(found[1][name], weight) for name, weight in found[0].items())


def test_adapters_beside_random_weights_are_not_exported_alone(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **LORA | {"model.init": "random"}).save(preset)
    arguments = ["check", str(preset), "--set", "output.export_form=adapter"]
    code, _, sentence = command(capsys, *arguments)
    assert code == 2 and "fit no model that anybody has; set it to model" in sentence


def test_a_run_starts_from_an_adapter(tmp_path):
    values = {"model.dtype": "float32", "output.export": True, "output.export_form": "adapter"}
    run = train(tmp_path, "first", **values)
    folder = run.folder.export_path
    written = load_file(folder / "adapter_model.safetensors")
    start = {"model.start_from": str(folder), "model.dtype": "float32", "train.steps": 1}
    found = weights_at_start(start_run(make_config(tmp_path, **LORA | start), tmp_path / "second"))
    for key, weight in written.items():
        assert torch.equal(found[key.removeprefix("base_model.model.")], weight)


@pytest.mark.parametrize("first", ["full", "lora"])
def test_a_run_starts_from_the_weights_of_another(tmp_path, first):
    run = train(tmp_path, "first", **{"train.method": first, "model.dtype": "float32"})
    start = {"model.start_from": str(run.folder.path), "model.dtype": "float32"}
    then = start_run(make_config(tmp_path, **LORA | start | {"train.steps": 1}), tmp_path / "then")
    found = weights_at_start(then)
    with open_checkpoint(tmp_path / "first", run.folder.id) as opened:
        for unit in opened.model.units:
            for spec in unit.layout.parameters:
                assert torch.equal(
                    found[spec.full_name],
                    opened.host_states.parameters.master(unit.name, spec.name),
                )
    assert any(name.endswith("lora_A.weight") for name in found)


def alone(run, folder) -> None:
    """Exports the adapters of a run alone."""
    export_run(run.folder.path.parent, run.folder.id, folder, ExportChoice(form="adapter"))


@pytest.mark.parametrize("case", ["full", "other modules", "random"])
def test_adapters_on_another_base_are_not_exported_alone(tmp_path, case):
    first = {"full": {"train.method": "full"}, "random": {"model.init": "random"}}
    run = train(tmp_path, "first", **first.get(case, {"train.lora_save_modules": ["norm"]}))
    start = {"model.start_from": str(run.folder.path), "train.steps": 1}
    then = start_run(
        make_config(tmp_path, **LORA | start | {"output.export_form": "adapter"}), tmp_path / "then"
    )
    ended = execute(then)
    assert ended.state == "failed" and not then.folder.checkpoints_path.exists()
    assert "output.export_form: adapters beside the weights that model.start_from" in ended.reason
    whole = train(tmp_path, "whole", **start)
    with pytest.raises(RunError, match="stand beside other weights than those of"):
        alone(whole, tmp_path / "out")


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_an_adapter_beside_random_weights_is_not_exported_alone(tmp_path, exported):
    start = {"model.start_from": str(exported), "model.init": "random", "train.steps": 1}
    run = train(tmp_path, "runs", **start)
    with pytest.raises(RunError, match="stand beside other weights than those of"):
        alone(run, tmp_path / "out")


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_adapters_of_an_earlier_run_on_the_same_base_are_exported_alone(tmp_path, exported):
    first = train(tmp_path, "first", **{"model.start_from": str(exported), "train.steps": 1})
    start = {"model.start_from": str(first.folder.path), "model.init": "random", "train.steps": 1}
    values = {"output.export": True, "output.export_form": "adapter"}
    run = train(tmp_path, "then", **start | values)
    assert (run.folder.export_path / "adapter_model.safetensors").is_file()
    plain = train(tmp_path, "plain", **start)
    shutil.rmtree(first.folder.path)
    alone(run, tmp_path / "out")  # what its adapters stand beside was known as it began
    with pytest.raises(RunError, match="stand beside other weights than those of"):
        alone(plain, tmp_path / "other")


@pytest.mark.parametrize("place", ["checkpoints", "best"])
def test_adapters_of_an_earlier_run_keep_what_they_mean(tmp_path, place):
    values = {"output.keep_best": "loss", "output.eval_every": 2} if place == "best" else {}
    run = train(tmp_path, "first", **values)
    for name, value, words in (
        ("lora_alpha", 5.0, "lora_alpha 32.0, and here it is 5.0; set train.lora_alpha to 32.0"),
        ("lora_rslora", True, "lora_rslora false, and here it is true"),
        ("lora_rank", 8, "lora_rank 4, and here it is 8"),
    ):
        start = {"model.start_from": str(run.folder.path / place), f"train.{name}": value}
        ended = execute(start_run(make_config(tmp_path, **LORA | start), tmp_path / "then"))
        assert ended.state == "failed" and words in ended.reason


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_a_whole_run_does_not_start_from_adapters(tmp_path):
    run = train(tmp_path, "first")
    start = {"model.start_from": str(run.folder.path), "train.steps": 1}
    ended = execute(start_run(make_config(tmp_path, **start), tmp_path / "then"))
    assert ended.state == "failed"
    assert "is of a run that trained adapters; export that run as a whole model" in ended.reason


def test_a_resume_trains_the_same_adapters(tmp_path):
    run = train(tmp_path, "runs", {3: "stop"})
    for values, words in (
        (["train.lora_rank=8"], "lora_rank 8"),
        (["train.method=full"], "is to train the whole model now"),
    ):
        ended = execute(resume_run(tmp_path / "runs", run.folder.id, values))
        assert ended.state == "failed" and words in ended.reason
        assert "trained adapters with lora_rank 4" in ended.reason


def test_the_record_says_what_is_trained(tmp_path):
    run = train(tmp_path, "runs")
    (started,) = events_of(run, RunStarted)
    assert 0 < started.trained_parameters < started.parameters / 2
    with pytest.raises(RunError, match="has trained no adapters"):
        whole = start_run(make_config(tmp_path, **{"train.steps": 1}), tmp_path / "whole")
        execute(whole)
        choice = ExportChoice(form="adapter")
        export_run(tmp_path / "whole", whole.folder.id, tmp_path / "out", choice)


BAD = {
    "train.lora_rank=0": "train.lora_rank: 0 is too small; the least is 1.",
    "train.lora_rank=some": "train.lora_rank: 'some' is not a whole number",
    "train.lora_alpha=0": "train.lora_alpha: 0.0 is not a positive number",
    "train.lora_dropout=1": "train.lora_dropout: 1.0 is outside 0 to 1",
    "train.lora_targets=[]": "train.lora_targets: no layers are named; give all-linear",
    "train.lora_targets=[' ']": "train.lora_targets: a name is empty",
    "train.lora_targets=[all-linear, q_proj]": "all-linear stands for all layers; give it alone",
    "train.lora_targets=[query]": "query fits no linear layer in the blocks of this model; its "
    "layers have names such as q_proj",
    "train.lora_targets=[lm_head]": "lm_head is outside of the blocks, where no adapters are",
    "train.lora_targets=[self_attn]": "and adapters are for linear layers alone",
    "train.lora_targets=['*.nothing']": "*.nothing fits no linear layer",
    "train.lora_save_modules=[nothing]": "train.lora_save_modules: nothing is no module of this",
    "train.lora_save_modules=[layers]": "every layer that is named is in a module of",
    "train.method=adapters": "train.method: 'adapters' is not",
    "output.export_form=both": "output.export_form: 'both' is not",
}


@pytest.mark.parametrize("setting", BAD)
@pytest.mark.parametrize("what", ["train", "check"])
def test_bad_settings_are_one_sentence(tmp_path, capsys, what, setting):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **LORA | {"train.batch_size": 4}).save(preset)
    arguments = [what, str(preset), "--set", setting]
    assert BAD[setting] in bad(capsys, "--runs-dir", str(tmp_path / "runs"), *arguments)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Path:
    tmp_path = tmp_path_factory.mktemp("exported")
    run = train(tmp_path, "runs", **{"output.export": True, "output.export_form": "adapter"})
    return run.folder.export_path


def changed(settings: dict, **values) -> str:
    return json.dumps(settings | values)


OTHER = {
    "another rank": (dict(r=8), {}, "r of the adapter in"),
    "another alpha": (dict(lora_alpha=5), {}, "set train.lora_alpha to 5"),
    "another scaling": (dict(use_rslora=True), {}, "set train.lora_rslora to true"),
    "another kind": (dict(peft_type="IA3"), {}, "is of the kind IA3"),
    "DoRA": (dict(use_dora=True), {}, "has DoRA, which cannot be trained here"),
    "biases": (dict(bias="all"), {}, "has biases that are trained"),
    "no adapters": ({}, {"train.method": "full"}, "holds an adapter; set train.method to lora"),
    "other layers": ({}, {"train.lora_targets": ["q_proj"]}, "which is not trained here"),
    "more modules": (
        {},
        {"train.lora_save_modules": ["norm"]},
        "lacks base_model.model.model.norm",
    ),
}


@pytest.mark.parametrize("case", OTHER)
def test_another_adapter_is_refused(tmp_path, capsys, exported, case):
    settings, values, words = OTHER[case]
    folder = tmp_path / "adapter"
    folder.mkdir()
    content = json.loads((exported / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(changed(content, **settings))
    weights = (exported / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(weights)
    preset = tmp_path / "preset.yaml"
    start = {"model.start_from": str(folder), "train.batch_size": 4}
    make_config(tmp_path, **LORA | start | values).save(preset)
    arguments = ["--runs-dir", str(tmp_path / "runs"), "train", str(preset)]
    code, out, sentence = command(capsys, *arguments)
    assert code == 2 and words in sentence
    assert len(sentence.strip().splitlines()) == 1 and "Traceback" not in out + sentence


def test_an_adapter_without_weights_is_refused(tmp_path, capsys, exported):
    folder = tmp_path / "adapter"
    folder.mkdir()
    content = (exported / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(content)
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **LORA | {"model.start_from": str(folder)}).save(preset)
    arguments = ["--runs-dir", str(tmp_path / "runs"), "train", str(preset)]
    code, _, sentence = command(capsys, *arguments)
    assert code == 2 and "there is no adapter_model.safetensors in" in sentence


def test_a_check_says_how_many_parameters_are_trained(tmp_path, capsys):
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **LORA).save(preset)
    assert launch.main(["check", str(preset)]) == 0
    assert "of them trained" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_chat_answers_with_the_adapters_and_without(tmp_path):
    run = train(tmp_path, "runs", **{"model.dtype": "float32"})
    config = run.folder.config
    home = tmp_path / "home"
    export_run(tmp_path / "runs", run.folder.id, home)
    sources = (
        base_of(config),
        folder_of(config.model.source),
        checkpoint_of(tmp_path / "runs", run.folder.id, config, None, "newest"),
        folder_of(str(home)),
    )
    before, plain, after, merged = map(answer_of, sources)
    assert before == plain and after.strip() == merged.strip()
