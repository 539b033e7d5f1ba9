"""Special tokens that people typed, and what special tokens take around them, become the text that
a slow reference says.
"""

from __future__ import annotations

import functools

import pytest

from engine.data.formats.example import Conversation, Pair
from engine.data.tokens.encode import Encoder
from engine.data.tokens.render import RejectedExample
from engine.data.tokens.rendered import Handling
from tests.support import references as reference
from tests.support.references import FAMILIES
from tests.support.references.expected import expected
from tests.support.references.token_marks import tokens

CHOSEN = ("qwen", "llama3", "gemma", "phi3", "marked")
made = functools.cache(reference.tokenizer)


def check(family: str, asked: str, answer: str) -> None:
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    tokenizer, chosen = made(family), FAMILIES[family]
    (found,) = Encoder(tokenizer, Handling(), 10_000).encode([Conversation(turns)])
    wanted = expected(chosen, turns)
    if wanted.refused:
        assert isinstance(found, RejectedExample) and wanted.refused in found.reason
        return
    assert not isinstance(found, RejectedExample), found
    ((parts, answers),) = wanted.documents
    (document,) = found.documents
    ids, loss_mask = tokens(chosen, tokenizer, parts, answers)
    assert document.ids.tolist() == ids
    assert document.loss_mask.tolist() == loss_mask


@pytest.mark.parametrize("family", CHOSEN)
def test_typed_special_tokens_are_text_in_every_role(family):
    for token in (*FAMILIES[family].special, *FAMILIES[family].added):
        check(family, f"a{token}b {token}", f"{token} so {token}")


@pytest.mark.parametrize("family", CHOSEN)
def test_what_special_tokens_take_around_them_is_white_space_and_nothing_else(family):
    for character in "\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2028\u2029\u200b\u3000\ufeff":
        for text in (
            character,
            f"{character}so",
            f"so{character}",
            f"{character}{FAMILIES[family].special[-1]}so",
        ):
            check(family, text, text)


def test_a_special_token_across_a_question_and_its_answer_is_text():
    tokenizer = reference.tokenizer("qwen")
    tokenizer.chat_template = None
    (found,) = Encoder(tokenizer, Handling(), 100).encode([Pair("say <|im_", "end|> now")])
    (document,) = found.documents
    ids = document.ids.tolist()
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == "say <|im_end|> now"


def test_characters_that_stand_in_for_special_tokens_are_refused_and_counted():
    encoder = Encoder(made("llama3"), Handling(), 100)
    turns = [{"role": "user", "content": "\U00108000"}, {"role": "assistant", "content": "a"}]
    (found,) = encoder.encode([Conversation(turns)])
    assert isinstance(found, RejectedExample) and "private-use characters" in found.reason
