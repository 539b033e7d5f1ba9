"""Families' chat templates and tokenizers with their real special tokens, and a slow reference for
each.

A reference writes a conversation as segments of its own (no template engine), tokenises what stands
between special tokens piece by piece, and finds the bytes of each token by its spelling: nothing in
it is shared with `engine.data`.
"""

from __future__ import annotations

import functools
import json
import re
import unicodedata
from dataclasses import dataclass

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "{%- if messages[0]['role'] == 'system' %}{% set said = messages[0]['content'] %}"
    "{% set rest = messages[1:] %}{%- else %}{% set said = 'You are helpful.' %}"
    "{% set rest = messages %}{% endif %}{{- '<|im_start|>system\\n' + said }}"
    "{%- if tools %}{{ '\\n\\n# Tools\\n<tools>' }}{% for tool in tools %}{{ '\\n' }}"
    "{{ tool | tojson }}{% endfor %}{{ '\\n</tools>' }}"
    "{% endif %}{{ '<|im_end|>\\n' }}{%- for m in rest %}"
    "{% if m.role == 'tool' %}{%- if loop.first or loop.previtem.role != 'tool' %}"
    "{{ '<|im_start|>user' }}{% endif %}"
    "{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{%- elif m.tool_calls %}{{ '<|im_start|>assistant' }}"
    "{% if m.content %}{{ '\\n' + m.content }}{% endif %}"
    "{%- for call in m.tool_calls %}{% set call = call.function or call %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.name + \'", "arguments": \' }}'
    "{{ call.arguments | tojson }}{{- '}\\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\\n' }}{%- else %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endif %}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% endif %}"
)
LLAMA3 = (
    "{{- bos_token }}{% for m in messages %}"
    "{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content']"
    " | trim + '<|eot_id|>' }}"
    "{% endfor %}{%- if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}"
    "{% endif %}"
)
GEMMA = (
    "{{- bos_token }}{% if messages[0]['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}"
    "{% endif %}{%- for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{- raise_exception('Conversation roles must alternate') }}"
    "{% endif %}{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{- '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}"
    "{% endfor %}{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}"
    "{% endif %}"
)
PHI3 = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\\n' + m['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}"
    "{% endif %}"
)
SPECIAL = {
    "qwen": ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>"),
    "llama3": (
        "<|begin_of_text|>",
        "<|end_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eom_id|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    "gemma": ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
    "phi3": (
        "<unk>",
        "<s>",
        "</s>",
        "<|endoftext|>",
        "<|assistant|>",
        "<|system|>",
        "<|end|>",
        "<|user|>",
        "<|tool|>",
    ),
    "marked": ("<|endoftext|>", "<|end|>"),
}
"""`marked` has Phi-3's template, and role markers that are added tokens and not special."""
WRITTEN = {
    "qwen": ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
    "marked": ("<|assistant|>", "<|system|>", "<|user|>", "<|tool|>"),
}
"""Added tokens that are not special and that the template writes."""
ADDED = {"qwen": ("<think>", "</think>", *WRITTEN["qwen"]), "marked": WRITTEN["marked"]}
BYTE_LEVEL = ("qwen", "llama3", "marked")
_SPLIT = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_MERGES = [
    ("h", "e"),
    ("l", "l"),
    ("he", "ll"),
    ("hell", "o"),
    ("a", "n"),
    ("<", "|"),
    ("|", ">"),
    ("i", "m"),
    ("e", "n"),
    ("en", "d"),
    ("o", "t"),
]


_WHITE_SPACE = "".join(
    c for c in map(chr, range(0x3001)) if c.isspace() and c not in "\x1c\x1d\x1e\x1f"
)
"""What Unicode calls white space, and so the tokenizer; Python counts four separators of
information in as well.
"""


class Refused(Exception):
    """The template does not take this conversation."""


@dataclass(frozen=True)
class Segment:
    """Text of a rendered conversation. `written`: a token, as the template wrote it or as it is one
    in an answer.
    """

    text: str
    trained: bool = False
    written: bool = False


def tokenizer(family: str) -> PreTrainedTokenizerFast:
    backend = _byte_level(family) if family in BYTE_LEVEL else _sentencepiece(family)
    names = {
        "qwen": (None, "<|im_end|>", "<|endoftext|>"),
        "llama3": ("<|begin_of_text|>", "<|eot_id|>", None),
        "gemma": ("<bos>", "<eos>", "<pad>"),
        "phi3": ("<s>", "<|endoftext|>", "<|endoftext|>"),
        "marked": (None, "<|end|>", "<|endoftext|>"),
    }[family]
    bos, eos, pad = names
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = {
        "qwen": QWEN,
        "llama3": LLAMA3,
        "gemma": GEMMA,
        "phi3": PHI3,
        "marked": PHI3,
    }[family]
    return made


@functools.cache
def _plain_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The family's tokenizer before tokens that are not special were added."""
    return PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(family, ()) if family in BYTE_LEVEL else _sentencepiece(family)
    )


