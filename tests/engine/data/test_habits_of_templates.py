"""Chat templates want calls, contents and reasoning in other forms than rows have them: each row is
trained as TRL's training template, or plain transformers, writes it in the form that it wants.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from trl.data_utils import prepare_multimodal_messages

from engine.config.data_settings import DataConfig
from engine.data.batches.preview import preview
from engine.data.formats.calls import read_tools
from engine.data.formats.example import Conversation
from engine.data.formats.turns import TurnSettings, conversation, read_turns
from engine.data.tokens.encode import Encoder
from engine.data.tokens.rendered import Handling, RejectedExample
from engine.tools.chat.prompt_builder import PromptBuilder
from tests.support.data_tokenizers import CHATML, byte_level_tokenizer
from tests.support.references.trl_pairs import as_published, as_trained

USER = {"role": "user", "content": "What is 2+2?"}
AS_KEY = {"role": "assistant", "content": "Four.", "reasoning_content": "2 and 2 are four."}
INLINE = {"role": "assistant", "content": "<think>\n2 and 2 are four.\n</think>\n\nFour."}
RAW = {"role": "assistant", "content": "2 and 2 are four.\n</think>\n\nFour."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def called(arguments, **keys):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": None, "tool_calls": [call | keys]},
        {"role": "tool", "content": "rain", **({"tool_call_id": keys["id"]} if keys else {})},
        {"role": "assistant", "content": "It rains."},
    ]


def as_example(turns, tools=None):
    return conversation(
        read_turns(turns, "messages", TurnSettings()), 0, read_tools(tools, "tools")
    )


def encoded(tokenizer, turns, tools=None, **settings):
    """Returns each document's text and what of it is trained, or why the row is skipped."""
    encoder = Encoder(tokenizer, Handling(**settings), 4096)
    (found,) = encoder.encode([as_example(turns, tools)])
    reported = encoder.renderer.take_warnings()
    if isinstance(found, RejectedExample):
        return found, reported
    return [
        (tokenizer.decode(one.ids), tokenizer.decode(one.ids[one.loss_mask]))
        for one in found.documents
    ], reported


# ---------------------------------------------------------------------- reasoning


@pytest.mark.parametrize(
    "family",
    ["qwen3_5_think", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_ultra", "qwen3"],
)
def test_reasoning_inside_an_answer_is_trained_as_reasoning_content(family):
    tokenizer = as_published(family)
    rows = [[USER, AS_KEY], [USER, INLINE], [USER, RAW]]
    if family == "qwen3":  # its prompt does not begin the reasoning; the template reads it anyway
        rows.remove([USER, RAW])
    (wanted, reported), *others = [encoded(tokenizer, row) for row in rows]
    text = tokenizer.apply_chat_template([USER, AS_KEY], tokenize=False)
    assert [whole for whole, _ in wanted] == [text]
    assert "2 and 2 are four." in wanted[0][1] and wanted[0][1].endswith("Four.<|im_end|>")
    for found in others:
        assert found == (wanted, reported)


@pytest.mark.parametrize("answer", [AS_KEY, INLINE, RAW])
def test_reasoning_that_only_the_prompt_begins_is_trained_behind_it(answer):
    tokenizer = as_published("deepseek_r1_distill")
    prompt = tokenizer.apply_chat_template([USER], tokenize=False, add_generation_prompt=True)
    assert prompt.endswith("<think>\n")
    (((text, loss_mask),), _) = encoded(tokenizer, [USER, answer])
    assert text == prompt + loss_mask
    assert loss_mask == "2 and 2 are four.\n</think>\n\nFour.<｜end▁of▁sentence｜>"
    # TRL's training template keeps the reasoning of a content as well.
    assert text == as_trained("deepseek_r1_distill").apply_chat_template(
        [USER, INLINE], tokenize=False
    )


@pytest.mark.parametrize("content", [INLINE["content"], "own tags"])
def test_reasoning_in_a_content_moves_to_where_the_template_writes_it(content):
    tokenizer = as_published("gptoss")
    if content == "own tags":
        content = (
            "<|channel|>analysis<|message|>2 and 2 are four.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Four."
        )
    found, _ = encoded(tokenizer, [USER, {"role": "assistant", "content": content}])
    assert found == encoded(tokenizer, [USER, AS_KEY])[0]
    assert "<|channel|>analysis<|message|>2 and 2 are four.<|end|>" in found[0][1]


_ASSISTANT = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}BODY"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OTHER_WAYS = {
    "tags of Seed-OSS": (
        "{% if m.reasoning_content %}{{ '<seed:think>' + m.reasoning_content + '</seed:think>' }}"
        "{% endif %}{{ m.content }}",
        "<seed:think>2 and 2 are four.</seed:think>Four.",
    ),
    "a part, as Ministral 3 and Magistral have it": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'thinking' %}{{ '[THINK]' + part.thinking + '[/THINK]' }}"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}",
        "[THINK]2 and 2 are four.[/THINK]Four.",
    ),
    "the key reasoning alone": (
        "{% if m.reasoning %}{{ '<think>' + m.reasoning + '</think>' }}{% endif %}{{ m.content }}",
        "<think>2 and 2 are four.</think>Four.",
    ),
}


