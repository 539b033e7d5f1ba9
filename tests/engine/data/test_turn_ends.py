"""What ends an answer is what the chat template writes behind it or, where it leaves it open, the
first token of the turn that follows.
"""

from __future__ import annotations

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.formats.example import Conversation
from engine.data.tokens.encode import Encoder
from engine.data.tokens.render import ChatRenderer
from engine.data.tokens.rendered import Handling
from engine.data.tokens.trained_ends import ENDS
from engine.model.build.added_tokens import add_tokens
from tests.support.data_tokenizers import CHATML, NO_END, SPECIAL, byte_level_tokenizer
from tests.support.ended_answers import OWN_END, rows, tokenizer_for
from tests.support.published import template
from tests.support.references.trl_pairs import PAIRS
from tests.support.rows import write_rows

GLM_TOKENS = ("<|user|>", "<|observation|>")
ENDS_OF = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "cohere2": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek_r1_distill": ("<｜end▁of▁sentence｜>",),
    "deepseekv3": ("<｜end▁of▁sentence｜>",),
    "diffusion_gemma": ("<turn|>", "<|tool_response>"),
    "gemma": ("<end_of_turn>",),
    "gemma3": ("<end_of_turn>",),
    "glm4moe": GLM_TOKENS,
    "gptoss": ("<|return|>", "<|call|>"),
    "idefics3": ("<end_of_utterance>",),
    "llama3": ("<|eot_id|>",),
    "llava_next": ("</s>",),
    "muse_glimmer": ("<|eot|>",),
    "phi3": (OWN_END, "<|end|>"),
    "phi3_5": (OWN_END, "<|end|>"),
    "smolvlm": ("<end_of_utterance>",),
}
"""The generation settings that these models publish end with the same tokens; Phi's template also
ends a conversation with the end token of the tokenizer. The others end with <|im_end|>.
"""
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "add", "arguments": {"a": 1}}}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def answer(text: str, **more) -> dict:
    return {"role": "assistant", "content": text, **more}


def ends_of(tokenizer, add: tuple[str, ...] = ()):
    return ChatRenderer(tokenizer, Handling(add_tokens=add)).ends


@pytest.mark.parametrize("name", PAIRS)
def test_every_template_shows_what_ends_its_turns(name):
    found = ends_of(tokenizer_for(template(name)))
    assert found.tokens == ENDS_OF.get(name, ("<|im_end|>",))
    assert bool(found.next_turns) is (name == "glm4moe")


RESULT = {"role": "tool", "content": "3", "name": "add"}
LIKE_TRL = {
    "one": ([user("Hi"), answer("Paris")], None),
    "two": ([user("Hi"), answer("Paris"), user("And?"), answer("Rome")], None),
    "reasoning": ([user("Hi"), answer("Rome", reasoning_content="It is.")], None),
    "called": ([user("Hi"), answer("", tool_calls=[CALL]), RESULT, answer("Three")], [TOOL]),
    "call last": ([user("Hi"), answer("", tool_calls=[CALL])], [TOOL]),
    "two calls": ([user("Hi"), answer("So:", tool_calls=[CALL, CALL])], [TOOL]),
    "system later": (
        [user("Hi"), answer("A"), {"role": "system", "content": "S"}, user("B"), answer("C")],
        None,
    ),
}


@pytest.mark.parametrize("case", LIKE_TRL)
def test_glm_trains_the_token_of_the_next_turn_as_trls_training_template_marks_it(case):
    messages, tools = LIKE_TRL[case]
    tokenizer = tokenizer_for(template("glm4moe"))
    encoder = Encoder(tokenizer, Handling(), 10_000)
    (found,) = encoder.encode([Conversation(messages, tools=tools)])
    (document,) = found.documents
    wanted = tokenizer.apply_chat_template(
        messages,
        tools=tools,
        chat_template=template("glm4moe_training"),
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert document.ids.tolist() == wanted["input_ids"]
    assert document.loss_mask.astype(int).tolist() == wanted["assistant_masks"]
    assert not encoder.renderer.take_warnings()


def trained_texts(tokenizer, messages, **handling) -> list[str]:
    """Returns what each document trains."""
    (found,) = Encoder(tokenizer, Handling(**handling), 10_000).encode([Conversation(messages)])
    return [tokenizer.decode(each.ids[each.loss_mask]) for each in found.documents]


LEADS = {
    # The next turn's token stands behind a line end, as in Nemotron-Mini.
    "line end": (
        "{% for m in messages %}<|user|>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|user|>assistant\n{% endif %}",
        "\n<|user|>",
    ),
    # The last answer alone is left open.
    "not the last": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% if not loop.last %}<|im_end|>\n{% elif m.role != 'assistant' %}<|im_end|>\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
}


@pytest.mark.parametrize("kind", LEADS)
def test_a_turn_that_is_left_open_ends_with_what_stands_there_when_another_follows(kind):
    code, end = LEADS[kind]
    tokenizer = byte_level_tokenizer(code)
    talk = [user("a"), answer("hello"), user("b"), answer("he")]
    assert trained_texts(tokenizer, talk) == [f"hello{end}he{end}"]
    assert trained_texts(tokenizer, talk, train_on="all")[0].endswith(f"he{end}")
    assert ends_of(tokenizer).tokens == (end.strip(),)


