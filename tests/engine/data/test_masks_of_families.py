"""Invented conversations in the chat templates of 15 model families become the documents that a
slow reference says, token for token; and a turn that is not in them is told.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass

import pytest

from engine.data.formats.example import Conversation
from engine.data.tokens.encode import AcceptedExample, Encoder
from engine.data.tokens.rendered import Handling, RejectedExample
from tests.support.references import FAMILIES, INVENTED, tokenizer
from tests.support.references.drawn import drawn
from tests.support.references.expected import Expected, expected
from tests.support.references.token_marks import read_back, tokens

pytestmark = pytest.mark.computing

PLAIN = range(16)
ALL = range(16, 416)
_TOLD = re.compile(r"The chat template leaves out (?:a (\w+) turn, in its prompts too|the (tools))")
families = pytest.mark.parametrize("family", FAMILIES)
in_sets = pytest.mark.parametrize(
    "which",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(
            ALL,
            id="all",
            marks=pytest.mark.slow("it draws 6,800 conversations; a plain run has 272"),
        ),
    ],
)


@dataclass(frozen=True)
class Compared:
    """A conversation, what the engine made of it, and what it must become."""

    conversation: Conversation
    found: AcceptedExample | RejectedExample
    wanted: Expected


@functools.cache
def compared(family: str, which: range) -> tuple[list[Compared], Counter[str]]:
    """Returns drawn conversations, encoded, and how many turns of each role the warnings name."""
    chosen = FAMILIES[family]
    conversations = drawn(chosen, which.stop)[which.start :]
    encoder = Encoder(tokenizer(family), Handling(), 1_000_000)
    found = encoder.encode(list(conversations))
    reported: Counter[str] = Counter()
    for warning, times in encoder.renderer.take_warnings().items():
        match = _TOLD.match(warning)
        if match:
            reported[match[1] or match[2]] += times
    return [
        Compared(chat, got, expected(chosen, chat.messages, chat.tools, chat.untrained))
        for chat, got in zip(conversations, found)
    ], reported


@in_sets
@families
def test_ids_and_masks_of_every_document_equal_the_references(family, which):
    chosen, made = FAMILIES[family], tokenizer(family)
    rows, _ = compared(family, which)
    for row in rows:
        if isinstance(row.found, RejectedExample) or row.wanted.refused:
            why = row.found.reason if isinstance(row.found, RejectedExample) else "kept"
            assert row.wanted.refused and row.wanted.refused in why, (row.wanted, row.conversation)
            continue
        wanted = [tokens(chosen, made, parts, answers) for parts, answers in row.wanted.documents]
        found = [(one.ids.tolist(), one.loss_mask.tolist()) for one in row.found.documents]
        assert found == wanted, row.conversation
    kept = sum(isinstance(row.found, AcceptedExample) for row in rows)
    assert kept > len(rows) / 2


@in_sets
@families
def test_each_document_has_the_text_of_every_turn_or_the_warnings_name_its_role(family, which):
    chosen, made = FAMILIES[family], tokenizer(family)
    rows, found = compared(family, which)
    missing: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for row in rows:
        if isinstance(row.found, RejectedExample):
            continue
        wanted.update(row.wanted.lost)
        for document, (_, answers) in zip(row.found.documents, row.wanted.documents):
            text = bare(read_back(chosen, made, document.ids.tolist()))
            for message in row.conversation.messages[: max(answers)]:
                if message["role"] != "assistant" and bare(message["content"]) not in text:
                    missing[message["role"]] += 1
    # A turn that is left out may be found in another one, so not every loss is seen in the text.
    assert missing <= found
    assert found == wanted


def bare(text: str) -> str:
    """Returns a text without white space, as every tokenizer here gives it back."""
    return "".join(unicodedata.normalize("NFC", text).replace("▁", " ").split())


@pytest.mark.slow("it draws 6,200 conversations again, for 4 seconds")
def test_two_thousand_conversations_are_compared_in_fifteen_real_templates():
    real = [family for family in FAMILIES if family not in INVENTED]
    kept = 0
    for family in real:
        for chat in drawn(FAMILIES[family], ALL.stop):
            wanted = expected(FAMILIES[family], chat.messages, chat.tools, chat.untrained)
            kept += not wanted.refused
    assert len(real) == 15 and kept >= 2000
