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

from engine.data.encode import Encoder, Kept
from engine.data.rendered import Handling, Skipped
from engine.examples.calls import read_tools
from engine.examples.turns import any_turn, conversation, read_turns
from tests.support.references.trl_masks import COMMON, HARD, Asked, Message, Row, of_trl
from tests.support.references.trl_pairs import PAIRS, as_published

FEW = ("qwen3_5_think", "deepseekv3", "smolvlm", "gptoss", "nemotron_3_nano")
"""A plain run has these families, where each kind of difference occurs."""

GIVEN = "TRL trains what the published prompt gives, such as <think> or the assistant's header"
SPACE = "TRL trains the white space behind the end of an answer, which no model has to write"
LACKS = "the published prompt lacks the header behind a tool's result: a model has to write it"
STOPS = "TRL leaves out the token that ends a call and begins the tool's turn"
KEEPS = "TRL drops reasoning that the published prompt begins, so that <think> is never closed"
DROPPED = "TRL trains the answer without what its template leaves out of it: the row is refused"
NEXT = "TRL trains the first token of the next turn, which ends an answer"

_GENERATED = ("deepseek_r1_distill", "deepseekv3", "gptoss", "muse_glimmer")


@functools.cache
def told(family: str, name: str) -> tuple[str, Counter[str]]:
    """Returns why a conversation is refused, or nothing, and how often each difference occurs in
    it. Raises AssertionError for any other difference.
    """
    messages, tools = (COMMON | HARD)[name]
    tokenizer = as_published(family)
    encoder = Encoder(tokenizer, Handling(), 100_000)
    (found,) = encoder.encode(
        [conversation(read_turns(messages, any_turn, ""), 0, read_tools(tools, ""))]
    )
    places = [
        place
        for place, message in enumerate(messages)
        if message["role"] == "assistant" and (message["content"] or message.get("tool_calls"))
    ]
    if isinstance(found, Skipped):
        assert is_lost(family, messages, tools, places), found
        return f"{found.reason}: {found.detail}", Counter()
    used: Counter[str] = Counter()
    answers = list(runs(found))
    assert len(answers) == len(places)
    for place, (before, trained) in zip(places, answers):
        wanted = of_trl(family, messages, tools, place)
        used.update(compared(family, tokenizer, messages[place], before, trained, wanted))
    return "", used


def runs(found: Kept):
    """Yields the tokens before each answer, and those of the answer."""
    for document in found.documents:
        ids, trained = document.ids.tolist(), document.trained.tolist()
        begin = 0
        for place in range(len(ids)):
            if trained[place] and not trained[place - 1]:
                begin = place
            if trained[place] and not any(trained[place + 1 : place + 2]):
                yield ids[:begin], ids[begin : place + 1]


def compared(family, tokenizer, answer: Message, before, trained, wanted: Asked) -> Counter[str]:
    """Returns the differences between an answer and that of TRL, each of which is checked."""
    used: Counter[str] = Counter()
    theirs = wanted.trained[wanted.given :]
    used[GIVEN] += wanted.given > 0
    text = tokenizer.decode(before + trained)
    reasoning = answer.get("reasoning_content", "")
    if answer["content"] and answer["content"].startswith("<think>"):
        reasoning = answer["content"].removeprefix("<think>\n").partition("\n</think>")[0]
    if reasoning and family.startswith("deepseek"):
        # The published template leaves reasoning out that its prompt begins.
        prompt = tokenizer.decode(wanted.prompt).removesuffix("<think>\n")
        published = tokenizer.decode(wanted.published)
        assert published.startswith(prompt)
        said = published[len(prompt) :].removeprefix("\n\n")
        assert text == f"{prompt}<think>\n{reasoning}\n</think>\n\n{said}"
        if f"{reasoning}\n</think>" not in wanted.text:
            used[KEEPS] += 1
            return used
    else:
        whole = tokenizer.decode(wanted.published)
        assert whole.startswith(text), (whole, text)
        assert before + trained == wanted.published[: len(before + trained)]
    if trained != theirs and tokenizer.decode(theirs).endswith(
        tokenizer.decode(trained[-1:]) + "\n"
    ):
        used[SPACE] += 1
        theirs = without_space(tokenizer, theirs)
    stop = tokenizer.convert_tokens_to_ids("<|tool_response>")
    if answer.get("tool_calls") and trained[-1] == stop and trained[-2] == theirs[-1]:
        used[STOPS] += 1
        theirs = [*theirs, stop]
    if before == wanted.prompt and trained != theirs and trained[-len(theirs) :] == theirs:
        used[LACKS] += 1
        theirs = trained
    assert trained == theirs, (tokenizer.decode(trained), tokenizer.decode(theirs))
    return used


def without_space(tokenizer, ids):
    while tokenizer.decode(ids[-1:]).isspace():
        ids = ids[:-1]
    return ids


def is_lost(family, messages, tools, places) -> bool:
    """Returns whether TRL's template refuses a conversation too, or leaves part of an answer out."""
    for place in places:
        answer = messages[place]
        try:
            wanted = of_trl(family, messages, tools, place)
        except TemplateError:
            return True
        said = [answer["content"], answer.get("reasoning_content", "")]
        for call in answer.get("tool_calls", ()):
            said += [call["function"]["name"], *call["function"]["arguments"]]
        text = as_published(family).decode(wanted.trained)
        if not all(each in text for each in said):
            return True
    return False


if __name__ == "__main__":
    import sys, traceback, collections

    by = collections.defaultdict(collections.Counter)
    ref = collections.defaultdict(list)
    n = 0
    for family in sys.argv[1].split(",") if len(sys.argv) > 1 else PAIRS:
        for name in COMMON | HARD:
            try:
                why, used = told(family, name)
                n += 1
                by[family].update(used)
                if why:
                    ref[family].append((name, why))
            except Exception as e:
                print("!!", family, name, type(e).__name__, str(e)[:700])
    names = {v: k for k, v in globals().items() if isinstance(v, str) and k.isupper()}
    for f in by:
        print(f, {names[k]: v for k, v in by[f].items() if v}, "REFUSED:", ref[f])
    print(n)
