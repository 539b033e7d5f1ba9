"""Commands of launch.py that fail, and their sentence."""

from __future__ import annotations

import launch


def bad(capsys, *arguments: str) -> str:
    """Run a command that must fail with exit code 2, and return its one sentence."""
    try:
        code = launch.main(list(arguments))
    except SystemExit as error:
        code = error.code
    captured = capsys.readouterr()
    assert code == 2, captured
    sentence = captured.err.strip()
    assert sentence.startswith("ramstream: ")
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return sentence
