"""Tokenizers that write spaces as `▁`: texts that are divided between characters that no merge
joins have the tokens that the tokenizer gives them.
"""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from engine.data.dividing.piece import Piece
from engine.data.dividing.word_tokens import WordTokens

pytestmark = pytest.mark.computing

LETTERS = "▁abdehlostw.,'<>/\n0123x日é_"
MERGES = (
    *("h e", "l l", "he ll", "hell o", "▁ hello", "▁ a", "▁ ▁", "▁▁ ▁▁", "\n \n", "\n\n \n\n"),
    *(". .", "日 日", "▁ 日", "' s", "< /", "e s", "es t", "1 2", "12 3", "o .", "l o", "lo w"),
    *("▁ low", "w e", "hello \n"),
)
"""One of them joins a letter and a sign."""
CHARACTERS = (
    *"ahelosw.'</>\n12日é▁ \tZß٣\xa0_x0",
    *("  ", "hello", " hello", "\n\n", "e\u0301", "😀", "<0x0A>", "lowest", "hello."),
)


def tokenizer_of(merges=(), added=(), **model):
    known = [f"<0x{byte:02X}>" for byte in range(256)]
    pairs = [tuple(merge.split(" ")) for merge in (*MERGES, *merges)]
    for token in ("<unk>", *LETTERS, *(one + other for one, other in pairs)):
        if token not in known:
            known.append(token)
    vocabulary = {token: number for number, token in enumerate(known)}
    how = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | model
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, **how))
    found.add_special_tokens(["<end>"])
    found.add_tokens([AddedToken(token, normalized=False) for token in added])
    return found


def like_llama(**how):
    found = tokenizer_of(**how)
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    found.normalizer = normalizers.Sequence(steps)
    return found


def like_gemma(**how):
    found = tokenizer_of(**how)
    found.normalizer = normalizers.Replace(" ", "▁")
    found.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return found


def with_metaspace(scheme="first", split=False, **how):
    found = tokenizer_of(**how)
    found.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=scheme, split=split)
    return found


TOKENIZERS = {
    "Llama": like_llama(),
    "Gemma, lines are tokens": like_gemma(added=("\n", "\n\n", "\n\n\n", "▁▁▁")),
    "Gemma": like_gemma(),
    "Gemma, lines are in other tokens": like_gemma(added=("\n", "\n\n", "<\n")),
    **{scheme: with_metaspace(scheme) for scheme in ("first", "always", "never")},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokens_are_those_of_the_tokenizer(name):
    tokenizer, draw = TOKENIZERS[name], random.Random(name)
    words = WordTokens.of(tokenizer)
    for length in range(600):
        text = "".join(draw.choices(draw.sample(CHARACTERS, 8), k=length % 30))
        ids = words.of_piece(Piece("", text, ""))
        assert ids is not None and ids.tolist() == tokenizer.encode(text).ids, repr(text)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_of_a_text_have_its_tokens(name):
    """Context is left out. A piece that ends inside a word is left to the tokenizer."""
    tokenizer, draw = TOKENIZERS[name], random.Random(name)
    words, found = WordTokens.of(tokenizer), 0
    for _ in range(300):
        text = "".join(draw.choices(CHARACTERS, k=40))
        cuts = sorted(draw.sample(range(1, len(text)), 2))
        parts = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)])]
        ids = [
            words.of_piece(Piece("".join(parts[:place]), part, "".join(parts[place + 1 :])))
            for place, part in enumerate(parts)
        ]
        if all(each is not None for each in ids):
            found += 1
            assert [one for each in ids for one in each.tolist()] == tokenizer.encode(text).ids
    assert found > 20
    assert words.of_piece(Piece("", " hel", "lo")) is None


def test_what_is_joined_stays_together_and_nothing_else():
    words = WordTokens.of(like_llama())
    words.of_piece(Piece("", "hello. hello, hello.. x1", ""))
    expected = {"▁hello.", "▁hello", ",", "▁hello..", "▁", "x", "1"}
    assert set(_words_of(words)) == expected


def _words_of(words) -> list[str]:
    records, place, found = words._known.all[1], 1, []
    while place < words._known._used:
        count, tokens = int(records[place]), int(records[place + 1])
        found.append("".join(map(chr, records[place + 2 : place + 2 + count].tolist())))
        place += 2 + count + tokens
    return found


def test_special_tokens_and_halves_of_characters_are_left_to_the_tokenizer():
    words = WordTokens.of(TOKENIZERS["Gemma, lines are tokens"])
    for text in ("he <end> he", "he\ud800", "he\n<end>\n"):
        assert words.of_piece(Piece("", text, "")) is None
    assert words.of_piece(Piece("", "he\n", "\nhe")) is None, "a token reaches over the border"
    words = WordTokens.of(TOKENIZERS["Gemma, lines are in other tokens"])
    assert words.of_piece(Piece("", "he<", "\nhe")) is None, "so does this one"
    assert WordTokens.of(like_llama(added=("\n",))).of_piece(Piece("", "he\nhe", "")) is None


def test_tokenizers_that_may_join_over_a_border_are_asked_themselves():
    spaced = like_gemma()
    spaced.add_tokens([AddedToken("he he", normalized=True)])
    twice = like_llama()
    twice.normalizer = normalizers.Sequence([twice.normalizer, normalizers.NFC()])
    for tokenizer in (
        tokenizer_of(),  # spaces stay
        like_llama(byte_fallback=False),
        like_llama(ignore_merges=True),
        like_llama(dropout=0.1),
        like_llama(merges=("<0x0A> <0x0A>",)),
        with_metaspace(split=True),
        spaced,
        twice,
    ):
        assert WordTokens.of(tokenizer) is None
