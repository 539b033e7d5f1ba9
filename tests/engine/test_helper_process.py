"""Helper processes: what they are asked and answer, and that none is left."""

from __future__ import annotations

import contextlib
import os
import time

import psutil
import pytest

from engine.helper_process import HelperProcess, ending

ECHO = """
import json, sys
from engine.helper_process import take_output
answers = take_output()
print("a library speaks", flush=True)
for line in sys.stdin:
    answers.write(json.dumps({"heard": line.strip()}).encode() + b"\\n")
    answers.flush()
"""


def test_it_answers_in_lines_and_is_gone_when_it_is_closed(capfd):
    with contextlib.closing(HelperProcess(ECHO, {})) as helper:
        helper.send(b"one\n")
        assert helper.next_line(60) == {"heard": "one"}
        assert helper.next_line(0.01) is None
        assert os.getsid(helper._process.pid) == helper._process.pid
    assert helper.wait() == -9 and not psutil.pid_exists(helper._process.pid)
    helper.close()
    assert capfd.readouterr() == ("", "a library speaks\n")


def test_its_end_is_an_empty_line(capfd):
    with contextlib.closing(
        HelperProcess("import sys; sys.stderr.write('secret'); sys.exit(3)", {}, quiet=True)
    ) as helper:
        assert helper.next_line(60) == {} and ending(helper.wait()) == "exit code 3"
        with pytest.raises(OSError):
            helper.send(b"x" * 100_000)
    assert capfd.readouterr().err == ""


def test_it_finds_the_program_and_its_variables_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    (tmp_path / "json.py").write_text("raise SystemExit(9)")
    program = (
        "import os, json\n"
        "print(json.dumps([os.environ['WORD'], os.environ['PYTHONPATH']]), flush=True)\n"
    )
    with contextlib.closing(HelperProcess(program, {"WORD": "said"})) as helper:
        word, path = helper.next_line(60)
    assert word == "said" and path.endswith(f"{os.pathsep}elsewhere")


def test_a_helper_reads_the_end_of_its_input_when_its_owner_is_killed():
    owner = (
        "import os; from engine.helper_process import HelperProcess\n"
        "helper = HelperProcess('import sys; sys.stdin.read()', {})\n"
        "print(helper._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    with contextlib.closing(HelperProcess(owner, {})) as started:
        pid = started.next_line(60)
        assert started.wait() == -9
    until = time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(
    "code, words", [(0, "exit code 0"), (3, "exit code 3"), (-9, "SIGKILL"), (-40, "signal 40")]
)
def test_how_it_ended_in_words(code, words):
    assert ending(code) == words
