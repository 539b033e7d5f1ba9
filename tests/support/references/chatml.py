"""Families whose turns stand between <|im_start|> and <|im_end|>: Qwen3, SmolLM2, Phi-4, and an
abridged Qwen that other tests use.

The formats are those of the models' own cards and tokenizer files.
"""

from __future__ import annotations

from typing import Any

from tests.support.references.family import Family, Page, as_json

SHORT_QWEN = r"""
{%- set rest = messages %}{% set said = 'You are helpful.' %}
{%- if messages[0]['role'] == 'system' %}
    {%- set said = messages[0]['content'] %}{% set rest = messages[1:] %}
{%- endif %}
{{- '<|im_start|>system\n' + said }}
{%- if tools %}
    {{- '\n\n# Tools\n<tools>' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
    {{- '\n</tools>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for m in rest %}
    {%- if m.role == 'tool' %}
        {%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
        {{- '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\n' }}{% endif %}
    {%- elif m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- set call = call.function or call %}
            {{- '\n<tool_call>\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
_TOOLS_BEFORE = (
    r"# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    r"You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_BEHIND = (
    r"\n</tools>\n\nFor each function call, return a json object with function name and arguments"
    r" within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    r'{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
)
_QWEN_RESULTS = r"""
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
"""
QWEN3 = (
    r"""
{%- set given = messages[0].content if messages[0].role == 'system' else none %}
{%- if tools %}
    {{- '<|im_start|>system\n' }}{% if given is string %}{{- given + '\n\n' }}{% endif %}
    {{- 'BEFORE' }}
    {%- for tool in tools %}{{- '\n' }}{{- tool | tojson }}{% endfor %}
    {{- 'BEHIND' }}
{%- elif given is string %}{{- '<|im_start|>system\n' + given + '<|im_end|>\n' }}
{%- endif %}
{%- set ns = namespace(searching=true, last_query=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' and not (
        message.content.startswith('<tool_response>')
        and message.content.endswith('</tool_response>')) %}
        {%- set ns.searching = false %}
        {%- set ns.last_query = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set before = content.split('</think>')[0].rstrip('\n') %}
            {%- set reasoning = before.split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last_query and (loop.last or reasoning) %}
            {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- content }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\n' }}{% endif %}
            {%- if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}
            {%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}""".replace("BEFORE", _TOOLS_BEFORE).replace("BEHIND", _TOOLS_BEHIND)
    + _QWEN_RESULTS
)
_SMOLLM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
SMOLLM2 = r"""
{%- for message in messages %}
    {%- if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\nNAMED<|im_end|>\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}
