"""A GGUF file is the exported model: its weights, as transformers reads them, its tokenizer, its
ends and its chat template.
"""

from __future__ import annotations

import gguf
import pytest
import torch
from tokenizers import Regex, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config.export_choice import ExportChoice
from engine.errors import ConfigError, RunError
from engine.runs.summaries.exports import noted_exports
from engine.training.export.export import export_run
from engine.training.export.gguf_tokenizer import vocabulary
from engine.training.export.push import push
from engine.training.loop.run import start_run
from tests.support.data_tokenizers import byte_level_tokenizer
from tests.support.folders import make_config, make_model

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
PATTERNS = {
    name: rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for name, digits in (("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}"))
}
"""Of the tokenizer.json of Qwen 2 and Llama 3."""
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def known_tokenizer(divided_by):
    """A tokenizer that llama.cpp knows."""
    tokenizer = byte_level_tokenizer(TEMPLATE)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[divided_by]), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.model.ignore_merges = divided_by == "llama-bpe"
    return tokenizer


def finished(tmp_path, family, **changes):
    """A run of a tiny model."""
    wide = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 320, **changes}
    make_model(tmp_path / "model", family, torch.bfloat16, **wide)
    divided_by = "llama-bpe" if family == "llama" else "qwen2"
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


@pytest.mark.parametrize(
    "family, changes",
    [
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 128}),  # transformers reads no other
    ],
    ids=["llama3", "tied", "qwen2", "qwen3"],
)
def test_its_model_is_the_exported_one(tmp_path, family, changes):
    run = finished(tmp_path, family, **changes)
    runs = tmp_path / "runs"
    export_run(runs, run, tmp_path / "folder", ExportChoice(dtype="float32"))
    expected = logits_of(plain_model(tmp_path / "folder"))
    for dtype, rounding in ROUNDING.items():
        target = tmp_path / dtype
        export_run(runs, run, target, ExportChoice(form="gguf", dtype=dtype))
        (file,) = target.glob("*.gguf")
        error = (logits_of(read_model(file)) - expected).abs().max() / expected.abs().max()
        assert error < rounding, (dtype, float(error))
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


@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_a_family_that_is_unknown_is_refused_by_name_and_leaves_nothing(tmp_path, family):
    make_model(tmp_path / "model", family)
    config = make_config(tmp_path, **{"train.steps": 1, "train.warmup_steps": 0})
    run = start_run(config, tmp_path / "runs")
    assert run.execute().state == "finished"
    with pytest.raises(RunError, match=f"of the family {family}.*convert_hf_to_gguf"):
        export_run(tmp_path / "runs", run.id, tmp_path / "out", ExportChoice(form="gguf"))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_divides_texts_otherwise_is_refused():
    tokenizer = AutoTokenizer.from_pretrained("assets/starter-model")
    with pytest.raises(RunError, match="does not divide texts"):
        vocabulary(tokenizer, 291)


def test_dtypes_of_the_file_alone_are_refused_for_a_folder():
    with pytest.raises(ConfigError, match="q8_0"):
        ExportChoice(dtype="q8_0")
