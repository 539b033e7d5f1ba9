"""Small tokenizers with the families' real special tokens, made in memory."""

from __future__ import annotations

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.references.family import Family

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


def made_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with the family's special tokens and chat template."""
    made = PreTrainedTokenizerFast(
        tokenizer_object=_backend(family, family.added),
        bos_token=family.bos,
        eos_token=family.eos,
        pad_token=family.pad,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = family.template
    return made


def plain_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    """Returns the tokenizer before tokens that are not special were added, for text that stands
    behind another token.
    """
    return PreTrainedTokenizerFast(tokenizer_object=_backend(family, (), inside=True))


def _backend(family: Family, added: tuple[str, ...], inside: bool = False) -> Tokenizer:
    if family.pieces == "bytes":
        return _byte_level(family, added)
    return _sentencepiece(family, inside)


def _byte_level(family: Family, added: tuple[str, ...]) -> Tokenizer:
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [*_MERGES, ("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "hello"), ("Ġ", "a"), ("Ġ", "Ġ")]
    for pair in merges:
        vocabulary.setdefault("".join(pair), len(vocabulary))
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, ignore_merges=family.name == "llama3")
    )
    if family.composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in family.special]
    )
    backend.add_tokens([AddedToken(token, normalized=not family.composed) for token in added])
    return backend


def _sentencepiece(family: Family, inside: bool) -> Tokenizer:
    """As the tokenizer files of these families: special tokens stand in the vocabulary too, bytes
    stand in for the characters that it lacks. Llama 2, Phi-3 and Mistral's first version put a
    space before every piece, its third before the text alone; Phi-3's special tokens take white
    space behind them.
    """
    vocabulary = {token: i for i, token in enumerate(family.special)}
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
    if family.pieces == "first":
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="never" if inside else "first", split=False
        )
    elif family.pieces == "prefixed":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), space])
    else:
        backend.normalizer = space
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(
        [
            AddedToken(
                token,
                normalized=False,
                special=True,
                rstrip=family.swallows and token.startswith("<|"),
            )
            for token in family.special
        ]
    )
    return backend
