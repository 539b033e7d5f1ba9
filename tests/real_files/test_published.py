"""Published models go the whole way: they are loaded, shown, trained and taken home.

Tokenizers, chat templates and configurations are the true ones (`tests/support/published.py`); only
widths and the number of layers are smaller.
"""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import tiktoken
import torch
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.checkpoints.export import export_run
from engine.config.settings import TrainConfig
from engine.data.preview import preview
from engine.data.rows import IGNORED
from engine.data.loader import prepare_data
from engine.dividing.piece import Piece
from engine.dividing.word_tokens import WordTokens
from engine.model.pretrained_files import load_tokenizer
from engine.runs.events import StepFinished
from tests.support import published
from tests.support.published import PUBLISHED
from tests.support.trained_runs import events_of, trained

pytestmark = pytest.mark.computing
TEXT = (
    "“Don't,” she'd said — it's 3,141 km to Zürich!\n\n\tНо 東京は遠い。  🙂 naïve ﬁn\r\n"
    "def f(x):\n    return x**2  # ½ of it\n" + "La mer, la mer, toujours recommencée ! " * 3
)
"""It has no character that a normalisation changes."""


def own_tokens(name: str, text: str) -> list[int]:
    """Returns the tokens of a text by the library that the publisher of the model uses."""
    if name == "Mistral-7B-v0.1":
        return SentencePieceProcessor(model_file=str(published.mistral_file())).encode(text)
    if name == "Mistral-Nemo-Base-2407":
        settings = json.loads(published.nemo_file().read_text())["config"]
        ranks, pattern = published.ranks_of(published.nemo_file()), settings["pattern"]
        first = settings["default_num_special_tokens"]
    elif name == "Qwen2.5-0.5B-Instruct":
        ranks, pattern, first = published.qwen_ranks(), published.PATTERN, 0
    else:
        ranks, pattern, first = published.llama_ranks(), published.LLAMA_PATTERN, 0
    encoding = tiktoken.Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [first + token for token in encoding.encode(text)]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_goes_the_whole_way(tmp_path, name):
    model = PUBLISHED[name].write(tmp_path / name)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    data = tmp_path / "data.jsonl"
    chats = "chat_template" in settings
    questions = [f"How much is {n} + {n}?" for n in range(30)]
    if chats:
        turns = [
            [
                {"role": "user", "content": asked},
                {"role": "assistant", "content": f" {2 * n}, né 🙂 "},
            ]
            for n, asked in enumerate(questions)
        ]
        data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in turns))
    else:
        data.write_text("".join(json.dumps({"text": asked + TEXT}) + "\n" for asked in questions))
    config = TrainConfig.from_dict(
        {
            "model": {"source": str(model)},
            "data": {"source": str(data), "max_seq_len": 256},
            "train": {"steps": 3, "batch_size": 2, "learning_rate": 1e-3},
        }
    )
    tokenizer = load_tokenizer(str(model))
    shown = preview(config.data, tokenizer)
    assert shown["rows"]
    run = trained(config, tmp_path / "runs")
    losses = [event.loss for event in events_of(run, StepFinished)]
    vocabulary = PUBLISHED[name].config()["vocab_size"]
    assert len(losses) == 3 and losses[0] == pytest.approx(math.log(vocabulary), rel=0.05)
    home = tmp_path / "home"
    export_run(tmp_path / "runs", run.folder.id, home)
    there = AutoTokenizer.from_pretrained(home)
    before = AutoTokenizer.from_pretrained(model)
    assert there(TEXT)["input_ids"] == before(TEXT)["input_ids"]
