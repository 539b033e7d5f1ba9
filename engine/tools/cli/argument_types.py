"""Types of arguments of the command line. Each function reads one argument.

An ArgumentTypeError is a sentence on what is wrong with the text.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from engine.config.limits import LARGEST
from engine.config.settings import AUTO
from engine.errors import RunError
from engine.paths import named_folder, preset_file
from engine.text import GIB

HIGHEST_PORT = 65_535
LONGEST_SECONDS = 86_400
LARGEST_GIB = 1_000_000
LARGEST_SAMPLE = 100_000
"""Answers and tokens that `bench` draws at most."""


def port(text: str) -> int:
    """Returns a port number. Raises ArgumentTypeError for a text that names no port."""
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= HIGHEST_PORT:
        raise argparse.ArgumentTypeError(f"there is no port {text}; choose 1 to {HIGHEST_PORT}")
    return int(text)


def path(text: str) -> Path:
    """Returns a path. Raises ArgumentTypeError for a text that is none."""
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


def answers_to_sample(text: str) -> tuple[int, int, int]:
    """Returns numbers of prompts, of answers to each and of tokens of an answer, from a text such
    as 64x8x256. Raises ArgumentTypeError for another text.
    """
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of prompts, answers and tokens; give them as in 64x8x256"
        )
    prompts, answers, tokens = map(int, parts)
    if not (0 < prompts * answers <= LARGEST_SAMPLE and 0 < tokens <= LARGEST_SAMPLE):
        raise argparse.ArgumentTypeError(
            f"{text!r} is out of range; answers and tokens are 1 to {LARGEST_SAMPLE:,}"
        )
    return prompts, answers, tokens


def gpus(text: str) -> int | str:
    """Returns a number of GPUs, or `auto`. Raises ArgumentTypeError for another text."""
    if text == AUTO:
        return text
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= LARGEST["gpus"]:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no number of GPUs; give 1 to {LARGEST['gpus']}, or auto"
        )
    return int(text)


def gib(text: str) -> int:
    """Returns a size in bytes, given in GiB and more than 0. Raises ArgumentTypeError for another
    text.
    """
    try:
        size = float(text) * GIB
    except ValueError:
        size = math.nan
    if not 1 <= size <= LARGEST_GIB * GIB:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no size; give GiB, more than 0 and at most {LARGEST_GIB}"
        )
    return int(size)


def rows(text: str) -> int:
    """Returns a number of rows, at least 1."""
    return _number(text, "rows", 1)


def steps(text: str) -> int:
    """Returns a number of steps, at least 1."""
    return _number(text, "steps", 1)


def samples(text: str) -> int:
    """Returns a number of samples, at least 1."""
    return _number(text, "samples", 1)


def tokens(text: str) -> int:
    """Returns a number of tokens of a row, at least 2: one to read and one to predict."""
    return _number(text, "tokens", 2)


def shots(text: str) -> int:
    """Returns a number of examples, which may be 0."""
    return _number(text, "examples", 0)


def nodes(text: str) -> int:
    """Returns a number of nodes, at least 1."""
    return _number(text, "nodes", 1)


def rate(text: str) -> float:
    """Returns a rate in Gbit/s, above 0. Raises ArgumentTypeError for another text."""
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no rate in Gbit/s; give a number above 0")
    return found


def _number(text: str, what: str, least: int) -> int:
    """Returns a number of at least `least`. Raises ArgumentTypeError for another text."""
    number = int(text) if text.isdecimal() else -1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of {what}; give {least} or more")
    return number
