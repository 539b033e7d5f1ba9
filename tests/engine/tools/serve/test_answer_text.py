"""The text of an answer as it grows: whole characters, and no part of a stop text."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from engine.tools.serve.answer_text import AnswerText, GrowingText
from engine.tools.serve.answers import Answer
from engine.tools.serve.token_texts import TokenTexts, _byte_of_letter


@pytest.fixture(scope="module")
def bytewise():
    """A tokenizer with one token for each byte, and one that is special."""
    tokenizer = Tokenizer(models.BPE(dict(_byte_of_letter()), []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"eos_token": "<end>"})
    return fast


def drawn(token, finish=None):
    return SimpleNamespace(token=token, logprob=-0.5, top=((token, -0.5),), finish=finish)


def test_characters_come_whole_and_add_up_to_the_text(bytewise):
    random.seed(1)
    letters = ["a", "ß", "€", "語", "🙂", " ", "\n", "e\u0301"]
    text = "".join(random.choices(letters, k=300))
    growing = GrowingText(bytewise)
    pieces = [growing.add(byte) for byte in text.encode()]
    assert "".join(pieces) + growing.rest() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_are_no_text_hold_nothing_back_for_ever(bytewise):
    growing = GrowingText(bytewise)
    shown = [growing.add(0xFF) for _ in range(50)]
    assert any(shown) and [growing.add(byte) for byte in b"abc"][-1].endswith("c")


def test_an_incomplete_last_character_is_left_out(bytewise):
    answer = Answer(bytewise, [])
    gains = [answer.take(drawn(byte)) for byte in "a€".encode()[:-1]]
    gains.append(answer.take(drawn(bytewise.eos_token_id, "stop")))
    assert "".join(gain.text for gain in gains) == "a"
    assert gains[-1].finish == "stop" and answer.count == 3


@pytest.mark.parametrize(
    "text, stops, expected, finish",
    [
        ("one STOP two", ["STOP"], "one ", "stop"),
        ("one STO two", ["STOP"], "one STO two", "length"),
        ("aaab", ["aab"], "a", "stop"),
        ("abcabd", ["abd", "zzz"], "abc", "stop"),
        ("x語y", ["語"], "x", "stop"),
        ("tail ST", ["STOP"], "tail ST", "length"),
        ("b a", ["a", "b"], "", "stop"),
    ],
)
def test_an_answer_ends_before_its_first_stop_text(bytewise, text, stops, expected, finish):
    answer, shown = Answer(bytewise, stops), ""
    content = text.encode()
    for place, byte in enumerate(content):
        is_last = place == len(content) - 1
        gain = answer.take(drawn(byte, "length" if is_last else None))
        shown += gain.text
        assert expected.startswith(shown), "text was shown that may become a stop text"
        if gain.finish is not None:
            break
    assert (shown, gain.finish) == (expected, finish)


def test_tokens_go_with_the_text_in_which_they_begin(bytewise):
    answer = Answer(bytewise, ["STOP"])
    gains = []
    for byte in "é STOP".encode():
        gains.append(answer.take(drawn(byte)))
        if gains[-1].finish:
            break
    assert "".join(gain.text for gain in gains) == "é "
    tokens = [token.token for gain in gains for token in gain.tokens]
    assert bytes(tokens) == "é ".encode()
    assert [start for gain in gains for start in gain.starts] == [0, 0, 1]


def test_text_without_stops_is_held_for_no_token(bytewise):
    text = AnswerText(bytewise, [])
    assert [text.add(byte).text for byte in b"abc"] == ["a", "b", "c"]


def test_tokens_have_their_bytes(bytewise):
    texts = TokenTexts(bytewise)
    assert texts.bytes_of(ord("a")) == [97]
    assert texts.bytes_of("€".encode()[0]) == ["€".encode()[0]]
    assert texts.text(bytewise.eos_token_id) == "<end>"
    spelled = SimpleNamespace(
        decode=lambda ids, **_: "\ufffd", convert_ids_to_tokens=lambda token: "<0xE2>"
    )
    assert TokenTexts(spelled).bytes_of(1) == [0xE2]
