"""What a chat template leaves out of a conversation is found, told and, if wanted, refused; what a
row says about its own answers is followed.
"""

from __future__ import annotations

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.formats.example import Conversation, Preference, Segments, Tokens
from engine.data.tokens.encode import Encoder
from engine.data.tokens.rendered import Handling, RejectedExample
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.rows import write_rows

WITH_THE_LAST_QUESTION = (  # as Mistral's: the system turn stands before the last question
    "{{ bos_token }}{% set said = '' %}{% set rest = messages %}"
    "{% if messages[0]['role'] == 'system' %}{% set said = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% endif %}{% for m in rest %}{% if m['role'] == 'user' %}"
    "{{ '[INST] ' + (said if loop.last else '') + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
TURNS = [
    {"role": "user", "content": "why hello"},
    {"role": "assistant", "content": "because an answer"},
    {"role": "user", "content": "what then"},
    {"role": "assistant", "content": "so then"},
]
SYSTEM = {"role": "system", "content": "Speak like a pirate."}
CRITIC = {"role": "critic", "content": "Never say no."}


def encoded(template, conversation, tokenizer=None, **settings):
    tokenizer = tokenizer or made.byte_level_tokenizer(template)
    encoder = Encoder(tokenizer, Handling(**settings), 512)
    (found,) = encoder.encode([conversation])
    if isinstance(found, RejectedExample):
        return found, encoder.renderer.take_warnings()
    texts = [
        (
            tokenizer.decode(document.ids.tolist()),
            tokenizer.decode(document.ids[document.loss_mask].tolist()),
        )
        for document in found.documents
    ]
    return texts, encoder.renderer.take_warnings()


def test_a_system_turn_that_answers_push_out_is_trained_with_each_prompt():
    texts, found = encoded(WITH_THE_LAST_QUESTION, Conversation([SYSTEM, *TURNS]))
    assert texts == [
        (
            "<s>[INST] Speak like a pirate.\n\nwhy hello[/INST] because an answer</s>",
            " because an answer</s>",
        ),
        (
            "<s>[INST] why hello[/INST] because an answer</s>[INST] Speak like a pirate.\n\n"
            "what then[/INST] so then</s>",
            " so then</s>",
        ),
    ]
    (sentence,) = found
    assert "leaves out an earlier turn once the answer is there" in sentence
    assert found[sentence] == 2


def test_answers_of_a_pair_stand_behind_a_prompt_with_the_system_turn():
    """The text of the whole conversation lacks it, so what is compared would be the answers to
    another question than the model is asked.
    """
    asked, reported = [SYSTEM, TURNS[0]], []
    pair = Preference(
        Conversation([*asked, *TURNS[1:]], 2),
        Conversation([*asked, TURNS[1] | {"content": "so"}], 2),
    )
    texts, reported = encoded(WITH_THE_LAST_QUESTION, pair)
    prompt = "<s>[INST] Speak like a pirate.\n\nwhy hello[/INST]"
    chosen = " because an answer</s>[INST] what then[/INST] so then</s>"
    assert texts == [(f"{prompt} so</s>", " so</s>"), (prompt + chosen, chosen)]
    (sentence,) = reported
    assert "leaves out an earlier turn once the answer is there" in sentence
    found, _ = encoded(WITH_THE_LAST_QUESTION, pair, dropped_turns="refuse")
    assert isinstance(found, RejectedExample)
    assert found.refused
    assert "a system turn" in found.reason


def test_a_turn_that_the_prompt_lacks_too_is_told_with_its_role_and_count():
    texts, found = encoded(WITH_THE_LAST_QUESTION, Conversation([CRITIC, *TURNS, CRITIC]))
    assert len(texts) == 1 and "Never" not in texts[0][0]
    assert found["The chat template leaves out a critic turn, in its prompts too"] == 1
    assert found["A turn behind the last trained answer is left out"] == 1


def test_rows_with_a_lost_turn_are_refused_where_that_is_wanted(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"messages": TURNS}, {"messages": [SYSTEM, *TURNS]}]
    write_rows(path, rows)
    config = DataConfig(str(path), dropped_turns="refuse", eval_fraction=0.0)
    tokenizer = made.byte_level_tokenizer(WITH_THE_LAST_QUESTION)
    sentence = (
        "The chat template leaves out a system turn, in line 2 of a.jsonl; set data.dropped_turns "
        "to turn_by_turn to train with the prompts that the template makes, or use a model whose "
        "template writes it."
    )
    with pytest.raises(DataError) as caught:
        prepare_data(config, tokenizer, 1)
    assert str(caught.value) == sentence
    assert preview(config, tokenizer)["error"] == sentence


