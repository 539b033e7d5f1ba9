"""Families that write a header with the role before each turn: Llama 3, Gemma, Phi-3, Granite 3,
OLMo 2 and Zephyr.

The formats are those of the models' own cards and tokenizer files.
"""

from __future__ import annotations

from typing import Any

from tests.support.references.family import Family, Page, Refused, alternate, as_json

LLAMA3 = r"""
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim
        + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}
"""
_ALTERNATE = r"""
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}
    {%- endif %}"""
GEMMA = (
    r"""
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}{{- raise_exception('System role not supported') }}
{%- endif %}
{%- for m in messages %}"""
    + _ALTERNATE
    + r"""
    {%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
    {{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{% endif %}
"""
)
PHI3 = r"""
{%- for m in messages %}{{- '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}
"""
GRANITE3 = r"""
{%- if tools %}
    {{- '<|start_of_role|>available_tools<|end_of_role|>\n' }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}{% if not loop.last %}{{- '\n\n' }}{% endif %}
    {%- endfor %}
    {{- '<|end_of_text|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message['role'] == 'assistant_tool_call' %}
        {{- '<|start_of_role|>assistant<|end_of_role|><|tool_call|>' + message['content']
            + '<|end_of_text|>\n' }}
    {%- elif message['role'] in ('system', 'user', 'assistant', 'tool_response') %}
        {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content']
            + '<|end_of_text|>\n' }}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""
OLMO2 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] in ('system', 'user') %}
        {{- '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- '<|assistant|>\n' + message['content'] + eos_token }}
        {%- if not loop.last %}{{- '\n' }}{% endif %}
    {%- endif %}
    {%- if loop.last and add_generation_prompt %}{{- '<|assistant|>\n' }}{% endif %}
{%- endfor %}
"""
ZEPHYR = """{% for message in messages %}
{% if message['role'] in ('user', 'system', 'assistant') %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""
"""The line breaks of this template are part of what it writes."""


def _llama3(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    page.wrote("<|begin_of_text|>")
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        page.wrote(f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n")
        page.said(message["content"].strip(), place, answer)
        page.wrote("<|eot_id|>", place if answer else None)
    if prompt:
        page.wrote("<|start_header_id|>assistant<|end_header_id|>\n\n")


def _gemma(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    if messages[0]["role"] == "system":
        raise Refused
    alternate(messages)
    page.wrote("<bos>")
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        page.wrote(f"<start_of_turn>{'model' if answer else message['role']}\n")
        page.said(message["content"].strip(), place, answer)
        page.wrote("<end_of_turn>", place if answer else None)
        page.wrote("\n")
    if prompt:
        page.wrote("<start_of_turn>model\n")


def _phi3(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        page.wrote(f"<|{message['role']}|>\n")
        page.said(message["content"], place, answer)
        page.wrote("<|end|>", place if answer else None)
        page.wrote("\n")
    if prompt:
        page.wrote("<|assistant|>\n")


def _granite3(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    if tools:
        page.wrote("<|start_of_role|>available_tools<|end_of_role|>\n")
        for place, tool in enumerate(tools):
            page.wrote("\n\n" if place else "")
            page.said(as_json(tool, 4), None)
        page.wrote("<|end_of_text|>\n")
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        if answer or message["role"] in ("system", "user"):
            page.wrote(f"<|start_of_role|>{message['role']}<|end_of_role|>")
            page.said(message["content"], place, answer)
            page.wrote("<|end_of_text|>", place if answer else None)
            page.wrote("\n")
    if prompt:
        page.wrote("<|start_of_role|>assistant<|end_of_role|>")


def _olmo2(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    page.wrote("<|endoftext|>")
    for place, message in enumerate(messages):
        if message["role"] in ("system", "user"):
            page.wrote(f"<|{message['role']}|>\n")
            page.said(message["content"], place)
            page.wrote("\n")
        elif message["role"] == "assistant":
            page.wrote("<|assistant|>\n")
            page.said(message["content"], place, answer=True)
            page.wrote("<|endoftext|>", place)
            page.wrote("\n" if place + 1 < len(messages) else "")
    if prompt:
        page.wrote("<|assistant|>\n")


def _zephyr(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        if answer or message["role"] in ("user", "system"):
            page.wrote(f"<|{message['role']}|>\n")
            page.said(message["content"], place, answer)
            page.wrote("</s>", place if answer else None)
            page.wrote("\n")
    if prompt:
        page.wrote("<|assistant|>\n")


_PHI3: dict[str, Any] = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}
_ROLES = ("<|assistant|>", "<|system|>", "<|user|>", "<|tool|>")
FAMILIES = [
    Family(
        "llama3",
        LLAMA3,
        _llama3,
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eom_id|>",
            "<|eot_id|>",
            "<|python_tag|>",
        ),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    Family(
        "gemma",
        GEMMA,
        _gemma,
        special=("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        pieces="spaces",
    ),
    Family(
        "phi3",
        PHI3,
        _phi3,
        special=("<unk>", "<s>", "</s>", "<|endoftext|>", *_ROLES, "<|end|>"),
        bos="<s>",
        pieces="prefixed",
        swallows=True,
        **_PHI3,
    ),
    Family(
        "marked",
        PHI3,
        _phi3,
        special=("<|endoftext|>", "<|end|>"),
        added=_ROLES,
        mentioned=_ROLES,
        bos=None,
        eos="<|end|>",
        pad="<|endoftext|>",
    ),
    Family(
        "granite3",
        GRANITE3,
        _granite3,
        special=(
            "<|end_of_text|>",
            "<fim_prefix>",
            "<|start_of_role|>",
            "<|end_of_role|>",
            "<|tool_call|>",
        ),
        bos="<|end_of_text|>",
        eos="<|end_of_text|>",
        pad="<|end_of_text|>",
    ),
    Family(
        "olmo2",
        OLMO2,
        _olmo2,
        special=("<|endoftext|>", "<|pad|>", "<|fim_prefix|>"),
        bos="<|endoftext|>",
        eos="<|endoftext|>",
        pad="<|pad|>",
    ),
    Family(
        "zephyr",
        ZEPHYR,
        _zephyr,
        special=("<unk>", "<s>", "</s>"),
        bos="<s>",
        eos="</s>",
        pad="</s>",
        pieces="prefixed",
    ),
]
"""`marked` has Phi-3's template, and role markers that are added tokens and not special."""
