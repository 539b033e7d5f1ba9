"""Each of these functions reads one argument of the command line.

An ArgumentTypeError says in words what is wrong with the text.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from engine.errors import RunError
from engine.paths import named_folder, preset_file

HIGHEST_PORT = 65_535
LONGEST_SECONDS = 86_400


def port(text: str) -> int:
    """Returns a port number. Raises ArgumentTypeError for a text that names no port."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"there is no port {text}; choose 1 to {HIGHEST_PORT}")
    return int(text)


def path(text: str) -> Path:
    """Returns the path that a person wrote. Raises ArgumentTypeError for a text that is none."""
    if not text.strip():
        raise argparse.ArgumentTypeError("no path is given")
    try:
        named_folder(text)
    except RunError as error:
        raise argparse.ArgumentTypeError(str(error).rstrip(".")) from None
    return Path(text).expanduser()


def preset(text: str) -> Path:
    """Returns the path of a preset. Raises ArgumentTypeError for a text that names none."""
    return preset_file(path(text))


def seconds(text: str) -> float:
    """Returns a time in seconds, of at most a day. Raises ArgumentTypeError for another text."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time; give seconds, more than 0 and at most {LONGEST_SECONDS}"
        )
    return seconds


def rows(text: str) -> int:
    """Returns a number of rows, at least 1."""
    rows = int(text) if text.isdecimal() else 0
    if rows < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows; give 1 or more")
    return rows
