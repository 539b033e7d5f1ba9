"""What has to vary between two runs of the same program is taken out here, and nothing else.

`Side.plain` takes out folders, ids of runs and processes. What is here goes further, for what was
measured: seconds, rates and sizes. It is used only where they are measured; a figure that follows
from settings is compared as it stands.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

_NUMBER = r"(?<![\w.])[-+−]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?k?"
_MEASURES = (
    (re.compile(_NUMBER + r" ?(?:tokens/s|TFLOPS|GB/s|step/s|billion parameters/s)\b"), "RATE"),
    (re.compile(_NUMBER + r" ?(?:bytes|B|kB|KB|MB|GB|TB|KiB|MiB|GiB|TiB)\b"), "SIZE"),
    (re.compile(_NUMBER + r" ?(?:µs|ms|seconds|second|s|min|hours|hour|h|days|day)\b"), "TIME"),
    (re.compile(_NUMBER + r" ?%"), "SHARE"),
)
_STEPS = re.compile(r"\bstep[- ]\d[\d,]*|\b\d[\d,]* (?:of \d[\d,]*|steps)\b")
_BAR = re.compile(r"\d+%\||\|\s*\d+/\d+ \[|it/s\]|step/s")


def unmeasured(text: str) -> str:
    """The text with words in the place of what was measured."""
    for pattern, word in _MEASURES:
        text = pattern.sub(word, text)
    return text


def uncounted(text: str) -> str:
    """The text without numbers of steps, where these depend on the moment."""
    return _STEPS.sub(lambda found: re.sub(r"\d[\d,]*", "N", found[0]), text)


def lines_of(text: str) -> list[str]:
    """Lines without progress bars, which are drawn over one another, and without the places that a
    traceback names.
    """
    lines = [
        line.rstrip()
        for line in re.split(r"[\r\n]+", text.replace("\x1b[A", "\n"))
        if line.strip() and not _BAR.search(line)
    ]
    if (
        "Traceback (most recent call last)" in text
    ):  # which lines of the program are in it is nobody's business
        lines = [line for line in lines if not line.startswith("  ")]
    return lines


def each_text(value: Any, change: Callable[[str], str]) -> Any:
    """JSON values with every text changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [each_text(item, change) for item in value]
    if isinstance(value, dict):
        return {change(key): each_text(item, change) for key, item in value.items()}
    return value


def without(value: Any, names: set[str]) -> Any:
    """JSON values in which the values of these keys are words for their kinds; the keys are still
    compared.
    """
    if isinstance(value, list):
        return [without(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: kind_of(item) if key in names else without(item, names)
            for key, item in value.items()
        }
    return value


def shape_of(value: Any) -> Any:
    """The keys and the kinds of values. A list is the set of the shapes of its items, however many
    there are.
    """
    if isinstance(value, dict):
        return {key: shape_of(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes = {json.dumps(shape_of(item), sort_keys=True) for item in value}
        return [json.loads(shape) for shape in sorted(shapes)]
    return kind_of(value)


def kind_of(value: Any) -> str:
    """One word for a JSON value."""
    if isinstance(value, bool):
        return "<switch>"
    if isinstance(value, (int, float)):
        return "<number>"
    return {str: "<text>", list: "<list>", dict: "<object>"}.get(type(value), "<null>")


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:24]
