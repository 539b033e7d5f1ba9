"""Texts that are tokenized word by word have the tokens that the tokenizer gives them, for the
patterns of well-known models and with characters of every kind.
"""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from engine.data.dividing.automaton import automaton_of
from engine.data.dividing.byte_level import ByteLevel
from engine.data.dividing.piece import Piece
from engine.data.dividing.sought_tokens import AddedTokens
from engine.data.dividing.word_tokens import WordTokens
from tests.support import data_tokenizers as made

pytestmark = pytest.mark.computing
_CASES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_MARK = r"[^\r\n\p{L}\p{N}]?"
PATTERNS = {
    "GPT-2": None,
    "Qwen2": rf"{_CASES}|{_MARK}\p{{L}}+|\p{{N}}|{_REST}",
    "Llama 3": rf"{_CASES}|{_MARK}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}",
    "o200k": rf"{_MARK}[{_UPPER}]*[{_LOWER}]+{_CASES}?|{_MARK}[{_UPPER}]+[{_LOWER}]*{_CASES}?"
    rf"|\p{{N}}{{1,3}}|{_REST.replace('n]*', 'n/]*')}",
    "the starter": r"\p{N}|[MDCLXVI](?![a-z])| ?\p{L}+|\s|[^\s\p{L}\p{N}]+",
}
CHARACTERS = (
    *"aZMsStTréßſKİıǅ1٣²Ⅷ日本ไ्é 　\t\n\r\x0b\x1c\x85\xa0\u2028\u200d'’.,!?/_-<|>",
    "e\u0301",
    "😀",
    "𝒜",
    "𐒰",
    "'ll",
    "\r\n",
    "  ",
    "hello",
)


def backend(pattern, normalizer=None):
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)]
    if pattern is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(pattern), "isolated"))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    merges = [("h", "e"), ("Ġ", "he"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("'", "l"), ("'l", "l"), ("Ã", "©")]
    for one, other in merges:
        vocabulary.setdefault(one + other, len(vocabulary))
    found = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(steps)
    found.normalizer = normalizer
    found.add_special_tokens(["<|end|>"])
    return found


def text_of(draw, characters, length):
    return "".join(draw.choices(characters, k=length))


@pytest.mark.parametrize("name", PATTERNS)
def test_tokens_are_those_of_the_tokenizer(name):
    tokenizer = backend(PATTERNS[name], normalizers.NFC() if name == "Qwen2" else None)
    words, draw = WordTokens.of(tokenizer), random.Random(name)
    found = 0
    for length in range(300):
        text = text_of(draw, draw.sample(CHARACTERS, 12), length % 60)
        ids = words.of_piece(Piece("", text, ""))
        assert ids is None or ids.tolist() == tokenizer.encode(text).ids, repr(text)
        found += ids is not None
    assert found > 100
    prose = "“Hello,” he said: it's 1,234 — naïve!\n\n\tAnd they'LL go…  to 東京.\r\n" * 3
    assert words.of_piece(Piece("", prose, "")).tolist() == tokenizer.encode(prose).ids


@pytest.mark.parametrize(
    "steps",
    [
        [pre_tokenizers.Digits(individual_digits=True)],
        [pre_tokenizers.Digits(individual_digits=False)],
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated"),
            pre_tokenizers.Split(
                Regex(rf"[!-/][A-Za-z]+|{_MARK}\p{{L}}+| ?[\p{{P}}\p{{S}}]+|\s*[\r\n]+|\s+"),
                "isolated",
            ),
        ],
    ],
    ids=["SmolLM", "runs of digits", "DeepSeek"],
)
def test_a_tokenizer_may_divide_several_times(steps):
    tokenizer, draw = backend(None), random.Random(len(steps))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=len(steps) == 1)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, last])
    tokenizer.normalizer = normalizers.Sequence([])
    words, found = WordTokens.of(tokenizer), 0
    for length in range(300):
        text = text_of(draw, [*draw.sample(CHARACTERS, 9), "1234567", "12"], length % 60)
        ids = words.of_piece(Piece("", text, ""))
        assert ids is None or ids.tolist() == tokenizer.encode(text).ids, repr(text)
        found += ids is not None
    assert found > 100


def test_context_is_left_out_and_a_word_across_a_border_is_left_to_the_tokenizer():
    words = WordTokens.of(backend(PATTERNS["Qwen2"]))
    alone = words.of_piece(Piece("", " he he", ""))
    assert words.of_piece(Piece("and", " he he", " he.\n")).tolist() == alone.tolist()
    assert words.of_piece(Piece("and so", "on he", "")) is None
    assert words.of_piece(Piece("", "on he", "llo")) is None


def test_special_tokens_and_unusual_characters_are_left_to_the_tokenizer():
    words = WordTokens.of(backend(PATTERNS["Qwen2"], normalizers.NFC()))
    assert words.of_piece(Piece("", "he <|end|> he", "")) is None
    assert words.of_piece(Piece("", "e\u0301", "")) is None, "it is not normalized"
    for text in ("𐒰he", "😀 he"):
        assert words.of_piece(Piece("", text, "")) is not None
    greek = automaton_of(r"[α]+|\S|\s")
    greek.class_of[ord("α")] = greek.class_of[ord("x")]
    tokenizer = backend(r"[α]+|\S|\s")
    division = ByteLevel(tokenizer.pre_tokenizer, greek, is_normalized=False)
    other = WordTokens(tokenizer, division, AddedTokens([]))
    assert other.of_piece(Piece("", "xx", "")) is not None
    assert other.of_piece(Piece("", "xαx", "")) is None, "the table divides it otherwise"


def test_other_tokenizers_are_asked_themselves():
    for tokenizer in (made.sentencepiece_tokenizer(), made.sentencepiece_tokenizer(legacy=True)):
        assert WordTokens.of(tokenizer.backend_tokenizer) is None
    for pattern in (r"\p{Greek}+|(a)", r"(?<!a|bc)d", r"\P{L}"):
        assert WordTokens.of(backend(pattern)) is None
    dropping = backend(None)
    dropping.model.dropout = 0.5
    assert WordTokens.of(dropping) is None


def test_few_words_are_kept(monkeypatch):
    monkeypatch.setattr("engine.data.dividing.word_tokens._MOST_WORDS", 100)
    monkeypatch.setattr("engine.data.dividing.word_tokens._FEWEST_SLOTS", 4)
    tokenizer = backend(PATTERNS["Llama 3"])
    words = WordTokens.of(tokenizer)
    for number in range(40):
        text = " ".join(f"{number}{'é' * k}" for k in range(20))
        assert words.of_piece(Piece("", text, "")).tolist() == tokenizer.encode(text).ids
        assert len(words._known) <= 100
