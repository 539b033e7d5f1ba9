"""Conversations in 31 families' published templates are trained as TRL's training templates train
them: the same tokens behind the same text. What TRL does otherwise is listed here, with its reason.

The text before an answer is compared with plain transformers and the published template, since
TRL changes some templates: it keeps reasoning in earlier turns, which a server leaves out.
"""

from __future__ import annotations

import functools
from collections import Counter

import pytest
from jinja2.exceptions import TemplateError

from engine.data.formats.calls import read_tools
from engine.data.formats.turns import TurnSettings, conversation, read_turns
from engine.data.tokens.encode import AcceptedExample, Encoder
from engine.data.tokens.rendered import Handling, RejectedExample
from tests.support.references.trl_masks import COMMON, HARD, Asked, Message, of_trl
from tests.support.references.trl_pairs import PAIRS, as_published

FEW = ("qwen3_5_think", "deepseekv3", "smolvlm", "gptoss", "nemotron_3_nano")
"""A plain run has these families, in which most kinds of difference occur."""
GIVEN = "TRL trains what the published prompt gives, such as <think> or the assistant's header"
SPACE = "TRL trains the line end behind the end of a turn, which no model has to write"
LACKS = "the published prompt lacks the header behind a tool's result, so a model has to write it"
STOPS = "TRL leaves out the token that ends a call and begins the tool's turn"
DROPS = "TRL drops the reasoning of every answer, though the published prompt begins it"
NEMOTRON = (*("nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),)
QWEN = ("qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8")
DIFFERENCES = {
    GIVEN: {
        *("deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer", "qwen2_5"),
        *(*NEMOTRON, *QWEN),
    },
    SPACE: {
        *("diffusion_gemma", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "qwen2_5"),
        *("qwen2_5_vl", "qwen3", "qwen3_instruct_2507", "qwen3_vl", "smolvlm", *NEMOTRON, *QWEN),
    },
    LACKS: {"diffusion_gemma"},
    STOPS: {"diffusion_gemma"},
    DROPS: {"deepseekv3"},
}
"""What TRL does otherwise, and the families in which it does so."""

KEYLESS = {
    *("cohere", "cohere2", "gemma", "gemma3", "idefics3", "lfm2", "lfm2_v2", "llama3"),
    *("llava_next", "phi3", "phi3_5", "qwen2_5", "qwen2_5_vl", "qwen3_instruct_2507"),
    *("qwen3_vl", "smolvlm"),
}
"""These templates leave reasoning_content out: TRL trains the answer without it, we refuse it."""
CALLESS = KEYLESS - {"lfm2_v2", "qwen2_5", "qwen3_instruct_2507", "qwen3_vl"}
"""These refuse calls or leave them out."""
SYSTEMLESS = {"gemma"}
ALONE = {
    # One call has no end in this template; text beside calls, or calls behind it, are left out.
    "deepseek_r1_distill": {
        *("call", "text and call", "nested arguments", "no arguments", "calls in turn"),
        "reasoning before a call",
    },
    "deepseekv3": {"calls in turn"},  # calls behind a result have no header, where the prompt has
    # It writes one call of several; it refuses reasoning and text before a call.
    "gptoss": {"several calls", "reasoning before a call"},
    "muse_glimmer": {"text and call", "reasoning before a call"},  # it leaves text before calls out
}
"""These conversations are refused besides."""

families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(
            family,
            marks=[]
            if family in FEW
            else pytest.mark.slow("31 families take half a minute; a plain run has five"),
        )
        for family in PAIRS
    ],
)


@families
def test_all_conversations_are_trained_as_by_trl_but_for_the_differences_that_are_listed(family):
    rows = COMMON | HARD
    found = {name: told(family, name) for name in rows}
    refused = {name for name, (why, _) in found.items() if why}
    assert refused == {name for name in rows if is_refused(family, name)}
    used = sum((each for _, each in found.values()), Counter())
    assert {why for why in DIFFERENCES if used[why]} == {
        why for why, names in DIFFERENCES.items() if family in names
    }


def test_there_are_341_conversations_of_each_kind():
    assert len(PAIRS) * len(COMMON) == len(PAIRS) * len(HARD) == 341
    assert not COMMON.keys() & HARD.keys()


def is_refused(family: str, name: str) -> bool:
    """Returns whether a conversation has what a family's template cannot write."""
    messages, _ = (COMMON | HARD)[name]
    has = {key for message in messages for key in message} | {
        message["role"] for message in messages
    }
    return (
        ("reasoning_content" in has and family in KEYLESS)
        or ("tool_calls" in has and family in CALLESS)
        or ("system" in has and family in SYSTEMLESS)
        or name in ALONE.get(family, ())
    )