def test_a_token_that_was_added_ends_answers(tmp_path):
    special = tuple(token for token in SPECIAL if not token.startswith("<|im_"))
    tokenizer = byte_level_tokenizer(CHATML, special=special)
    without = ends_of(tokenizer)
    assert without.tokens == () and without.text == "<|im_end|>"
    add_tokens(tokenizer, ("<|im_end|>",))
    assert ends_of(tokenizer, ("<|im_end|>",)).tokens == ("<|im_end|>",)
    found = trained_texts(tokenizer, [user("a"), answer("hello")], add_tokens=("<|im_end|>",))
    assert found == ["hello<|im_end|>"]


def prepared(path, tokenizer, data, **settings):
    write_rows(path, data)
    config = DataConfig(source=str(path), max_seq_len=512, eval_fraction=0.25, **settings)
    return prepare_data(config, tokenizer, seed=0), config


def summary_ends(path, tokenizer, data, **settings) -> list[str]:
    return prepared(path, tokenizer, data, **settings)[0].summary[ENDS]


SEGMENTS = [[{"text": "a: ", "label": False}, {"text": "hello<|end|>", "label": True}]]
FORMATS = {
    "text": ([{"text": "hello"}] * 4, ["</s>"]),
    "prompt_completion": ([{"prompt": "a", "completion": "hello"}] * 4, ["</s>"]),
    "segments": ([{"segments": each} for each in SEGMENTS * 4], ["<|end|>"]),
}


@pytest.mark.parametrize("name", FORMATS)
def test_rows_without_a_template_end_with_what_they_train(tmp_path, name):
    data, wanted = FORMATS[name]
    tokenizer = byte_level_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token  # as in many base models
    assert summary_ends(tmp_path / "rows.jsonl", tokenizer, data) == wanted


def test_tokens_of_another_program_end_with_what_they_train(tmp_path):
    tokenizer = byte_level_tokenizer(CHATML)
    ids = [tokenizer(text)["input_ids"] for text in ("a: ", "hello", "<|end|>")]
    row = {
        "input_ids": [*ids[0], *ids[1], *ids[2]],
        "labels": [-100] * len(ids[0]) + ids[1] + ids[2],
    }
    assert summary_ends(tmp_path / "rows.jsonl", tokenizer, [row] * 4) == ["<|end|>"]


def test_an_end_that_is_no_special_token_is_no_part_of_an_expected_answer(tmp_path):
    special = tuple(token for token in SPECIAL if token != "<|im_end|>")
    tokenizer = byte_level_tokenizer(CHATML, special=special)
    tokenizer.add_tokens(["<|im_end|>"])
    found, _ = prepared(tmp_path / "rows.jsonl", tokenizer, rows()[:8])
    assert found.ends == ("<|im_end|>",)
    assert {each.expected_text for each in found.eval_prompts(8)} <= {
        "Paris", "Rome", "Madrid", "Lima",
    }  # fmt: skip
    assert found.eval_prompts(8)


def test_the_preview_shows_the_end_as_trained(tmp_path):
    tokenizer = tokenizer_for(template("glm4moe"))
    found, config = prepared(tmp_path / "rows.jsonl", tokenizer, rows()[:4])
    shown = preview(config, tokenizer)
    assert shown["ends"] == list(GLM_TOKENS) == found.summary[ENDS] and not shown["endless"]
    assert not shown["warnings"]
    (pieces,) = shown["rows"][0]["documents"]
    assert pieces[-1] == {"text": "\n<think></think>\nParis<|user|>", "trained": True}


def test_answers_without_an_end_are_told_in_the_preview_and_in_the_summary(tmp_path):
    tokenizer = byte_level_tokenizer(NO_END)
    found, config = prepared(tmp_path / "rows.jsonl", tokenizer, rows()[:4])
    shown = preview(config, tokenizer)
    assert shown["ends"] == [] == found.summary[ENDS]
    assert shown["endless"] == (
        "The chat template ends an answer with no token, so the model cannot learn where to stop "
        "(4 answers); use a model whose chat template ends an answer with a token."
    )
    assert shown["endless"] in found.summary["warnings"]
    special = tuple(token for token in SPECIAL if token != "<|im_end|>")
    reported = preview(config, byte_level_tokenizer(CHATML, special=special))["endless"]
    assert "reads <|im_end|> as text; name it in data.add_tokens" in reported
    found, config = prepared(
        tmp_path / "text.jsonl", byte_level_tokenizer(eos=False), [{"text": "hello a"}] * 4
    )
    reported = preview(config, byte_level_tokenizer(eos=False))["endless"]
    assert (
        reported
        == "The tokenizer has no end-of-sequence token, so the model cannot learn where to stop."
    )
    assert reported in found.summary["warnings"]
