"""The same date in chat templates on every day: a resumed run, or one that is asked, sees what it
was trained on.

Templates know the date as `date_string`, or ask for it with `strftime_now(format)`. The library
passes plain values on to a template and no functions, so the second one is answered by a macro
before the template's own text.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

_DATE = datetime(2024, 7, 26)
"""What Llama's templates write where they are told no date."""
_DIRECTIVES = [
    f"%{flag}{letter}" for letter in "aAbBcdDeFgGhHIjklmMpPrRSTuUVwWxXyYZz" for flag in ("", "-")
]
_SAID = "".join(
    f".replace({directive!r}, {_DATE.strftime(directive)!r})" for directive in _DIRECTIVES
)
# The empty expression keeps the line end that may begin the template: one behind a tag would be
# left away.
_MACRO = "{% macro strftime_now(format) %}{{ format" + _SAID + " }}{% endmacro %}{{ '' }}"


def fixed_date(tokenizer: Any, tools: list[Any] | None = None) -> dict[str, Any]:
    """Arguments of `tokenizer.apply_chat_template` with which its template writes 26 July 2024, at
    midnight, as today. `tools` are those of the conversation: a tokenizer may have a template of
    its own for them. Raises ValueError for a tokenizer without a template.
    """
    template = tokenizer.get_chat_template(tools=tools)
    return {
        "date_string": _DATE.strftime("%d %b %Y"),
        "chat_template": _MACRO + template if "strftime_now" in template else template,
    }
