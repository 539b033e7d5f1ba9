"""Invented conversations are rendered by the templates of real model families: the masks equal
those of a slow reference, and special tokens that a user typed are plain text.
"""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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
examples = settings(
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

# The engine uses private-use characters of plane 16 itself; the last test covers them.
characters = st.text(
    st.characters(exclude_categories=("Cs",), max_codepoint=0x10_7FFF), max_size=12
)
fragments = st.sampled_from(
    [
        "hello",
        " hello",
        " ",
        "\n",
        "\n\n",
        "   ",
        "\t",
        "<|im_",
        "end|>",
        "<",
        "|>",
        "▁",
        "e\u0301",
        "\u0301",
        "日本",
        "👩‍👩‍👧",
        "\u200b",
        "\ufeff",
        "\x00",
        "<think>",
        "</tool_call>",
        "<0x0A>",
        "\x1c",
        "\x85",
        "[INST]",
        '"',
        "\\",
        "{{ 1 }}",
        "{% raw %}",
    ]
)


def words(family: str) -> st.SearchStrategy[str]:
    typed = st.sampled_from((*FAMILIES[family].special, *FAMILIES[family].added))
    short = st.lists(st.one_of(characters, fragments, typed), max_size=6).map("".join)
    long = st.tuples(short, st.integers(100, 1500)).map(lambda pair: (pair[0] * pair[1])[:3_000])
    return st.one_of(short, short, short, short, short, long)


def conversations(family: str) -> st.SearchStrategy[list[dict]]:
    roles = st.one_of(
        st.lists(st.sampled_from(["user", "assistant", "system", "tool"]), min_size=1, max_size=7),
        st.integers(1, 4).map(lambda turns: ["user", "assistant"] * turns),
    )
    return roles.flatmap(
        lambda names: st.tuples(*(words(family) for _ in names)).map(
            lambda texts: [{"role": role, "content": text} for role, text in zip(names, texts)]
        )
    )


def check(family: str, conversation: Conversation, max_seq_len: int) -> None:
    tokenizer, chosen = made(family), FAMILIES[family]
    (found,) = Encoder(tokenizer, Handling(), max_seq_len).encode([conversation])
    wanted = expected(chosen, conversation.messages, conversation.tools)
    if wanted.refused:
        assert isinstance(found, RejectedExample) and wanted.refused in found.reason
        return
    ((parts, answers),) = wanted.documents
    ids, loss_mask = tokens(chosen, tokenizer, parts, answers)
    if not any(loss_mask[:max_seq_len]):
        assert isinstance(found, RejectedExample)
        return
    assert not isinstance(found, RejectedExample), found
    (document,) = found.documents
    assert document.ids.tolist() == ids[:max_seq_len]
    assert document.loss_mask.tolist() == loss_mask[:max_seq_len]
    assert document.length == len(ids)
    special = set(tokenizer.convert_tokens_to_ids(list(FAMILIES[family].special)))
    written = [
        tokenizer.convert_tokens_to_ids(part.text)
        for part in parts
        if part.written and part.text in FAMILIES[family].special
    ]
    parsed = [i for i in document.ids.tolist() if i in special]
    assert parsed == written[: len(parsed)]


@pytest.mark.parametrize("family", CHOSEN)
def test_the_mask_of_any_conversation_equals_the_references(family):
    @examples
    @given(conversations(family), st.sampled_from([64, 100_000]))
    def run(messages, max_seq_len):
        check(family, Conversation(messages), max_seq_len)

    run()


@pytest.mark.parametrize("family", CHOSEN)
def test_typed_special_tokens_are_text_in_every_role(family):
    for token in (*FAMILIES[family].special, *FAMILIES[family].added):
        check(
            family,
            Conversation(
                [
                    {"role": "user", "content": f"a{token}b {token}"},
                    {"role": "assistant", "content": f"{token} so {token}"},
                ]
            ),
            10_000,
        )


@pytest.mark.parametrize("family", CHOSEN)
def test_what_special_tokens_take_around_them_is_white_space_and_nothing_else(family):
    for character in "\t\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u180e\u2028\u2029\u200b\u3000\ufeff":
        for text in (
            character,
            f"{character}so",
            f"so{character}",
            f"{character}{FAMILIES[family].special[-1]}so",
        ):
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": text}]
            check(family, Conversation(turns), 10_000)


names = st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=8)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), words("qwen")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(words("qwen"), inner, max_size=3)
    ),
    max_leaves=6,
)
calls = st.lists(
    st.builds(
        lambda name, arguments: {
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        names,
        st.dictionaries(names, values, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
tool_lists = st.one_of(
    st.none(),
    st.lists(
        st.builds(
            lambda name, text: {
                "type": "function",
                "function": {
                    "name": name,
                    "description": text,
                    "parameters": {"type": "object", "properties": {}},
                },
            },
            names,
            words("qwen"),
        ),
        min_size=1,
        max_size=3,
    ),
)


@pytest.mark.slow("it sweeps over many cases")
@settings(examples, max_examples=40)
@given(
    tool_lists,
    st.lists(st.tuples(words("qwen"), calls, words("qwen"), words("qwen")), min_size=1, max_size=3),
)
def test_tool_calls_are_trained_and_tools_and_their_answers_are_not(tools, turns):
    messages = []
    for asked, called, told, answered in turns:
        messages += [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "", "tool_calls": called},
            {"role": "tool", "content": told},
            {"role": "assistant", "content": answered},
        ]
    check("qwen", Conversation(messages, tools=tools), 100_000)


def test_a_special_token_across_a_question_and_its_answer_is_text():
    tokenizer = reference.tokenizer("qwen")
    tokenizer.chat_template = None
    (found,) = Encoder(tokenizer, Handling(), 100).encode([Pair("say <|im_", "end|> now")])
    (document,) = found.documents
    ids = document.ids.tolist()
    assert (
        ids.count(tokenizer.convert_tokens_to_ids("<|im_end|>")) == 1
        and ids[-1] == tokenizer.eos_token_id
    )
    assert tokenizer.decode(ids[:-1]) == "say <|im_end|> now"


def test_characters_that_stand_in_for_special_tokens_are_refused_and_counted():
    encoder = Encoder(made("llama3"), Handling(), 100)
    turns = [{"role": "user", "content": "\U00108000"}, {"role": "assistant", "content": "a"}]
    (found,) = encoder.encode([Conversation(turns)])
    assert isinstance(found, RejectedExample) and "private-use characters" in found.reason
