"""Chat templates of 31 families as models publish them, each with the training template that TRL
ships for it: its marks say which tokens are an answer.

The tokenizers are made: bytes with a few merges, and the special tokens that a template writes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_MARKS = {  # the tokens that begin a text and end an answer, where a family has others than Qwen's
    "cohere": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "cohere2": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek_r1_distill": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "deepseekv3": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": ("<bos>", "<eos>"),
    "gemma": ("<bos>", "<eos>"),
    "gemma3": ("<bos>", "<eos>"),
    "glm4moe": (None, "<|endoftext|>"),
    "gptoss": (None, "<|return|>"),
    "idefics3": ("<|begin_of_text|>", "<|eot_id|>"),
    "lfm2": ("<|startoftext|>", "<|im_end|>"),
    "lfm2_v2": ("<|startoftext|>", "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "llava_next": ("<s>", "</s>"),
    "muse_glimmer": ("<|begin_of_text|>", "<|eot|>"),
    "phi3": (None, "<|endoftext|>"),
    "phi3_5": (None, "<|endoftext|>"),
    "smolvlm": (None, "<end_of_utterance>"),
}
_SPECIAL = re.compile(
    r"<\|[^|<> ]{1,40}\|>|<｜[^｜]{1,40}｜>|</?s>|<(?:start|end)_of_[a-z]+>|<image>"
    r"|<(?:channel|tool_call|tool_response|tool|turn)\|>"
    r"|<\|(?:channel|tool_call|tool_response|tool|turn)>"
)
_ADDED = re.compile(r"</?(?:think|tool_call|tool_response)>")
"""These tokens are not special."""
_TODAY = re.compile(r"""strftime_now\(["']%Y-%m-%d["']\)""")
"""Templates of runs have this date every day."""
_SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MERGES = [("Ċ", "Ċ"), ("h", "e"), ("l", "l"), ("he", "ll")]


def _templates() -> Path:
    """Returns the folder of templates, without importing TRL."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]) / "chat_templates"


PAIRS = tuple(
    sorted(path.name.removesuffix("_training.jinja") for path in _templates().glob("*_training.*"))
)


def as_published(family: str) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the template that the family's models have."""
    return _tokenizer(family, f"{family}.jinja")


def as_trained(family: str) -> PreTrainedTokenizerFast:
    """Returns the same tokenizer with TRL's training template."""
    return _tokenizer(family, f"{family}_training.jinja")


@functools.cache
def _tokenizer(family: str, file: str) -> PreTrainedTokenizerFast:
    published = (_templates() / f"{family}.jinja").read_text(encoding="utf-8")
    begin, end = _MARKS.get(family, (None, "<|im_end|>"))
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for pair in _MERGES:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = {*_SPECIAL.findall(published), end} | ({begin} if begin else set())
    backend.add_special_tokens(sorted(special))
    added = sorted(set(_ADDED.findall(published)))
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=begin,
        eos_token=end,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = (_templates() / file).read_text(encoding="utf-8")
    made.chat_template = _TODAY.sub("'2024-07-26'", made.chat_template)
    return made
