"""Model folders and data sets that tests make: a word-level tokenizer with a chat template and a
tiny random model.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from engine.config.settings import TrainConfig
from engine.model.build.library import no_progress_bars
from tests.support.tiny import tiny_config

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "say", "after"]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <end> "
    "{% endfor %}{% if add_generation_prompt %}<assistant> "
    "{% endif %}"
)


def make_tokenizer(of_letters: bool = False) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are WORDS, or letters as byte-level BPE begins with."""
    special = ["<pad>", "<s>", "<end>", "<user>", "<assistant>", "<system>", "<unk>"]
    tokens = "Ġabcdefghijklmnopqrstuvwxyz" if of_letters else WORDS
    vocabulary = {token: k for k, token in enumerate([*special, *tokens])}
    if of_letters:
        tokenizer = Tokenizer(models.BPE(vocabulary, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>", "<system>"],
    )
    fast.chat_template = TEMPLATE
    return fast


def make_model(
    folder: Path, family: str = "llama", dtype: torch.dtype = torch.float32, **changes
) -> Path:
    """A saved tiny model with its tokenizer."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **changes), dtype=dtype)
    with no_progress_bars():
        model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def make_data(path: Path, rows: int = 40) -> Path:
    """Conversations: the answer is the word that follows in WORDS."""
    lines = []
    for k in range(rows):
        word = k % 7
        lines.append(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": f"say after {WORDS[word]}"},
                        {"role": "assistant", "content": WORDS[word + 1]},
                    ]
                }
            )
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_config(tmp_path: Path, **values) -> TrainConfig:
    """A run of eight quick steps on the tiny model."""
    model = tmp_path / "model"
    if not model.exists():
        make_model(model)
    data = tmp_path / "data.jsonl"
    if not data.exists():
        make_data(data)
    config = TrainConfig.from_dict(
        {
            "name": "Tiny",
            "model": {"source": str(model), "dtype": "float32"},
            "data": {"source": str(data), "max_seq_len": 32, "eval_fraction": 0.1},
            "train": {
                "steps": 8,
                "batch_size": 4,
                "micro_batch_size": 2,
                "learning_rate": 1e-2,
                "warmup_steps": 2,
            },
            "engine": {"device": "cpu"},
            "output": {"checkpoint_every": 3, "eval_every": 4, "export": False},
        }
    )
    return config.with_values(values) if values else config
