"""Whole runs that add tokens: what they record, save, resume and export."""

# ruff: noqa: F811  fixtures are imported by name

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.data.batches.preview import preview
from engine.errors import ConfigError
from engine.machine.read_machine import Machine
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.report import estimate
from engine.runs.record.events import LogLine
from engine.runtime.host.host_states import HostStates
from engine.text import GIB
from engine.tools.chat.prompt_builder import PromptBuilder
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.loop.run import resume_run, start_run
from tests.support.failing import command
from tests.support.folders import make_config, make_model, make_tokenizer
from tests.support.multimodal import make_multimodal
from tests.support.sets import slow_but
from tests.support.start_weights import weights_at_start
from tests.support.trained_runs import events_of, execute, files_of, resumed_to_the_end, trained
from tests.support.worker_groups import forked_workers  # noqa: F401  a fixture

pytestmark = pytest.mark.computing

KNOWN = len(make_tokenizer())
TOKENS = ["<call>", "</call>"]


def with_tokens(tmp_path, tokens=TOKENS, **values):
    """Returns the settings of a run whose answers have the tokens in them. All rows of its model
    are of the tokenizer.
    """
    if not (tmp_path / "model").exists():
        make_model(tmp_path / "model", vocab_size=KNOWN)
        rows = []
        for word in ("one", "two", "three", "four") * 8:
            asked = {"role": "user", "content": f"say {word}"}
            answer = {"role": "assistant", "content": f"<call>{word}</call>"}
            rows.append(json.dumps({"messages": [asked, answer]}))
        (tmp_path / "data.jsonl").write_text("\n".join(rows) + "\n")
    usual = {"data.add_tokens": list(tokens), "train.steps": 2, "output.checkpoint_every": 1}
    usual |= {"data.eval_fraction": 0.0, "train.batch_size": 2}
    return make_config(tmp_path, **usual | values)


@pytest.mark.parametrize(
    "dtype", slow_but(("float32", "bfloat16"), ("bfloat16",), "a plain run trains one")
)
def test_an_export_loads_without_a_warning_and_has_the_tokens(tmp_path, dtype, caplog):
    config = with_tokens(tmp_path, **{"model.dtype": dtype, "output.export": True})
    run = trained(config, tmp_path / "runs")
    shown = [event.text for event in events_of(run, LogLine)]
    assert any("got <call>, </call>. Embedding and head grow by 2 rows to 19." in s for s in shown)
    folder = run.folder.export_path
    library = logging.getLogger("transformers")  # its messages go to no other logger
    library.addHandler(caplog.handler)
    with caplog.at_level(logging.WARNING):
        model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    library.removeHandler(caplog.handler)
    assert not any(info.values()) and not caplog.records
    assert model.config.vocab_size == KNOWN + 2 == model.get_output_embeddings().out_features
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("<call>", add_special_tokens=False)["input_ids"] == [KNOWN]
    ids = torch.tensor([tokenizer("say<call>one</call>", add_special_tokens=False)["input_ids"]])
    assert KNOWN in ids
    assert KNOWN + 1 in ids
    assert torch.isfinite(model(ids).logits).all()
    before = load_file(tmp_path / "model" / "model.safetensors")["lm_head.weight"].float().mean(0)
    grown = model.lm_head.weight[KNOWN].float()
    assert (grown - before).norm() > 1e-3, "rows of new tokens are trained"


@pytest.mark.slow("it trains several runs; a plain run trains one")
def test_a_stopped_run_goes_on_to_the_bit_and_with_the_same_tokens(tmp_path):
    whole = trained(with_tokens(tmp_path), tmp_path / "whole")
    stopped = trained(with_tokens(tmp_path), tmp_path / "stopped", {1: "stop"})
    id_, runs = stopped.folder.id, tmp_path / "stopped"
    for found in ("[<call>]", "[]"):
        ended = execute(resume_run(runs, id_, [f"data.add_tokens={found}"]))
        assert ended.state == "failed"
        assert ended.reason.startswith(f"data.add_tokens of run {id_} was ")
    again = resumed_to_the_end(stopped)
    assert files_of(again)[2] == files_of(whole)[2]
    prompts = PromptBuilder.of(again.folder.config)
    assert KNOWN in prompts.prompt([{"role": "user", "content": "<call>"}])