@pytest.mark.parametrize("way", OTHER_WAYS)
def test_reasoning_is_given_in_the_way_that_the_template_writes_it(way):
    body, written = OTHER_WAYS[way]
    tokenizer = byte_level_tokenizer(_ASSISTANT.replace("BODY", body))
    own = {"role": "assistant", "content": written}
    as_reasoning = {"role": "assistant", "content": "Four.", "reasoning": "2 and 2 are four."}
    for answer in (AS_KEY, INLINE, own, as_reasoning):
        found, _ = encoded(tokenizer, [USER, answer])
        assert not isinstance(found, RejectedExample), (answer, found)
        assert found[0][1] == written + "<|im_end|>", answer


def test_a_row_without_reasoning_is_trained_from_the_empty_block_that_the_template_writes():
    answer = {"role": "assistant", "content": "Four."}
    for family, block in (("nemotron_3_nano", "</think>Four."), ("qwen3_5_think", "Four.")):
        tokenizer = as_published(family)
        ((text, loss_mask),), _ = encoded(tokenizer, [USER, answer])
        assert text == tokenizer.apply_chat_template([USER, answer], tokenize=False)
        assert block in loss_mask
        assert "</think>" in loss_mask
        assert "<think>" not in loss_mask
        blank = {"role": "assistant", "content": "<think>\n\n</think>\n\nFour."}
        assert encoded(tokenizer, [USER, blank])[0] == [(text, loss_mask)]


def test_an_answer_that_only_speaks_of_tags_stays_as_it_is():
    tokenizer = as_published("qwen3_5_think")
    shown = {"role": "assistant", "content": "Write <think> first, </think> last."}
    found, _ = encoded(tokenizer, [USER, shown])
    assert isinstance(found, RejectedExample) and "leaves out part" in found.reason
    found, _ = encoded(byte_level_tokenizer(CHATML), [USER, INLINE])
    assert found[0][1] == INLINE["content"] + "<|im_end|>"


# ---------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"city": "Oslo"}', '{"city": "Oslo"}'),
        ('{"city":"Oslo",\n "n": 1.0}', '{"city":"Oslo",\n "n": 1.0}'),
        ({"city": "Malmö"}, '{"city": "Malmö"}'),
        (json.dumps('{"city":"Oslo"}'), '{"city":"Oslo"}'),
    ],
)
def test_a_template_that_joins_text_gets_the_arguments_of_the_row_as_text(arguments, written):
    tokenizer = as_published("deepseekv3")
    turns = called(arguments)
    found, _ = encoded(tokenizer, turns)
    as_text = [dict(turn) for turn in called(written)]
    as_text[1]["content"] = ""
    assert found[0][0] == tokenizer.apply_chat_template(as_text, tokenize=False)
    assert f"```json\n{written}\n```" in found[0][1]


def test_a_template_that_wants_objects_gets_objects():
    tokenizer = as_published("qwen3_5_think")
    for arguments in ('{"city":"Oslo"}', {"city": "Oslo"}):
        found, _ = encoded(tokenizer, called(arguments))
        assert "<parameter=city>\nOslo\n</parameter>" in found[0][1]


