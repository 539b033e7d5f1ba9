"""Chat templates see the same date every day, so that a resumed run, or a trained model that
answers questions, sees the same text as in training.

Templates read the date from `date_string`, or call `strftime_now(format)`. The library passes only
plain values to a template, not functions, so a macro put before the template's own text defines
`strftime_now`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

_DATE = datetime(2024, 7, 26)
"""Llama's templates write this date if none is given."""
_DIRECTIVES = [
    f"%{flag}{letter}" for letter in "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYZz" for flag in ("", "-")
]
# The macro returns its argument with every directive replaced.
_REPLACED = "".join(
    f".replace({directive!r}, {_DATE.strftime(directive)!r})" for directive in _DIRECTIVES
)
# The empty expression keeps a line break at the start of the template: Jinja drops a line break
# right after a tag.
_MACRO = "{% macro strftime_now(format) %}{{ format" + _REPLACED + " }}{% endmacro %}{{ '' }}"


def fixed_date(tokenizer: Any, tools: list[Any] | None = None) -> dict[str, Any]:
    """Returns the arguments with which a chat template takes 26 July 2024, at
    midnight, as the current date. `tools` are those of the conversation, because a tokenizer may
    have a separate template for tools. Raises ValueError for a tokenizer without a template.
    """
    template = tokenizer.get_chat_template(tools=tools)
    if "strftime_now" in template:
        template = _MACRO + template
    return {"date_string": _DATE.strftime("%d %b %Y"), "chat_template": template}
