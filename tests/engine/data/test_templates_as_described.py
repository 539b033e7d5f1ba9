"""The chat templates of the tests write what the models' cards describe, and so does the reference:
the two are compared with texts that were written by hand.
"""

from __future__ import annotations

import pytest

from tests.support.references import FAMILIES, INVENTED, tokenizer

TURNS = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi there"},
    {"role": "user", "content": "Who are you"},
]
SYSTEM = {"role": "system", "content": "Be kind."}
WITHOUT_SYSTEM = {
    "gemma": (
        "<bos><start_of_turn>user\nHello<end_of_turn>\n"
        "<start_of_turn>model\nHi there<end_of_turn>\n"
        "<start_of_turn>user\nWho are you<end_of_turn>\n<start_of_turn>model\n"
    ),
    "mistral_v1": "<s> [INST] Hello [/INST] Hi there</s> [INST] Who are you [/INST]",
}
_CHATML = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
    "<|im_start|>assistant\nHi there<|im_end|>\n<|im_start|>user\nWho are you<|im_end|>\n"
    "<|im_start|>assistant\n"
)
WITH_SYSTEM = {
    "qwen3": _CHATML,
    "smollm2": _CHATML,
    "phi4": (
        "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hello<|im_end|>"
        "<|im_start|>assistant<|im_sep|>Hi there<|im_end|>"
        "<|im_start|>user<|im_sep|>Who are you<|im_end|><|im_start|>assistant<|im_sep|>"
    ),
    "llama3": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHi there<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nWho are you<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
    "phi3": (
        "<|system|>\nBe kind.<|end|>\n<|user|>\nHello<|end|>\n<|assistant|>\nHi there<|end|>\n"
        "<|user|>\nWho are you<|end|>\n<|assistant|>\n"
    ),
    "granite3": (
        "<|start_of_role|>system<|end_of_role|>Be kind.<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hello<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>Hi there<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Who are you<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>"
    ),
    "olmo2": (
        "<|endoftext|><|system|>\nBe kind.\n<|user|>\nHello\n<|assistant|>\nHi there<|endoftext|>\n"
        "<|user|>\nWho are you\n<|assistant|>\n"
    ),
    "zephyr": (
        "<|system|>\nBe kind.</s>\n<|user|>\nHello</s>\n<|assistant|>\nHi there</s>\n"
        "<|user|>\nWho are you</s>\n<|assistant|>\n"
    ),
    "llama2": (
        "<s>[INST] <<SYS>>\nBe kind.\n<</SYS>>\n\nHello [/INST] Hi there </s>"
        "<s>[INST] Who are you [/INST]"
    ),
    "mistral_v3": "<s>[INST] Hello[/INST] Hi there</s>[INST] Be kind.\n\nWho are you[/INST]",
    "mistral_tekken": "<s>[INST]Hello[/INST]Hi there</s>[INST]Be kind.\n\nWho are you[/INST]",
    "mistral_v7": (
        "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Hello[/INST]Hi there</s>"
        "[INST]Who are you[/INST]"
    ),
    "deepseek_v2": (
        "<｜begin▁of▁sentence｜>Be kind.\n\nUser: Hello\n\nAssistant: Hi there<｜end▁of▁sentence｜>"
        "User: Who are you\n\nAssistant:"
    ),
}
DESCRIBED = {
    **{family: (TURNS, text) for family, text in WITHOUT_SYSTEM.items()},
    **{family: ([SYSTEM, *TURNS], text) for family, text in WITH_SYSTEM.items()},
}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family not in INVENTED])
def test_a_template_and_its_reference_write_a_prompt_as_the_models_card_describes(family):
    turns, text = DESCRIBED[family]
    written = tokenizer(family).apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True
    )
    assert written == text
    assert "".join(part.text for part in FAMILIES[family].page(turns, None, prompt=True)) == text


TOOL = {"type": "function", "function": {"name": "add", "description": "Adds."}}
CALL = {
    "type": "function",
    "id": "abcdefghi",
    "function": {"name": "add", "arguments": {"a": 1}},
}
CALLED = [
    {"role": "user", "content": "1 + 2?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 3."},
]
_TOLD = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are "
    "provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "add", "description": "Adds."}}\n</tools>\n\n'
    "For each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": '
    "<args-json-object>}\n</tool_call><|im_end|>\n"
)
_CALLED = (
    "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
    "<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
WITH_TOOLS = {
    "qwen3": (f"<|im_start|>system\n{_TOLD}{_CALLED}<think>\n\n</think>\n\nIt is 3.<|im_end|>\n"),
    "mistral_v3": (
        '<s>[AVAILABLE_TOOLS] [{"type": "function", "function": {"name": "add", '
        '"description": "Adds."}}][/AVAILABLE_TOOLS][INST] 1 + 2?[/INST][TOOL_CALLS] [{"name": '
        '"add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>[TOOL_RESULTS] {"content": 3, '
        '"call_id": "abcdefghi"}[/TOOL_RESULTS] It is 3.</s>'
    ),
    "mistral_tekken": (
        '<s>[AVAILABLE_TOOLS][{"type": "function", "function": {"name": "add", '
        '"description": "Adds."}}][/AVAILABLE_TOOLS][INST]1 + 2?[/INST][TOOL_CALLS][{"name": '
        '"add", "arguments": {"a": 1}, "id": "abcdefghi"}]</s>[TOOL_RESULTS]{"content": 3, '
        '"call_id": "abcdefghi"}[/TOOL_RESULTS]It is 3.</s>'
    ),
}


@pytest.mark.parametrize("family", WITH_TOOLS)
def test_tools_and_calls_are_written_as_the_models_card_describes(family):
    written = tokenizer(family).apply_chat_template(CALLED, tools=[TOOL], tokenize=False)
    assert written == WITH_TOOLS[family]
    parts = FAMILIES[family].page(CALLED, [TOOL])
    assert "".join(part.text for part in parts) == WITH_TOOLS[family]