MISTRAL = (  # what Mistral's templates ask of ids, and where they write them
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if m.tool_call_id is undefined or m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{{ '[TOOL_RESULTS]' + m.content + m.tool_call_id }}"
    "{% elif m.tool_calls is defined %}{% for c in m.tool_calls %}"
    "{% if c.id is undefined or c.id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
    "{% endif %}{{ '[TOOL_CALLS]' + c.function.name + c.function.arguments | tojson + c.id }}"
    "{% endfor %}{{ eos_token }}{% elif m.role == 'assistant' %}{{ m.content + eos_token }}"
    "{% else %}{{ '[INST]' + m.content + '[/INST]' }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("row", "written"),
    [({"id": "abcdefgh1"}, "abcdefgh1"), ({"id": "call_AbC012345"}, "bC012345"), ({}, "call00000")],
)
def test_ids_have_nine_characters_where_the_template_asks_for_them(row, written):
    tokenizer = byte_level_tokenizer(MISTRAL)
    found, _ = encoded(tokenizer, called({"city": "Oslo"}, **row))
    assert found[0][0].count(written) == 2, found
    texts = tokenizer.apply_chat_template(
        called({"city": "Oslo"}, id=found[0][0].partition("}")[2][:9]), tokenize=False
    )
    assert found[0][0] == texts


def test_results_are_told_apart_where_the_template_looks_up_their_calls():
    names = ("weather", "clock")
    calls = [{"function": {"name": name, "arguments": {"city": "Oslo"}}} for name in names]
    turns = [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "rain"},
        {"role": "tool", "content": "noon"},
        {"role": "assistant", "content": "It rains at noon."},
    ]
    with_ids = [dict(turn) for turn in turns]
    with_ids[1]["tool_calls"] = [call | {"id": f"id{i}"} for i, call in enumerate(calls)]
    with_ids[2]["tool_call_id"], with_ids[3]["tool_call_id"] = "id0", "id1"
    tokenizer = as_published("diffusion_gemma")
    found, _ = encoded(tokenizer, turns)
    assert found == encoded(tokenizer, with_ids)[0]
    assert "response:weather{value:" in found[0][0] and "response:clock{value:" in found[0][0]


# ---------------------------------------------------------------------- contents


@pytest.mark.parametrize("family", ["smolvlm", "idefics3", "llava_next"])
def test_a_template_that_wants_parts_gets_parts(family):
    tokenizer = as_published(family)
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Name a river."},
        {"role": "assistant", "content": "Rhine."},
        {"role": "user", "content": [{"type": "text", "text": "Another."}]},
        {"role": "assistant", "content": "Elbe."},
    ]
    plain = [turn | {"content": "Another."} if turn is turns[3] else turn for turn in turns]
    ((text, loss_mask),), found = encoded(tokenizer, turns)
    wanted = tokenizer.apply_chat_template(prepare_multimodal_messages(plain), tokenize=False)
    assert text == wanted and not found
    assert "Rhine." in loss_mask
    assert "Elbe." in loss_mask
    assert "river" not in loss_mask
    encoder = Encoder(tokenizer, Handling(), 512)
    asked = tokenizer.apply_chat_template(
        prepare_multimodal_messages([turns[1]]), tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.decode(encoder.question("Name a river.")) == asked


def test_the_preview_shows_rows_in_the_form_of_the_template(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, {"role": "assistant", "content": "Four."}]}))
    shown = preview(DataConfig(str(path), eval_fraction=0.0), as_published("smolvlm"))
    assert "error" not in shown and shown["rows_skipped"] == 0


# ---------------------------------------------------------------------- roles


@pytest.mark.parametrize("family", ["llama3", "qwen2_5", "qwen3_5_think"])
def test_a_developer_is_the_system_where_the_template_does_not_know_the_role(family):
    answer = {"role": "assistant", "content": "Four."}
    tokenizer = as_published(family)
    asked = [{"role": "developer", "content": "Be brief."}, USER, answer]
    found, reported = encoded(tokenizer, asked)
    assert found == encoded(tokenizer, [asked[0] | {"role": "system"}, USER, answer])[0]
    assert (
        sum("developer turn is written as a system turn" in sentence for sentence in reported) == 1
    )


