"""Bodies of requests: what is read from them, and what is refused in a sentence."""

from __future__ import annotations

import pytest

from engine.tools.serve.answer_request import (
    MOST_CHOICES,
    MOST_ROWS,
    chat_request,
    completion_request,
)
from engine.tools.serve.request_fields import RequestFault

USER = {"role": "user", "content": "hi"}


def chat(**fields):
    return chat_request({"model": "Tiny", "messages": [USER], **fields})


def completion(**fields):
    return completion_request({"model": "Tiny", "prompt": "one", **fields})


def test_a_chat_has_what_openai_and_vllm_name():
    asked = chat(
        messages=[
            {"role": "developer", "content": "be short"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "refusal": None},
        ],
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        n=2,
        stop="END",
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=3,
        user="somebody",
        tools=[],
        response_format={"type": "text"},
        frequency_penalty=0.0,
    )
    assert asked.messages == [
        {"role": "system", "content": "be short"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": ""},
    ]
    assert (asked.max_tokens, asked.temperature, asked.top_p) == (7, 0.5, 0.9)
    assert (asked.top_k, asked.min_p, asked.seed) == (0, 0.1, 2**32 - 1)
    assert (asked.choices, asked.rows, asked.stops) == (2, 2, ("END",))
    assert asked.is_stream and asked.has_usage and asked.top_logprobs == 3


def test_what_is_left_out_is_as_openai_has_it():
    asked = chat()
    assert (asked.temperature, asked.top_p, asked.choices, asked.stops) == (1.0, 1.0, 1, ())
    assert asked.top_logprobs is None and not asked.is_stream
    assert len({chat().seed for _ in range(9)}) > 1
    assert completion().max_tokens == 16


@pytest.mark.parametrize(
    "prompt, expected",
    [("one", ["one"]), (["one", ""], ["one", ""]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_prompts_come_in_four_forms(prompt, expected):
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "fields, word",
    [
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "role"),
        ({"messages": [{"role": [], "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": 3}]}, "content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ({"tools": [{}]}, "tools"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"guided_json": {}}, "guided_json"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"min_p": 2}, "min_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": MOST_CHOICES + 1}, "n"),
        ({"n": 10**9}, "n"),
        ({"seed": "x"}, "seed"),
        ({"stop": ["a"] * 5}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": "x" * 10_000}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"top_logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_what_would_change_the_answer_or_is_wrong_is_refused(fields, word):
    with pytest.raises(RequestFault, match=word) as fault:
        chat(**fields)
    assert len(str(fault.value)) < 200 and str(fault.value).endswith(".")


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": None},
        {"prompt": []},
        {"prompt": [1, "one"]},
        {"prompt": [True]},
        {"prompt": [[]]},
        {"prompt": ["a"] * MOST_ROWS, "n": 2},
        {"echo": True},
        {"suffix": "x"},
        {"best_of": 3},
        {"logprobs": 21},
    ],
)
def test_a_completion_is_refused_likewise(fields):
    with pytest.raises(RequestFault):
        completion(**fields)


WRONG = [None, True, -1, 0.5, 10**400, 1e308, "", "x" * 9999, "\x00", [], [[]], [None], {}]
WRONG += [{"a": {}}, {"": None}, ["x"] * 500, [10**400], [{"role": []}]]
WRONG += [[{"role": "user", "content": [{"type": {}}]}]]
FIELDS = {"model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature"}
FIELDS |= {"top_p", "top_k", "min_p", "seed", "n", "stop", "stream", "stream_options", "logprobs"}
FIELDS |= {"top_logprobs", "tools", "logit_bias", "response_format", "best_of", "echo", "suffix"}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_whatever_a_field_holds_is_read_or_refused(name):
    for value in WRONG:
        for ask in (chat, completion):
            try:
                ask(**{name: value})
            except RequestFault as fault:
                assert 0 < len(str(fault)) < 300
