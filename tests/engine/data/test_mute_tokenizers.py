"""A row without a token to train on says what is wrong with it."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.errors import DataError
from tests.support.data_tokenizers import CHATML, SPECIAL, byte_level_tokenizer
from tests.support.rows import write_rows

ROWS = {
    "text": {"text": "hello"},
    "pair": {"prompt": "hello", "completion": "hello"},
    "turns": {
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "hello"},
        ]
    },
}


def written(folder, *rows) -> DataConfig:
    path = folder / "rows.jsonl"
    write_rows(path, rows)
    return DataConfig(source=str(path), eval_fraction=0.0, packing=False, max_seq_len=64)


def mute_tokenizer(template):
    """The empty byte-level BPE that a tokenizer class of another kind makes of a tokenizer.json."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens(list(SPECIAL))
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", pad_token="<pad>")
    made.chat_template = template
    return made


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("kind", ROWS)
def test_a_tokenizer_that_makes_no_tokens_is_told(tmp_path, kind, template):
    if kind == "turns" and template is None:
        pytest.skip("turns need a template")
    text = r"^The tokenizer \(a \w+\) makes no tokens of the text, in line 1 of rows\.jsonl; tr"
    config = written(tmp_path, ROWS[kind])
    with pytest.raises(DataError, match=text):
        prepare_data(config, mute_tokenizer(template), 1)
    assert "makes no tokens of the text" in preview(config, mute_tokenizer(template))["error"]


def test_what_leaves_a_row_without_a_trained_token_is_told(tmp_path):
    tokenizer = byte_level_tokenizer(None, eos=False)
    tokens = {"input_ids": [3, 4, 5], "labels": [-100] * 3}
    cases = {
        "its text is a single token, and nothing predicts the first token": {"text": "a"},
        "none of its tokens is to be trained": tokens,
        "no trained token is left within max_seq_len": {
            "prompt": "b" * 80,
            "completion": "b",
        },
    }
    for why, row in cases.items():
        with pytest.raises(DataError, match=f"0 of 1 rows are usable, mostly because {why} "):
            prepare_data(written(tmp_path, row), tokenizer, 1)