@functools.cache
def told(family: str, name: str) -> tuple[str, Counter[str]]:
    """Returns why a conversation is refused, or nothing, and how often each difference occurs in
    it. Raises AssertionError for any other difference.
    """
    messages, tools = (COMMON | HARD)[name]
    tokenizer = as_published(family)
    (found,) = encoder_of(family).encode(
        [
            conversation(
                read_turns(messages, "messages", TurnSettings()), 0, read_tools(tools, "tools")
            )
        ]
    )
    places = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
    ]
    if isinstance(found, RejectedExample):
        assert is_lost(family, messages, tools, places), found
        return f"{found.reason}: {found.detail}", Counter()
    used: Counter[str] = Counter()
    answers = list(runs(found))
    assert len(answers) == len(places)
    for place, (before, loss_mask) in zip(places, answers):
        wanted = of_trl(family, messages, tools, place)
        used.update(compared(family, tokenizer, messages[place], before, loss_mask, wanted))
    return "", used


@functools.cache
def encoder_of(family: str) -> Encoder:
    return Encoder(as_published(family), Handling(), 100_000)


def runs(found: AcceptedExample):
    """Yields the tokens before each answer, and those of the answer."""
    for document in found.documents:
        ids, loss_mask = document.ids.tolist(), document.loss_mask.tolist()
        begin = 0
        for place in range(len(ids)):
            if loss_mask[place] and not loss_mask[place - 1]:
                begin = place
            if loss_mask[place] and not any(loss_mask[place + 1 : place + 2]):
                yield ids[:begin], ids[begin : place + 1]


def compared(family, tokenizer, answer: Message, before, loss_mask, wanted: Asked) -> Counter[str]:
    """Returns the differences between an answer and that of TRL, each of which is checked."""
    used: Counter[str] = Counter()
    theirs = wanted.loss_mask[wanted.given :]
    used[GIVEN] += wanted.given > 0
    text = tokenizer.decode(before + loss_mask)
    reasoning = answer.get("reasoning_content", "")
    if answer["content"] and answer["content"].startswith("<think>"):
        reasoning = answer["content"].removeprefix("<think>\n").partition("\n</think>")[0]
    if reasoning and family.startswith("deepseek"):
        # The published template leaves reasoning out that its prompt begins.
        prompt = tokenizer.decode(wanted.prompt).removesuffix("<think>\n")
        published = tokenizer.decode(wanted.published)
        assert published.startswith(prompt)
        shown = published[len(prompt) :].removeprefix("\n\n")
        assert text == f"{prompt}<think>\n{reasoning}\n</think>\n\n{shown}"
        if f"{reasoning}\n</think>" not in wanted.text:
            used[DROPS] += 1
            return used
    else:
        # An answer that its template leaves open ends with the first token of the next turn.
        whole = [*wanted.published, wanted.next]
        assert before + loss_mask in (whole, wanted.published[: len(before) + len(loss_mask)]), text
    if loss_mask != theirs and tokenizer.decode(theirs).endswith(
        tokenizer.decode(loss_mask[-1:]) + "\n"
    ):
        used[SPACE] += 1
        theirs = without_space(tokenizer, theirs)
    stop = tokenizer.convert_tokens_to_ids("<|tool_response>")
    if answer.get("tool_calls") and loss_mask[-1] == stop and loss_mask[-2] == theirs[-1]:
        used[STOPS] += 1
        theirs = [*theirs, stop]
    if before == wanted.prompt and loss_mask != theirs and loss_mask[-len(theirs) :] == theirs:
        used[LACKS] += 1
        theirs = loss_mask
    assert loss_mask == theirs, (tokenizer.decode(loss_mask), tokenizer.decode(theirs))
    return used


def without_space(tokenizer, ids):
    while tokenizer.decode(ids[-1:]).isspace():
        ids = ids[:-1]
    return ids


def is_lost(family, messages, tools, places) -> bool:
    """Returns whether TRL's template refuses a conversation, or leaves out part of an answer."""
    for place in places:
        answer = messages[place]
        try:
            wanted = of_trl(family, messages, tools, place)
        except TemplateError:
            return True
        shown = [answer["content"], answer.get("reasoning_content", "")]
        for call in answer.get("tool_calls", ()):
            shown += [call["function"]["name"], *call["function"]["arguments"]]
        tokenizer = as_published(family)
        text = tokenizer.decode(wanted.loss_mask)
        if not all(each in text for each in shown):
            return True
        if not text.rstrip().endswith(tuple(tokenizer.all_special_tokens)):
            return True  # it has no end, so a model would not learn to stop
    return False