def test_a_developer_stays_one_where_the_template_knows_the_role():
    template = (
        "{% for m in messages %}{% if m['role'] in ('developer', 'system', 'user', 'assistant') %}"
        "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    answer = {"role": "assistant", "content": "Four."}
    asked = [{"role": "developer", "content": "Be brief."}, USER, answer]
    found, reported = encoded(byte_level_tokenizer(template), asked)
    assert found[0][0].startswith("<|im_start|>developer\nBe brief.") and not reported


# ---------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    "turns",
    [
        [{"role": "user", "content": "weather?"}, {"role": "assistant", "content": "Sun."}],
        called({"city": "Oslo"}),
    ],
    ids=["a word of the chat", "a call"],
)
@pytest.mark.parametrize("writes", [False, True])
def test_lost_tools_are_told_though_their_name_is_in_the_chat(turns, writes):
    family = "qwen2_5" if writes else "deepseekv3"
    for tools in ([WEATHER], [{"type": "function", "function": {"name": "weather"}}]):
        _, reported = encoded(as_published(family), turns, tools)
        assert (
            "The chat template leaves out the tools of a conversation" in reported
        ) is not writes
        found, _ = encoded(as_published(family), turns, tools, dropped_turns="refuse")
        assert (isinstance(found, RejectedExample) and found.refused) is not writes


def test_a_tool_without_description_is_written_where_the_template_wants_one():
    bare = {"type": "function", "function": {"name": "weather"}}
    full = {"type": "function", "function": {"name": "weather", "description": ""}}
    turns = [USER, {"role": "assistant", "content": "Four."}]
    tokenizer = as_published("gptoss")
    found, _ = encoded(tokenizer, turns, [bare])
    assert found == encoded(tokenizer, turns, [full])[0] and "type weather" in found[0][0]


def test_conversations_that_share_messages_keep_their_own_ids():
    tokenizer = byte_level_tokenizer(MISTRAL)
    first, second = (as_example(called({"city": "Oslo"})) for _ in range(2))
    longer = Conversation([*first.messages, *second.messages])
    encoder = Encoder(tokenizer, Handling(), 4096)
    found = encoder.encode([first, longer, second])
    texts = [tokenizer.decode(one.documents[0].ids) for one in found]
    assert texts[0] == texts[2] and "call00001" not in texts[0]
    assert texts[1].count("call00000") == 2 and texts[1].count("call00001") == 2


# ---------------------------------------------------------------------- other users of templates


def test_benchmarks_ask_in_the_form_that_the_template_wants():
    streamed_lm = pytest.importorskip("engine.tools.evaluate.streamed_lm")
    tokenizer = as_published("smolvlm")
    model = streamed_lm.StreamedLM.__new__(streamed_lm.StreamedLM)
    model._chat_engine = SimpleNamespace(prompt_builder=SimpleNamespace(tokenizer=tokenizer))
    asked = model.apply_chat_template([USER])
    assert asked == tokenizer.apply_chat_template(
        prepare_multimodal_messages([USER]), tokenize=False, add_generation_prompt=True
    )


def test_a_chat_goes_on_without_the_reasoning_of_earlier_answers():
    tokenizer = as_published("deepseek_r1_distill")
    prompt_builder = PromptBuilder.__new__(PromptBuilder)
    prompt_builder.tokenizer, prompt_builder.longest = tokenizer, None
    prompt_builder._encoder = Encoder(tokenizer, Handling(), 512)
    again = {"role": "user", "content": "And 3+3?"}
    wanted = tokenizer.apply_chat_template([USER, RAW, again], add_generation_prompt=True)
    assert prompt_builder.prompt([USER, RAW, again]) == wanted["input_ids"]
    parts = as_published("smolvlm")
    prompt_builder.tokenizer, prompt_builder._encoder = parts, Encoder(parts, Handling(), 512)
    assert parts.decode(prompt_builder.prompt([USER])) == parts.apply_chat_template(
        prepare_multimodal_messages([USER]), tokenize=False, add_generation_prompt=True
    )