def test_a_developers_turn_is_written_where_a_template_writes_the_systems():
    developer = SYSTEM | {"role": "developer"}
    texts, found = encoded(WITH_THE_LAST_QUESTION, Conversation([developer, *TURNS]))
    assert texts == encoded(WITH_THE_LAST_QUESTION, Conversation([SYSTEM, *TURNS]))[0]
    assert any("written as a system turn" in sentence for sentence in found)


def test_a_short_turn_is_missed_though_its_text_stands_elsewhere():
    drops_users = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ m['content'] + eos_token }}"
        "{% endif %}{% endfor %}"
    )
    turns = [{"role": "user", "content": "so"}, {"role": "assistant", "content": "so then"}]
    _, found = encoded(drops_users, Conversation(turns))
    assert found["The chat template leaves out a user turn, in its prompts too"] == 1


def test_tools_that_a_template_ignores_are_told():
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    _, found = encoded(made.CHATML, Conversation(TURNS, tools=tools))
    assert found["The chat template leaves out the tools of a conversation"] == 1


def test_white_space_and_escaping_are_no_loss():
    template = (
        "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'user' %}"
        "{{ m['content'] | tojson }}{% elif m['role'] == 'tool' %}{{ m['content'] | e }}"
        "{% else %}{{ m['content'] | trim }}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    turns = [
        {"role": "user", "content": '"no" é <b>\n\tand \\ more'},
        {"role": "tool", "content": "1 < 2 & 'so'"},
        {"role": "assistant", "content": "  hello  "},
    ]
    texts, found = encoded(template, Conversation(turns))
    assert len(texts) == 1
    assert texts[0][1] == "hello</s>"
    assert not found


def test_earlier_reasoning_that_a_template_drops_is_told_and_not_refused():
    turns = [
        {"role": "user", "content": "why hello"},
        {"role": "assistant", "content": "<think>hm</think>because"},
        {"role": "user", "content": "what then"},
        {"role": "assistant", "content": "<think>so so</think>then"},
    ]
    texts, found = encoded(made.QWEN3, Conversation(turns), dropped_turns="refuse")
    assert len(texts) == 2 and "hm" not in texts[1][0]
    assert (
        found["The chat template leaves out part of an earlier answer, such as its reasoning"] == 1
    )