@pytest.mark.slow("it trains several runs; a plain run trains one")
def test_a_new_run_starts_from_one_without_the_tokens_and_from_one_with_them(tmp_path):
    plain = trained(with_tokens(tmp_path, ()), tmp_path / "runs")
    start = {"model.start_from": str(plain.folder.path)}
    first = start_run(with_tokens(tmp_path, **start), tmp_path / "runs")
    began = weights_at_start(first)
    path = newest_checkpoint(plain.folder.checkpoints_path).path
    same = weights_at_start(
        start_run(with_tokens(tmp_path, (), **{"model.start_from": str(path)}), tmp_path / "runs")
    )
    for name, old in same.items():
        assert torch.equal(began[name][: len(old)], old), name
        if len(began[name]) != len(old):
            torch.testing.assert_close(began[name][KNOWN:], old.mean(0).expand(2, -1))
    more = {"model.start_from": str(first.folder.path)}
    second = start_run(with_tokens(tmp_path, [*TOKENS, "<more>"], **more), tmp_path / "runs")
    assert len(weights_at_start(second)["model.embed_tokens.weight"]) == KNOWN + 3
    alone = {"train.method": "lora", "train.lora_rank": 4}
    trained(with_tokens(tmp_path, **more | alone), tmp_path / "runs")  # its rows were trained
    for tokens in ((), ("</call>", "<call>")):
        ended = execute(start_run(with_tokens(tmp_path, tokens, **more), tmp_path / "runs"))
        assert "that their run added; begin data.add_tokens with these" in ended.reason


@pytest.mark.parametrize(
    "dtype", slow_but(("float32", "bfloat16"), ("bfloat16",), "a plain run counts one")
)
def test_the_report_itemises_what_the_host_states_allocate(tmp_path, dtype):
    config = with_tokens(tmp_path, **{"model.dtype": dtype})
    shape = shape_of_run(config)
    assert shape is shape_of_run(config) and shape.vocab_size == KNOWN + 2
    spare = replace(config, data=replace(config.data, add_tokens=()))
    assert shape.parameter_count == shape_of_run(spare).parameter_count + 2 * 2 * 32
    report = estimate(config, Machine("cpu", 8, 64 * GIB, 64 * GIB, 60 * GIB, (), "", 0), shape)
    model = build_model(read_model(config).config, config.model)
    states = HostStates(model.layouts, dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    assert report.model["parameters"] == model.parameter_count
    assert sum(shape.states.plane_bytes().values()) == states.ram.nbytes
    states.close()


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_the_preview_shows_a_token_as_one_and_check_reads_it(tmp_path, capsys):
    config = with_tokens(tmp_path)
    read = read_model(config)
    shown = json.dumps(preview(config.read_data, read.tokenizer, rows=1)["rows"])
    assert "<call>" in shown and "<unk>" not in shown
    without = json.dumps(preview(config.read_data, make_tokenizer(), rows=1)["rows"])
    assert "<unk>" in without, "a tokenizer without the token does not know the word"
    config.save(tmp_path / "preset.yaml")
    code, printed, _ = command(capsys, "check", tmp_path / "preset.yaml")
    assert code == 0 and "Data:" in printed


@pytest.mark.slow("it trains several runs; a plain run trains one")
def test_where_the_vocabulary_cannot_grow_it_is_said(tmp_path, capsys):
    folder = make_multimodal(tmp_path / "seeing", "gemma3")
    config = with_tokens(tmp_path, **{"model.source": str(folder)})
    with pytest.raises(ConfigError, match="also reads images or sound, and its processor"):
        read = read_model(config)
        read.refuse_untrained(build_model(read.config, config.model), config)
    config = with_tokens(tmp_path, **{"train.method": "lora"})
    config.save(tmp_path / "preset.yaml")
    found = command(capsys, "train", tmp_path / "preset.yaml", "--runs-dir", tmp_path / "runs")
    assert found[0] and "add embed_tokens and lm_head to train.lora_save_modules" in found[2]
    lora = {"train.method": "lora", "train.lora_save_modules": ["embed_tokens", "lm_head"]}
    alone = with_tokens(tmp_path, **lora | {"output.export_form": "adapter"})
    ended = execute(start_run(alone, tmp_path / "runs"))
    assert ended.reason.startswith("output.export_form: adapters beside an embedding")
    shutil.rmtree(tmp_path / "runs")
    run = trained(with_tokens(tmp_path, **lora | {"output.export": True}), tmp_path / "runs")
    model = AutoModelForCausalLM.from_pretrained(run.folder.export_path)
    assert model.config.vocab_size == KNOWN + 2


@pytest.mark.slow("it trains with two ranks, each a process")
def test_several_ranks_train_the_same(tmp_path, forked_workers):
    values = {"train.micro_batch_size": 1, "output.export": True}
    alone = trained(with_tokens(tmp_path, **values), tmp_path / "alone")
    both = trained(with_tokens(tmp_path, **values | {"engine.gpus": 2}), tmp_path / "both")
    one, two = (load_file(run.folder.export_path / "model.safetensors") for run in (alone, both))
    assert len(one["model.embed_tokens.weight"]) == KNOWN + 2
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=2e-4, atol=2e-6)