def _byte_level(family: str, added: tuple[str, ...] | None = None) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [*_MERGES, ("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "hello"), ("Ġ", "a"), ("Ġ", "Ġ")]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family == "llama3")
    )
    if family == "qwen":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL[family]]
    )
    backend.add_tokens(
        [
            AddedToken(token, normalized=family != "qwen")
            for token in (ADDED.get(family, ()) if added is None else added)
        ]
    )
    return backend


def _sentencepiece(family: str) -> Tokenizer:
    """As the tokenizer files of these families: special tokens stand in the vocabulary too, bytes
    stand in for the characters that it lacks; Phi-3 puts a space before every piece and its special
    tokens take white space behind them.
    """
    vocabulary = {token: i for i, token in enumerate(SPECIAL[family])}
    for token in [
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *"▁abcdefghijklmnopqrstuvwxyz.,:;!?'\n<>|_/[]äö日",
    ]:
        vocabulary.setdefault(token, len(vocabulary))
    merges = [*_MERGES, ("\n", "\n"), ("▁", "hello"), ("▁", "a"), ("▁", "▁")]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    space = normalizers.Replace(" ", "▁")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), space]) if family == "phi3" else space
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=True,
                rstrip=family == "phi3" and token.startswith("<|"),
            )
            for token in SPECIAL[family]
        ]
    )
    return backend


# ---------------------------------------------------------------------- segments


def segments(family: str, messages: list[dict], tools: list | None = None) -> list[Segment]:
    """What the family's template writes. Raises Refused where the template does."""
    write = {"qwen": _qwen, "llama3": _llama3, "gemma": _gemma, "phi3": _phi3, "marked": _marked}[
        family
    ]
    return write(messages, tools)


def _said(family: str, text: str, answer: bool = False) -> list[Segment]:
    """What somebody said. In an answer added tokens are tokens, elsewhere those that the template
    does not write.
    """
    stay = [token for token in ADDED[family] if answer or token not in WRITTEN[family]]
    pieces = re.split(f"({'|'.join(map(re.escape, stay)) or '(?!)'})", text)
    return [
        Segment(piece, trained=answer, written=bool(place % 2))
        for place, piece in enumerate(pieces)
    ]


def _qwen(messages: list[dict], tools: list | None) -> list[Segment]:
    system = messages[0]["role"] == "system"
    said = messages[0]["content"] if system else "You are helpful."
    start, end = Segment("<|im_start|>", written=True), Segment("<|im_end|>", written=True)
    out = [start, Segment("system\n"), *_said("qwen", said)]
    if tools:
        told = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        out += [Segment("\n\n# Tools\n<tools>"), *_said("qwen", told), Segment("\n</tools>")]
    out += [end, Segment("\n")]
    rest = messages[1:] if system else messages
    for place, message in enumerate(rest):
        answer = message["role"] == "assistant"
        if message["role"] == "tool":
            if place == 0 or rest[place - 1]["role"] != "tool":
                out += [start, Segment("user")]
            out += [
                Segment("\n"),
                Segment("<tool_response>", written=True),
                Segment("\n"),
                *_said("qwen", message["content"]),
                Segment("\n"),
                Segment("</tool_response>", written=True),
            ]
            if place + 1 == len(rest) or rest[place + 1]["role"] != "tool":
                out += [end, Segment("\n")]
            continue
        text = message["content"]
        for call in message.get("tool_calls", ()):
            text += "\n" if text else ""
            text += (
                f'<tool_call>\n{{"name": "{call["function"]["name"]}", "arguments": '
                f"{json.dumps(call['function']['arguments'], ensure_ascii=False)}}}\n</tool_call>"
            )
        out += [
            start,
            Segment(message["role"] + "\n"),
            *_said("qwen", text, answer),
            Segment("<|im_end|>", trained=answer, written=True),
            Segment("\n"),
        ]
    return out


