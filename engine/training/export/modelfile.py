"""The Modelfile of an exported folder, by which Ollama runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from engine.data.tokens.render import ChatRenderer
from engine.data.tokens.rendered import Handling
from engine.errors import RamstreamError
from engine.training.export.ollama_template import NoShape, shape_of

MODELFILE = "Modelfile"
_STOP = "PARAMETER stop "


def modelfile(tokenizer: Any, ends: Sequence[str] = (), source: str = ".") -> str:
    """Returns the Modelfile of an exported folder, with the model in `source`. It has a TEMPLATE
    only if that gives the same tokens as the tokenizer's own chat template; else a comment has the
    reason. Answers stop at `ends`, the tokens that were trained to end one, and where the template
    ends a turn.

    Ollama needs that TEMPLATE (server/model.go and server/images.go of its commit fb307609). Where
    a Modelfile has none, `ollama create` compares the model's own chat template with a list that it
    has, and adds the nearest one of less than 100 edits, which may write other tokens. Only where
    none is as near, the model's own is used, and that by versions since June 2026 alone: earlier
    ones write the bare text. Newer versions take the model's own in place of ours where it knows
    tools or thinking.
    """
    lines = ["# ollama create NAME -f Modelfile", f"FROM {source}"]
    stops = [*ends, *_template_ends(tokenizer)]
    try:
        shape = shape_of(tokenizer)
    except NoShape as error:
        lines += [
            f"# There is no TEMPLATE here: {error}.",
            "# Ollama then takes one that it knows, if it is like the model's own, or else, since",
            "# June 2026, the model's own. Compare its answers before you rely on it.",
        ]
    else:
        lines += [
            "# These turns give the same tokens as the tokenizer's own chat template; both were",
            "# compared when this file was written.",
            f'TEMPLATE """{shape.in_go}"""',
        ]
    for stop in dict.fromkeys(filter(None, stops)):
        lines.append(f"{_STOP}{json.dumps(stop, ensure_ascii=False)}")
    return "\n".join(lines) + "\n"


def stops_in(text: str) -> list[str]:
    """Returns the stops of a Modelfile that `modelfile` has written. Raises ValueError for a line
    that it did not write.
    """
    lines = text.splitlines()
    found = [line.removeprefix(_STOP) for line in lines if line.startswith(_STOP)]
    return [str(json.loads(stop)) for stop in found]


def _template_ends(tokenizer: Any) -> list[str]:
    """Returns the ends of turns that the chat template writes: tokens or, where there are none, a
    text.
    """
    try:
        ends = ChatRenderer(tokenizer, Handling()).ends
    except RamstreamError:  # the template exceeds its limits
        return []
    return [*ends.tokens, ends.text]
