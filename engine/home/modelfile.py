"""A `Modelfile` tells Ollama how to run an exported folder."""

from __future__ import annotations

import json
from typing import Any

from engine.home.chat_shape import ChatShape, NoShape, shape_of

MODELFILE = "Modelfile"


def modelfile(tokenizer: Any) -> str:
    """Returns the Modelfile of an exported folder. It has a TEMPLATE only if that gives the same
    tokens as the tokenizer's own chat template; else a comment says why it has none.
    """
    try:
        shape = shape_of(tokenizer)
    except NoShape as error:
        return _without_template(str(error))
    lines = [
        "# ollama create NAME -f Modelfile",
        "FROM .",
        "# These turns give the same tokens as the tokenizer's own chat template; both were",
        "# compared when this file was written.",
        f'TEMPLATE """{shape.in_go}"""',
    ]
    stop = _stop(shape, tokenizer)
    if stop:
        lines.append(f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def _without_template(why: str) -> str:
    return (
        "# ollama create NAME -f Modelfile\n"
        "FROM .\n"
        f"# There is no TEMPLATE here: {why}.\n"
        "# Ollama then takes one that it knows, or none; compare its answers before you rely on it."
        "\n"
    )


def _stop(shape: ChatShape, tokenizer: Any) -> str:
    """Returns the special token that ends an answer, or an empty text."""
    after = shape.answer_after.strip()
    specials = [token for token in tokenizer.all_special_tokens if after.startswith(token)]
    return max(specials, key=len, default="")