def _llama3(messages: list[dict], tools: list | None) -> list[Segment]:
    out = [Segment("<|begin_of_text|>", written=True)]
    for message in messages:
        answer = message["role"] == "assistant"
        out += [
            Segment("<|start_header_id|>", written=True),
            Segment(message["role"]),
            Segment("<|end_header_id|>", written=True),
            Segment("\n\n"),
            Segment(message["content"].strip(), trained=answer),
            Segment("<|eot_id|>", trained=answer, written=True),
        ]
    return out


def _gemma(messages: list[dict], tools: list | None) -> list[Segment]:
    out = [Segment("<bos>", written=True)]
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        if (message["role"] == "user") != (place % 2 == 0) or messages[0]["role"] == "system":
            raise Refused
        out += [
            Segment("<start_of_turn>", written=True),
            Segment(("model" if answer else message["role"]) + "\n"),
            Segment(message["content"].strip(), trained=answer),
            Segment("<end_of_turn>", trained=answer, written=True),
            Segment("\n"),
        ]
    return out


def _phi3(messages: list[dict], tools: list | None) -> list[Segment]:
    out = []
    for message in messages:
        answer = message["role"] == "assistant"
        out += [
            Segment(f"<|{message['role']}|>", written=True),
            Segment("\n"),
            Segment(message["content"], trained=answer),
            Segment("<|end|>", trained=answer, written=True),
            Segment("\n"),
        ]
    return out


def _marked(messages: list[dict], tools: list | None) -> list[Segment]:
    out = []
    for message in messages:
        answer = message["role"] == "assistant"
        out += [
            Segment(f"<|{message['role']}|>", written=True),
            Segment("\n"),
            *_said("marked", message["content"], answer),
            Segment("<|end|>", trained=answer, written=True),
            Segment("\n"),
        ]
    return out


# ---------------------------------------------------------------------- tokens


def tokens(
    family: str, made: PreTrainedTokenizerFast, parts: list[Segment]
) -> tuple[list[int], list[bool]]:
    """Ids of the segments up to the last trained one's line end, and whether each is trained."""
    last = max((place for place, part in enumerate(parts) if part.trained), default=-1)
    parts = parts[: last + 2]
    ids: list[int] = []
    trained: list[bool] = []
    run: list[tuple[str, bool]] = []
    swallow = False
    for part in [*parts, None]:
        if part is not None and not part.written:
            text = unicodedata.normalize("NFC", part.text) if family == "qwen" else part.text
            if swallow:
                stripped = text.lstrip(_WHITE_SPACE)
                swallow, text = not stripped, stripped
            run += [(character, part.trained) for character in text]
            continue
        _read(family, run, ids, trained)
        run = []
        if part is not None:
            ids.append(made.convert_tokens_to_ids(part.text))
            trained.append(part.trained)
            swallow = family == "phi3" and part.text.startswith("<|")
    if trained:
        trained[0] = False
    return ids, trained


def _read(family: str, run: list[tuple[str, bool]], ids: list[int], trained: list[bool]) -> None:
    if not run:
        return
    made = _plain_tokenizer(family)
    found = made("".join(c for c, _ in run), add_special_tokens=False, split_special_tokens=True)[
        "input_ids"
    ]
    # The space that Phi-3 puts before a run belongs to the character behind it.
    marks: list[bool] = [run[0][1]] * (len("▁".encode()) if family == "phi3" else 0)
    text = b"" if family != "phi3" else "▁".encode()
    for character, mark in run:
        spelled = (character if family in BYTE_LEVEL else character.replace(" ", "▁")).encode()
        text += spelled
        marks += [mark] * len(spelled)
    at = 0
    for token, i in zip(made.convert_ids_to_tokens(found), found):
        spelled = _bytes(family, token)
        assert text[at : at + len(spelled)] == spelled, "the reference lost its place"
        ids.append(i)
        trained.append(any(marks[at : at + len(spelled)]))
        at += len(spelled)
    assert at == len(text)


_BYTE_OF = {}
for _byte in range(256):
    _kept = 33 <= _byte <= 126 or 161 <= _byte <= 172 or 174 <= _byte <= 255
    _BYTE_OF[chr(_byte) if _kept else chr(256 + sum(1 for c in _BYTE_OF if ord(c) >= 256))] = _byte


def _bytes(family: str, token: str) -> bytes:
    if family in BYTE_LEVEL:
        return bytes(_BYTE_OF[c] for c in token)
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes([int(byte[1], 16)]) if byte else token.encode()
