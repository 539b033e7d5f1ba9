"""An export is read as its run's data were trained, or the first difference is named."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from tokenizers import pre_tokenizers
from transformers import LlamaTokenizer

from engine.config.data_settings import DataConfig
from engine.training.export.gguf_tokenizer import vocabulary
from engine.training.export.same_tokens import same_tokens
from engine.training.export.write_tokenizer import write_tokenizer
from tests.support.gguf_tokenizers import known_tokenizer, pieces_tokenizer

CHECKED = "Checked: 10 rows of the data give the same tokens as in training."
TEXTS = ("hello a hello", " a", "hell\nö  日 ż", "don't 1234 5", "a<s>b")


@pytest.fixture
def data(tmp_path):
    turns = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "hello"}]
        for text in TEXTS * 3
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    return DataConfig(source=str(path), max_seq_len=64)


TOKENIZERS = {
    "llama-bpe": lambda: known_tokenizer("llama-bpe"),
    "qwen2": lambda: known_tokenizer("qwen2"),
    "always": lambda: pieces_tokenizer("always"),
    "first": lambda: pieces_tokenizer("first"),
    "never": lambda: pieces_tokenizer("never"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_what_is_equal_is_said_in_one_line(data, tmp_path, name):
    tokenizer = TOKENIZERS[name]()
    served = write_tokenizer(tokenizer, tmp_path / "out")
    assert same_tokens(data, tokenizer, served) == CHECKED
    assert same_tokens(data, tokenizer, file=vocabulary(tokenizer, 400)) == CHECKED


def test_texts_without_a_template_begin_as_they_were_trained(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": f"hello {text}"}) + "\n" for text in TEXTS[:4]))
    tokenizer = pieces_tokenizer("first")
    tokenizer.chat_template = None
    says = same_tokens(
        DataConfig(source=str(path)), tokenizer, tokenizer, vocabulary(tokenizer, 400)
    )
    assert says == CHECKED.replace("10", "4")


def test_a_difference_is_named_with_its_row_and_both_texts(data):
    tokenizer = known_tokenizer("qwen2")
    other = copy.deepcopy(tokenizer)
    other.chat_template = tokenizer.chat_template.replace("<|", "<!")
    says = same_tokens(data, tokenizer, other)
    assert says.startswith("Not read as it was trained: line 1 of rows.jsonl is written '<!user")
    assert "'<|user|>hello a hello" in says

    other = copy.deepcopy(tokenizer)
    other.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    says = same_tokens(data, tokenizer, other)
    assert "line 1 of rows.jsonl differs at token 2: trained [hello]" in says
    assert "the exported tokenizer reads [Ġhello]" in says

    file = vocabulary(pieces_tokenizer("always"), 400)
    says = same_tokens(data, pieces_tokenizer("always"), file=replace(file, adds_space=False))
    assert "trained [▁hello] " in says and "llama.cpp reads [hello] " in says


def test_data_that_are_gone_are_told_in_a_few_words(data):
    tokenizer = known_tokenizer("qwen2")
    gone = replace(data, source=f"{data.source}.gone.jsonl")
    assert same_tokens(gone, tokenizer, tokenizer).startswith("Tokens were not compared: There is ")
    assert same_tokens(data, tokenizer).endswith("tokenizer cannot be read again.")
    hub = replace(data, source="nobody/nothing")
    assert same_tokens(hub, tokenizer, tokenizer).endswith("are not on this machine.")


def test_a_tokenizer_is_read_again_as_it_was_trained(tmp_path):
    """transformers reads the folder of such a tokenizer as one without spaces behind tokens."""
    content = json.loads(pieces_tokenizer("always").backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in content["merges"]]
    tokenizer = LlamaTokenizer(content["vocab"], merges)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
        prepend_scheme="always", split=False
    )
    read = write_tokenizer(tokenizer, tmp_path)
    text = "<s>hello a</s>a"
    assert read(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert read.eos_token == "</s>"
