"""Tiny models that learn four answers by heart, with any chat template, and whether their answers
end by themselves: ours, and those of plain transformers.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

from engine.config.settings import TrainConfig
from engine.model.build.library import no_progress_bars
from engine.runs.record.events import ExactMatchMeasured
from tests.support.rows import write_rows
from tests.support.tiny import tiny_config
from tests.support.trained_runs import events_of, trained

CAPITALS = {"France": "Paris", "Italy": "Rome", "Spain": "Madrid", "Peru": "Lima"}
OWN_END = "<|own_end|>"
"""The made models end a text with this token, and no chat template writes it."""
_TOKENS = re.compile(
    r"<\|[^|<>\s]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜]+｜>|</?(?:start|end)_of_(?:turn|utterance)>"
    r"|</?s>|</?[A-Za-z]+_?(?:TOKEN|RESPONSE|THINKING|ACTION)?>|\[/?[A-Z_]+\]|\[gMASK\]"
)
"""Special tokens are written so, and some texts that are none."""
_NEVER = re.compile(r"</?(?:think|tools?|tool_call|tool_response|IMPORTANT|function|parameter)>")
_FIRST = ("<pad>", "<s>", OWN_END)


def question(country: str) -> str:
    return f"Capital of {country}?"


def rows() -> list[dict[str, Any]]:
    """Returns 48 conversations, of which four are different."""
    one = [
        [{"role": "user", "content": question(country)}, {"role": "assistant", "content": capital}]
        for country, capital in CAPITALS.items()
    ]
    return [{"messages": turns} for turns in one] * 12


def tokenizer_for(template: str, eos: str = OWN_END) -> PreTrainedTokenizerFast:
    """Returns a small byte-level tokenizer that has the special tokens that a template mentions."""
    special = dict.fromkeys([*_FIRST, eos, *_TOKENS.findall(template)])
    special = [token for token in special if not _NEVER.fullmatch(token)]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = [f"{question(country)} {capital}" for country, capital in CAPITALS.items()]
    made.train_from_iterator([template, *texts * 20], trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token=eos
    )
    tokenizer.chat_template = template
    return tokenizer


def model_folder(
    folder: Path, tokenizer: PreTrainedTokenizerFast, end: str = OWN_END, family: str = "llama"
) -> Path:
    """Writes a tiny model with this tokenizer, whose own end token is `end`."""
    torch.manual_seed(3)
    changes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2}
    changes |= {"max_position_embeddings": 2048, "initializer_range": 0.1}
    config = tiny_config(
        family,
        vocab_size=len(tokenizer),
        bos_token_id=1,
        eos_token_id=tokenizer.convert_tokens_to_ids(end),
        pad_token_id=0,
        **(changes if family == "llama" else {"initializer_range": 0.1}),
    )
    with no_progress_bars():
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def config_of(folder: Path, data: list[dict[str, Any]] | None = None, **values) -> TrainConfig:
    """Returns a run that learns `data`, or `rows()`, by heart with the model in folder/model, and
    asks for all validation answers.
    """
    path = folder / "data.jsonl"
    write_rows(path, data or rows())
    tree = {
        "name": "By heart",
        "model": {"source": str(folder / "model"), "dtype": "float32"},
        "data": {"source": str(path), "max_seq_len": 1024, "packing": False, "eval_fraction": 0.25},
        "train": {
            "steps": 90,
            "batch_size": 8,
            "micro_batch_size": 8,
            "learning_rate": 5e-3,
            "schedule": "constant",
            "warmup_steps": 5,
            "weight_decay": 0.0,
        },
        "engine": {"device": "cpu"},
        "output": {
            "checkpoint_every": 0,
            "eval_every": 0,
            "export": True,
            "exact_match_samples": 12,
        },
    }
    return TrainConfig.from_dict(tree).with_values(values)


@dataclass(frozen=True)
class Learned:
    """A run that has learned its rows, and its exported folder."""

    run: Any
    folder: Path

    @property
    def exact(self) -> tuple[int, int]:
        """Returns how many validation answers were exactly right after training, and of how
        many.
        """
        last = events_of(self.run, ExactMatchMeasured)[-1]
        return last.correct, last.total

    @functools.cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @functools.cached_property
    def model(self) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.folder)

    def ids_of_prompt(self, messages: list[dict[str, Any]]) -> torch.Tensor:
        return self.tokenizer.apply_chat_template(
            messages,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=False,
        )

    def answer(self, ids: torch.Tensor, most: int = 40) -> tuple[str, str]:
        """Returns the answer of plain `generate`, and the token with which it ended; that is empty
        where it went on for `most` tokens.
        """
        with torch.no_grad():
            out = self.model.generate(ids, max_new_tokens=most, do_sample=False)
        new = out[0, ids.shape[1] :].tolist()
        if len(new) == most:
            return self.tokenizer.decode(new), ""
        text = self.tokenizer.decode(new[:-1], skip_special_tokens=True).strip()
        return text, self.tokenizer.convert_ids_to_tokens(new[-1])

    @property
    def ends(self) -> list[str]:
        """Returns the end tokens of the folder's generation settings."""
        path = self.folder / "generation_config.json"
        value = json.loads(path.read_text())["eos_token_id"]
        ids = value if isinstance(value, list) else [value]
        return self.tokenizer.convert_ids_to_tokens(ids)


def learned(config: TrainConfig, runs: Path) -> Learned:
    """Returns a run of these settings that has finished, and what it has exported."""
    run = trained(config, runs)
    return Learned(run, run.folder.export_path)