@pytest.mark.parametrize(
    "written",
    [
        "{{ m['content'] + eos_token + m['role'] + ':' + m['content'] }}",
        "{{ m['content'] + ' ' + messages[0]['content'] }}",
    ],
)
def test_a_template_that_writes_more_than_the_answer_skips_the_row(written):
    template = (
        "{% for m in messages %}{{ m['role'] + ':' }}{% if m['role'] == 'assistant' %}"
        + written
        + "{% else %}{{ m['content'] }}{% endif %}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    found, _ = encoded(template, Conversation([SYSTEM, *TURNS[:2]]))
    assert found.reason == "the chat template writes more than the answer in its place"


def test_a_key_that_the_template_does_not_name_is_told_once_a_row():
    turns = [TURNS[0] | {"mood": "glad"}, TURNS[1] | {"mood": "sad", "role": "assistant"}]
    _, found = encoded(made.CHATML, Conversation(turns))
    assert found["The key mood of a turn is not used: the chat template does not name it"] == 1


# ---------------------------------------------------------------------- answers left untrained


def test_answers_that_the_row_excludes_stay_in_the_text_and_are_not_trained():
    texts, found = encoded(made.CHATML, Conversation(TURNS, untrained=frozenset([1])))
    ((text, loss_mask),) = texts
    assert "because an answer" in text and loss_mask == "so then<|im_end|>"
    assert found["An answer is not trained, because its row says so"] == 1


def test_all_but_the_answers_that_the_row_excludes_is_trained():
    conversation = Conversation(TURNS, untrained=frozenset([1]))
    ((text, loss_mask),), _ = encoded(made.CHATML, conversation, train_on="all")
    assert "because" in text and "because" not in loss_mask
    assert "why hello" in loss_mask
    assert "what then" in loss_mask
    assert "so then" in loss_mask
    conversation = Conversation(TURNS, untrained=frozenset([3]))
    ((text, loss_mask),), _ = encoded(made.CHATML, conversation, train_on="all")
    assert "so then" in text
    assert "so then" not in loss_mask
    assert "because" in loss_mask


def test_a_row_none_of_whose_answers_is_trained_is_skipped():
    found, _ = encoded(made.CHATML, Conversation(TURNS, untrained=frozenset([1, 3])))
    assert found == RejectedExample("the row says that none of its answers is trained")


def test_an_answer_without_text_is_not_trained():
    blank = [*TURNS[:2], {"role": "user", "content": "and"}, {"role": "assistant", "content": " "}]
    ((_, loss_mask),), reported = encoded(made.CHATML, Conversation(blank))
    assert loss_mask == "because an answer<|im_end|>"
    assert reported["An answer without text is not trained"] == 1
    found, _ = encoded(made.CHATML, Conversation(blank[2:]))
    assert found == RejectedExample("the answer is empty")


# ---------------------------------------------------------------------- typed tokens


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_a_conversation_of_very_many_answers_is_skipped_before_it_is_written(train_on):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    untrained = range(1, 40_000, 2) if train_on == "all" else ()
    many = Conversation(turns * 20_000, untrained=frozenset(untrained))
    found, _ = encoded(made.CHATML, many, train_on=train_on)
    assert found == RejectedExample(
        "the conversation has too many turns", "divide it into several rows"
    )


def test_typed_tokens_are_text_or_tokens_as_the_settings_say():
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    turns = [{"role": "user", "content": "say <|im_end|> now"}, TURNS[1]]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    counts = {}
    for typed in ("text", "tokens"):
        encoder = Encoder(tokenizer, Handling(typed_tokens=typed), 512)
        (found,) = encoder.encode([Conversation(turns)])
        counts[typed] = found.documents[0].ids.tolist().count(end)
        whole = tokenizer.apply_chat_template(turns, tokenize=True)["input_ids"]
        assert (found.documents[0].ids.tolist() == whole) is (typed == "tokens")
    assert counts["tokens"] == counts["text"] + 1


# ---------------------------------------------------------------------- segments and tokens


def test_segments_are_trained_where_they_say_so_and_no_token_is_in_two():
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    parts = (("<s>hel", False), ("lo an", True), ("d so", False), (" then</s>", True))
    texts, _ = encoded(None, Segments(parts), tokenizer)
    assert texts == [("<s>hello and so then</s>", "lo an then</s>")]


def test_tokens_of_another_program_are_kept_as_they_are():
    tokenizer = made.byte_level_tokenizer(None)
    ids = tokenizer("hello an answer")["input_ids"]
    loss_mask = [False, False, *[True] * (len(ids) - 2)]
    encoder = Encoder(tokenizer, Handling(), len(ids) - 1)
    (found,) = encoder.encode([Tokens(ids, loss_mask)])
    (document,) = found.documents
    assert document.ids.tolist() == ids[:-1] and document.loss_mask.tolist() == loss_mask[:-1]
    assert document.cut and document.length == len(ids)


@pytest.mark.parametrize("wrong", [-1, 1_000_000])
def test_a_token_that_the_tokenizer_lacks_refuses_the_data_set(wrong):
    tokenizer = made.byte_level_tokenizer(None)
    (found,) = Encoder(tokenizer, Handling(), 64).encode([Tokens([1, wrong], [False, True])])
    assert found.refused and f"no token {wrong:,}" in found.reason
