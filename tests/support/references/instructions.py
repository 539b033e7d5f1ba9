"""Families that mark the question, and have no header for the answer: Llama 2, Mistral in four
versions, and DeepSeek V2.

The formats are those of the models' own cards and tokenizer files.
"""

from __future__ import annotations

from tests.support.references.family import Family, Page, Refused, alternate, as_json

_ALTERNATE = r"""
    {%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant') }}
    {%- endif %}"""
LLAMA2 = (
    r"""
{%- set rest, given = messages, none %}
{%- if messages[0]['role'] == 'system' %}
    {%- set rest, given = messages[1:], messages[0]['content'] %}
{%- endif %}
{%- for m in rest %}"""
    + _ALTERNATE
    + r"""
    {%- set content = m['content'] %}
    {%- if loop.first and given is string %}
        {%- set content = '<<SYS>>\n' + given + '\n<</SYS>>\n\n' + content %}
    {%- endif %}
    {%- if m['role'] == 'user' %}{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + content.strip() + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}
"""
)
MISTRAL_V1 = (
    r"""
{{- bos_token }}
{%- for m in messages %}"""
    + _ALTERNATE
    + r"""
    {%- if m['role'] == 'user' %}{{- ' [INST] ' + m['content'] + ' [/INST]' }}
    {%- elif m['role'] == 'assistant' %}{{- ' ' + m['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
)
MISTRAL_V3 = r"""
{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}
    {%- set given, rest = messages[0]['content'], messages[1:] %}
{%- endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for m in rest %}
    {%- if m.role not in ('tool', 'tool_results') and m.tool_calls is not defined %}
        {%- if (m.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('Conversation roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in rest %}
    {%- if m.role == 'user' %}
        {%- if tools and m == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] [' }}
            {%- for tool in tools %}
                {{- '{"type": "function", "function": ' + tool.function | tojson + '}' }}
                {%- if not loop.last %}{{- ', ' }}{% endif %}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' }}
        {%- if loop.last and given is defined %}{{- given + '\n\n' }}{% endif %}
        {{- m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- if call.id is not defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric with length 9!') }}
            {%- endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content | trim + eos_token }}
    {%- elif m.role in ('tool', 'tool_results') %}
        {{- '[TOOL_RESULTS] {"content": ' + m.content + ', ' }}
        {%- if m.tool_call_id is not defined or m.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric with length 9!') }}
        {%- endif %}
        {{- '"call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported') }}
    {%- endif %}
{%- endfor %}
"""
"""It puts the system's text before the last question, if that is the last turn: what is trained has
an answer behind it and lacks the text.
"""
MISTRAL_TEKKEN = (
    MISTRAL_V3.replace("[INST] '", "[INST]'")
    .replace("_TOOLS] [", "_TOOLS][")
    .replace("_CALLS] [", "_CALLS][")
    .replace("_RESULTS] {", "_RESULTS]{")
    .replace("' ' + m.content | trim", "m.content")
)
MISTRAL_V7 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- '[INST]' + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'system' %}
        {{- '[SYSTEM_PROMPT]' + message['content'] + '[/SYSTEM_PROMPT]' }}
    {%- elif message['role'] == 'assistant' %}{{- message['content'] + eos_token }}
    {%- else %}{{- raise_exception('Only user, system and assistant roles are supported!') }}
    {%- endif %}
{%- endfor %}
"""
DEEPSEEK_V2 = r"""
{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}{{- 'User: ' + message['content'] + '\n\n' }}
    {%- elif message['role'] == 'assistant' %}
        {{- 'Assistant: ' + message['content'] + eos_token }}
    {%- elif message['role'] == 'system' %}{{- message['content'] + '\n\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'Assistant:' }}{% endif %}
"""


def _llama2(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    begin = 1 if messages[0]["role"] == "system" else 0
    alternate(messages[begin:])
    for place, message in enumerate(messages[begin:], begin):
        if message["role"] == "assistant":
            page.wrote(" ", place)
            page.said(message["content"].strip(), place, answer=True)
            page.wrote(" </s>", place)
        elif message["role"] == "user":
            page.wrote("<s>[INST] ")
            if begin and place == begin:
                page.wrote("<<SYS>>\n")
                page.said(messages[0]["content"], 0)
                text = message["content"].rstrip()
                page.wrote("\n<</SYS>>" + ("\n\n" if text else ""))
                page.said(text, place)
            else:
                page.said(message["content"].strip(), place)
            page.wrote(" [/INST]")


def _mistral_v1(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    alternate(messages)
    page.wrote("<s>")
    for place, message in enumerate(messages):
        if message["role"] == "user":
            page.wrote(" [INST] ")
            page.said(message["content"], place)
            page.wrote(" [/INST]")
        elif message["role"] == "assistant":
            page.wrote(" ", place)
            page.said(message["content"], place, answer=True)
            page.wrote("</s>", place)
        else:
            raise Refused


def _mistral_v3(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    _mistral_with_tools(page, messages, tools, " ")


def _mistral_tekken(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    _mistral_with_tools(page, messages, tools, "")


def _mistral_with_tools(page: Page, messages: list[dict], tools: list | None, gap: str) -> None:
    begin = 1 if messages[0]["role"] == "system" else 0
    rest = messages[begin:]
    alternate([m for m in rest if m["role"] != "tool" and "tool_calls" not in m])
    asked = [message for message in rest if message["role"] == "user"]
    page.wrote("<s>")
    for place, message in enumerate(rest, begin):
        if message["role"] == "user":
            if tools and message == asked[-1]:
                _mistral_tool_list(page, tools, gap)
            page.wrote(f"[INST]{gap}")
            if begin and place + 1 == len(messages):
                page.said(messages[0]["content"], 0)
                page.wrote("\n\n")
            page.said(message["content"], place)
            page.wrote("[/INST]")
        elif "tool_calls" in message:
            _mistral_calls(page, message["tool_calls"], place, gap)
        elif message["role"] == "assistant":
            page.wrote(gap, place)
            text = message["content"]
            page.said(text.strip() if gap else text, place, answer=True)
            page.wrote("</s>", place)
        elif message["role"] == "tool":
            if len(message.get("tool_call_id", "")) != 9:
                raise Refused
            page.wrote(f'[TOOL_RESULTS]{gap}{{"content": ')
            page.said(message["content"], place)
            page.wrote(f', "call_id": "{message["tool_call_id"]}"}}[/TOOL_RESULTS]')
        else:
            raise Refused


def _mistral_tool_list(page: Page, tools: list, gap: str) -> None:
    page.wrote(f"[AVAILABLE_TOOLS]{gap}[")
    for place, tool in enumerate(tools):
        page.wrote(", " if place else "")
        page.wrote('{"type": "function", "function": ')
        page.said(as_json(tool["function"]), None)
        page.wrote("}")
    page.wrote("][/AVAILABLE_TOOLS]")


def _mistral_calls(page: Page, calls: list, place: int, gap: str) -> None:
    page.wrote(f"[TOOL_CALLS]{gap}[", place)
    written = []
    for call in calls:
        if len(call.get("id", "")) != 9:
            raise Refused
        written.append(f'{as_json(call["function"])[:-1]}, "id": "{call["id"]}"}}')
    page.said(", ".join(written), place, answer=True)
    page.wrote("]</s>", place)


def _mistral_v7(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    page.wrote("<s>")
    names = {"user": "INST", "system": "SYSTEM_PROMPT"}
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            page.said(message["content"], place, answer=True)
            page.wrote("</s>", place)
        elif message["role"] in names:
            page.wrote(f"[{names[message['role']]}]")
            page.said(message["content"], place)
            page.wrote(f"[/{names[message['role']]}]")
        else:
            raise Refused


def _deepseek_v2(page: Page, messages: list[dict], tools: list | None, prompt: bool) -> None:
    page.wrote("<｜begin▁of▁sentence｜>")
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            page.wrote("Assistant:")
            page.wrote(" ", place)
            page.said(message["content"], place, answer=True)
            page.wrote("<｜end▁of▁sentence｜>", place)
        elif message["role"] in ("user", "system"):
            page.wrote("User: " if message["role"] == "user" else "")
            page.said(message["content"], place)
            page.wrote("\n\n")
    if prompt:
        page.wrote("Assistant:")


_TEXT = ("<unk>", "<s>", "</s>")
_INSTRUCTIONS = (*_TEXT, "[INST]", "[/INST]")
_MISTRAL_TOOLS = (
    *("[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
_DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>")
_MARKS = {"bos": "<s>", "eos": "</s>"}
_DEEPSEEK_MARKS = {"bos": _DEEPSEEK[0], "eos": _DEEPSEEK[1], "pad": _DEEPSEEK[2]}
FAMILIES = [
    Family("llama2", LLAMA2, _llama2, _TEXT, pieces="prefixed", **_MARKS),
    Family("mistral_v1", MISTRAL_V1, _mistral_v1, _TEXT, pieces="prefixed", **_MARKS),
    Family(
        "mistral_v3",
        MISTRAL_V3,
        _mistral_v3,
        (*_INSTRUCTIONS, *_MISTRAL_TOOLS),
        pieces="first",
        calls=True,
        **_MARKS,
    ),
    Family(
        "mistral_tekken",
        MISTRAL_TEKKEN,
        _mistral_tekken,
        (*_INSTRUCTIONS, *_MISTRAL_TOOLS),
        calls=True,
        **_MARKS,
    ),
    Family(
        "mistral_v7",
        MISTRAL_V7,
        _mistral_v7,
        (*_INSTRUCTIONS, *_MISTRAL_TOOLS, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        **_MARKS,
    ),
    Family("deepseek_v2", DEEPSEEK_V2, _deepseek_v2, _DEEPSEEK, **_DEEPSEEK_MARKS),
]
