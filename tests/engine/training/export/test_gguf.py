"""A GGUF file is the exported model: its weights, as transformers reads them, its tokenizer, its
ends and its chat template.
"""

from __future__ import annotations

import json
import re
import shlex

import gguf
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config.export_choice import ExportChoice
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.exports import noted_exports
from engine.training.export.export import export_run
from engine.training.export.export_size import planned_export
from engine.training.export.gguf_family import family_of
from engine.training.export.gguf_forecast import GgufForecast, forecast
from engine.training.export.gguf_known import refusal_of_tokenizer
from engine.training.export.gguf_tokenizer import vocabulary
from engine.training.export.push import push
from engine.training.export.same_tokens import same_tokens
from engine.training.loop.run import start_run
from tests.support.folders import make_config, make_model
from tests.support.gguf_tokenizers import TEMPLATE, known_tokenizer, pieces_tokenizer
from tests.support.tiny import tiny_config

pytestmark = pytest.mark.slow("it trains tiny models and reads files of two libraries")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3, "q8_0": 1e-1}
"""Of logits, by type of the file, in which norms and biases stay in fp32. A weight in another order
changes them altogether.
"""


def finished(tmp_path, family, **changes):
    """A run of a tiny model."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, **changes}
    make_model(tmp_path / "model", family, torch.bfloat16, **wide)
    divided_by = "llama-bpe" if family in ("llama", "mistral") else "qwen2"
    known_tokenizer(divided_by).save_pretrained(tmp_path / "model")
    run = start_run(
        make_config(tmp_path, **{"train.steps": 2, "train.warmup_steps": 1}), tmp_path / "runs"
    )
    summary = run.execute()
    assert summary.state == "finished", summary.reason
    return run.id


def logits_of(model):
    tokens = torch.arange(5, 45).reshape(2, 20)
    with torch.no_grad():
        return model.eval()(tokens).logits


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def read_model(file):
    """A model as transformers reads it from a GGUF file, and with the factors of its frequencies,
    which llama.cpp alone applies.
    """
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    for tensor in gguf.GGUFReader(file).tensors:
        if tensor.name == "rope_freqs.weight":
            model.model.rotary_emb.inv_freq /= torch.tensor(tensor.data)
    return model


FAMILIES = {
    "llama3": ("llama", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    # transformers reads no other sizes of heads and experts, and no other scale of attention
    "qwen3_moe": (
        "qwen3_moe",
        {"head_dim": 128, "norm_topk_prob": True, "moe_intermediate_size": 768},
    ),
    "gemma3": ("gemma3_text", {"head_dim": 256, "num_hidden_layers": 6}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_its_model_is_the_exported_one(tmp_path, name):
    family, changes = FAMILIES[name]
    run = finished(tmp_path, family, **changes)
    runs = tmp_path / "runs"
    export_run(runs, run, tmp_path / "folder", ExportChoice(dtype="float32"))
    expected = logits_of(plain_model(tmp_path / "folder"))
    for dtype in ROUNDING if name == "llama3" else ("float32", "q8_0"):
        target = tmp_path / dtype
        choice = ExportChoice(form="gguf", dtype=dtype)
        export_run(runs, run, target, choice)
        (file,) = target.glob("*.gguf")
        planned = planned_export(open_run(runs, run), target, choice)
        assert planned.file == file.name and planned.bytes < file.stat().st_size
        assert planned.bytes > 0.9 * sum(each.n_bytes for each in gguf.GGUFReader(file).tensors)
        error = (logits_of(read_model(file)) - expected).abs().max() / expected.abs().max()
        assert error < ROUNDING[dtype], (dtype, float(error))
        assert f"FROM ./{file.name}" in (target / "Modelfile").read_text()
    noted = noted_exports(runs, run)
    assert [each.file for each in noted[:2]] != ["", ""] and noted[-1].file == ""


def test_its_tokenizer_is_the_trained_one(tmp_path):
    run = finished(tmp_path, "llama")
    export_run(tmp_path / "runs", run, tmp_path / "out", ExportChoice(form="gguf", dtype="q8_0"))
    (file,) = (tmp_path / "out").glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    fields = gguf.GGUFReader(file).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert all(tokens[number] == token for token, number in tokenizer.get_vocab().items())
    assert fields["tokenizer.ggml.pre"].contents() == "llama-bpe"
    assert fields["tokenizer.chat_template"].contents() == TEMPLATE
    assert fields["tokenizer.ggml.eos_token_id"].contents() == tokenizer.eos_token_id
    with pytest.raises(RunError, match="no login"):
        push(tmp_path / "out", "it")  # a folder that it takes
    kinds = fields["tokenizer.ggml.token_type"].contents()
    assert {kinds[number] for number in tokenizer.all_special_ids} == {3}


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path, monkeypatch):
    make_model(tmp_path / "model", "gpt2")
    config = make_config(tmp_path, **{"train.steps": 1, "train.warmup_steps": 0})
    run = start_run(config, tmp_path / "runs")
    assert run.execute().state == "finished"
    (tmp_path / "full").mkdir()
    planned = planned_export(open_run(tmp_path / "runs", run.id), tmp_path, ExportChoice())
    weights = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert 0.8 * weights < planned.bytes < weights
    with (
        monkeypatch.context() as patch,
        pytest.raises(RunError, match="KiB at .*, and 9 bytes are free"),
    ):
        patch.setattr("engine.training.export.export_size.disk_free", lambda _: 9)
        patch.setattr("engine.training.export.export.open_checkpoint", None)  # nothing is read
        export_run(tmp_path / "runs", run.id, tmp_path / "full", ExportChoice())
    with pytest.raises(RunError, match="of the family gpt2") as refused:
        export_run(tmp_path / "runs", run.id, tmp_path / "out", ExportChoice(form="gguf"))
    export, convert = re.findall("`(.+?)`", str(refused.value))
    assert shlex.split(export)[-4:] == ["--runs-dir", str(tmp_path / "runs"), "--form", "model"]
    assert shlex.split(convert)[1:3] == ["convert_hf_to_gguf.py", str(tmp_path / "out")]
    assert not (tmp_path / "out").exists() and not any((tmp_path / "full").iterdir())


@pytest.mark.parametrize(
    "family, changes, why",
    [
        ("gemma3_text", {}, "scaled by 256"),
        ("gemma3_text", {"head_dim": 256, "layer_types": ["full_attention"] * 3}, "local layers"),
        ("qwen3_moe", {"norm_topk_prob": False}, "add up to one"),
        ("qwen3_moe", {"norm_topk_prob": True, "mlp_only_layers": [1]}, "no experts"),
        ("llama", {"hidden_act": "gelu"}, "activation gelu"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(family, changes, why):
    with pytest.raises(RunError, match=why):
        family_of(tiny_config(family, **changes))


def test_a_mixture_is_a_llama_with_experts_that_are_stacked():
    family = family_of(tiny_config("mixtral", sliding_window=16))
    stacked = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)
    gate, up = family.tensors("model.layers.1.mlp.experts.gate_up_proj", stacked)
    assert (gate[0], up[0]) == ("blk.1.ffn_gate_exps.weight", "blk.1.ffn_up_exps.weight")
    assert torch.equal(torch.cat([gate[1], up[1]], dim=1), stacked)
    writer = gguf.GGUFWriter(None, family.name)
    family.write(writer, "it")
    found = {key: value.value for key, value in writer.kv_data[0].items()}
    assert (found["llama.expert_count"], found["llama.expert_used_count"]) == (4, 2)
    # Within a window of 16 tokens, llama.cpp, which slides none here, computes the same.
    assert found["llama.context_length"] == 16


def test_a_tokenizer_that_divides_texts_otherwise_is_refused():
    tokenizer = AutoTokenizer.from_pretrained("assets/preference-model")
    with pytest.raises(RunError, match="does not divide texts"):
        vocabulary(tokenizer, len(tokenizer))
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    unigram = {"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}
    assert "of this model is Unigram" in refusal_of_tokenizer(content | {"model": unigram})


def test_the_example_of_the_first_minute_can_be_a_file():
    assert forecast("assets/starter-model") == GgufForecast()
    tokenizer = AutoTokenizer.from_pretrained("assets/starter-model")
    written = vocabulary(tokenizer, len(tokenizer))
    assert (written.read_as.divided_by, written.ends) == ("smollm", [tokenizer.eos_token_id])
    data = TrainConfig.load("presets/starter.yaml").data
    assert same_tokens(data, tokenizer, file=written).startswith("Checked: 10 rows")


@pytest.mark.parametrize(
    "space, adds_space", [("always", True), ("first", False), ("never", False)]
)
def test_the_pieces_of_a_file_are_those_of_the_tokenizer(space, adds_space):
    tokenizer = pieces_tokenizer(space)
    found = vocabulary(tokenizer, len(tokenizer) + 3, ("</s>",))
    assert found.read_as.model == "llama" and found.adds_space is adds_space
    ids = tokenizer.get_vocab()
    assert all(found.tokens[number] == token for token, number in ids.items())
    kinds = {name: found.kinds[ids[name]] for name in ("<unk>", "<s>", "hello", "<0x0A>")}
    assert kinds == {"<unk>": 2, "<s>": 3, "hello": 1, "<0x0A>": 6}
    assert found.kinds[-3:] == [5] * 3 and found.ends == [ids["</s>"]]
    # What is merged first has the largest score.
    assert found.scores[ids["he"]] > found.scores[ids["hell"]] > found.scores[ids["▁hello"]]


def test_pieces_that_llama_cpp_would_merge_otherwise_are_refused():
    tokenizer = pieces_tokenizer("always")
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["model"]["vocab"]["lo"] = 900  # hel + lo would be hello, too
    content["model"]["vocab"]["hel"] = 901
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(content))
    with pytest.raises(RunError, match="does not divide texts"):
        vocabulary(tokenizer, 1000)


def test_dtypes_of_the_file_alone_are_refused_for_a_folder():
    with pytest.raises(ConfigError, match="q8_0"):
        ExportChoice(dtype="q8_0")
