"""A process that has imported the large libraries once, and forks for every run of tests.

Most changes are decided by a test of a second, while importing torch and transformers takes many.
The fork has none of our own modules, so that it imports those of the copy it works in. It reads a
request from each line of its standard input, and answers with a line.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from engine.paths import PROGRAM_ROOT

LIBRARIES = ("numpy", "torch", "numba", "transformers", "safetensors.torch", "pytest", "xdist")
OURS = ("engine", "app", "tests", "launch")
TOO_LONG = 1000
"""The answer has this code for a run that took too long."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
"""The libraries read these when they are imported, as tests/conftest.py sets them."""


class WarmProcess:
    """The process as its owner sees it. One thread at a time may use it."""

    def __init__(self, libraries: tuple[str, ...] = LIBRARIES) -> None:
        of_this_run = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
        environment = {k: v for k, v in os.environ.items() if k not in of_this_run}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.changes.warm", *libraries],
            cwd=PROGRAM_ROOT,
            env=environment | _ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, folder: Path, arguments: list[str], seconds: float) -> tuple[int, str]:
        """Runs pytest in `folder`. Returns what it printed, after its exit code, which is negative
        for a signal and TOO_LONG for a run that was ended.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"folder": str(folder), "arguments": arguments, "seconds": seconds}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return answer["code"], answer["said"]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(libraries: list[str]) -> None:
    """Imports `libraries`, and answers requests until there are no more."""
    for name in libraries:
        __import__(name)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        pid = os.fork()
        if pid == 0:
            _test(Path(request["folder"]), request["arguments"], output.fileno())
        deadline = time.monotonic() + request["seconds"]
        code = None
        while code is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                code = TOO_LONG
            else:
                time.sleep(0.02)
        output.seek(0)
        return {"code": code, "said": output.read()}


def _test(folder: Path, arguments: list[str], output: int) -> None:
    """Becomes a run of pytest in `folder`, and never returns."""
    os.setsid()  # what a test has started ends with this session
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    sys.path[:] = [str(folder), *(place for place in sys.path if place != str(PROGRAM_ROOT))]
    for name in list(sys.modules):
        if name.split(".")[0] in OURS:
            del sys.modules[name]
    sys.path_importer_cache.clear()
    code = 3
    try:
        import pytest

        code = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1:])
