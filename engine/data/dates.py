"""Chat templates see the same date on every day, so that a run that is resumed, or a model that is
asked, sees the text that it was trained on.

Templates know the date as `date_string`, or ask for it with `strftime_now(format)`. The library
passes plain values to a template and no functions, so a macro before the template's own text
answers the second one.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

_DATE = datetime(2024, 7, 26)
"""Llama's templates write this date where they are told none."""
_DIRECTIVES = [
    f"%{flag}{letter}" for letter in "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYZz" for flag in ("", "-")
]
# The macro's answer is its argument with every directive replaced.
_REPLACED = "".join(
    f".replace({directive!r}, {_DATE.strftime(directive)!r})" for directive in _DIRECTIVES
)
# The empty expression keeps the line end with which a template may begin: Jinja drops a line end
# right after a tag.
_MACRO = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"


def fixed_date(tokenizer: Any, tools: list[Any] | None = None) -> dict[str, Any]:
    """Returns the arguments of `tokenizer.apply_chat_template` that make its template write
    26 July 2024, at midnight, as today. `tools` are those of the conversation: a tokenizer may have
    a template of its own for them. Raises ValueError for a tokenizer without a template.
    """
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = _MACRO + template
    return {"date_string": _DATE.strftime("%d %b %Y"), "chat_template": template}
