"""What an error of another program says, within a sentence of ours."""

from __future__ import annotations

import pytest

from engine.errors import first_line


@pytest.mark.parametrize(
    "error, text",
    [
        (ValueError("No such thing. \nAdvice on debugging."), "No such thing"),
        (ValueError("\n  one line  \n"), "one line"),
        (KeyError("name"), "there is no 'name'"),
        (AssertionError(), "AssertionError"),
        (OSError(" . "), "OSError"),
        (ValueError("x" * 200), "x" * 200),
        (ValueError("x" * 201), "x" * 197 + "..."),
    ],
)
def test_the_first_line_of_an_error(error, text):
    assert first_line(error) == text