""".replace("NAMED", _SMOLLM)
PHI4 = r"""
{%- for message in messages %}
    {%- if message['role'] in ('system', 'user', 'assistant') %}
        {{- '<|im_start|>' + message['role'] + '<|im_sep|>' + message['content'] + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant<|im_sep|>' }}{% endif %}
"""
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>")
_CALL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")


def _call(call: dict[str, Any]) -> str:
    function = call["function"]
    return (
        f'<tool_call>\n{{"name": "{function["name"]}", "arguments": '
        f"{as_json(function['arguments'])}}}\n</tool_call>"
    )


def _results(page: Page, messages: list[dict[str, Any]], place: int) -> None:
    """Writes a tool's answer. Neighbors share a turn of the user."""
    if place == 0 or messages[place - 1]["role"] != "tool":
        page.wrote("<|im_start|>user")
    page.wrote("\n<tool_response>\n")
    page.said(messages[place]["content"], place)
    page.wrote("\n</tool_response>")
    if place + 1 == len(messages) or messages[place + 1]["role"] != "tool":
        page.wrote("<|im_end|>\n")


def _turn(page: Page, message: dict[str, Any], place: int) -> None:
    answer = message["role"] == "assistant"
    page.wrote(f"<|im_start|>{message['role']}\n")
    text = message["content"]
    for call in message.get("tool_calls", ()):
        text += ("\n" if text else "") + _call(call)
    page.said(text, place, answer)
    page.wrote("<|im_end|>", place if answer else None)
    page.wrote("\n")


def _tool_list(page: Page, tools: list[Any]) -> None:
    page.wrote(_TOOLS_BEFORE.replace("\\n", "\n"))
    for tool in tools:
        page.said("\n" + as_json(tool), None)
    page.wrote(_TOOLS_BEHIND.replace("\\n", "\n"))


def _short_qwen(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    _system(page, messages, "You are helpful.")
    if tools:
        page.wrote("\n\n# Tools\n<tools>")
        page.said("".join("\n" + as_json(tool) for tool in tools), None)
        page.wrote("\n</tools>")
    page.wrote("<|im_end|>\n")
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            _results(page, messages, place)
        elif place or message["role"] != "system":
            _turn(page, message, place)
    if prompt:
        page.wrote("<|im_start|>assistant\n")


def _system(page: Page, messages: list[dict], otherwise: str) -> None:
    page.wrote("<|im_start|>system\n")
    if messages[0]["role"] == "system":
        page.said(messages[0]["content"], 0)
    else:
        page.wrote(otherwise)


def _qwen3(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    system = messages[0]["role"] == "system"
    if tools or system:
        page.wrote("<|im_start|>system\n")
    if system:
        page.said(messages[0]["content"], 0)
    if tools:
        page.wrote("\n\n" if system else "")
        _tool_list(page, tools)
    elif system:
        page.wrote("<|im_end|>\n")
    # A user's text is a question even if it is typed as a tool's answer: typed tokens are text.
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    last_query = asked[-1] if asked else len(messages) - 1
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            _results(page, messages, place)
        elif message["role"] == "assistant":
            _qwen3_answer(page, message, place, place > last_query, place + 1 == len(messages))
        elif message["role"] == "user" or (place and message["role"] == "system"):
            _turn(page, message, place)
    if prompt:
        page.wrote("<|im_start|>assistant\n")


def _qwen3_answer(page: Page, message: dict, place: int, is_late: bool, is_last: bool) -> None:
    """Writes an answer. Only behind the last question is its reasoning kept."""
    content, reasoning = message["content"], message.get("reasoning_content")
    if reasoning is None and "</think>" in content:
        first, *_, last = content.split("</think>")
        reasoning = first.rstrip("\n").split("<think>")[-1].lstrip("\n")
        content = last.lstrip("\n")
    page.wrote("<|im_start|>assistant\n")
    shown = content
    if is_late and (is_last or reasoning):
        page.wrote("<think>\n", place)
        page.said((reasoning or "").strip("\n"), place, answer=True)
        page.wrote("\n</think>\n\n", place)
        shown = content.lstrip("\n")
    calls = "\n".join(map(_call, message.get("tool_calls", ())))
    page.said(shown + ("\n" if content and calls else "") + calls, place, answer=True)
    page.wrote("<|im_end|>", place)
    page.wrote("\n")


def _smollm2(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    for place, message in enumerate(messages):
        if place == 0 and message["role"] != "system":
            page.wrote(f"<|im_start|>system\n{_SMOLLM}<|im_end|>\n")
        _turn(page, {"role": message["role"], "content": message["content"]}, place)
    if prompt:
        page.wrote("<|im_start|>assistant\n")


def _phi4(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    for place, message in enumerate(messages):
        answer = message["role"] == "assistant"
        if answer or message["role"] in ("system", "user"):
            page.wrote(f"<|im_start|>{message['role']}<|im_sep|>")
            page.said(message["content"], place, answer)
            page.wrote("<|im_end|>", place if answer else None)
    if prompt:
        page.wrote("<|im_start|>assistant<|im_sep|>")


_QWEN = {
    "special": _QWEN_SPECIAL,
    "bos": None,
    "eos": "<|im_end|>",
    "pad": "<|endoftext|>",
    "added": (*_THINK, *_CALL_TOKENS),
    "composed": True,
    "calls": True,
}
FAMILIES = [
    Family("qwen", SHORT_QWEN, _short_qwen, mentioned=_CALL_TOKENS, **_QWEN),
    Family("qwen3", QWEN3, _qwen3, thinks=True, mentioned=(*_THINK, *_CALL_TOKENS), **_QWEN),
    Family(
        "smollm2",
        SMOLLM2,
        _smollm2,
        special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>"),
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
    ),
    Family(
        "phi4",
        PHI4,
        _phi4,
        special=("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|fim_prefix|>"),
        bos="<|endoftext|>",
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
]
