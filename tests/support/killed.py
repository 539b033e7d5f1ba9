"""Runs that are killed at chosen moments."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def before(function: Callable, call: Callable[[], None]) -> Callable:
    def wrapped(*args, **kwargs):
        call()
        return function(*args, **kwargs)

    return wrapped


def after(function: Callable, call: Callable[[], None]) -> Callable:
    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        call()
        return result

    return wrapped


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def run_alone(module: str, *arguments: str) -> str:
    """Returns what `python -m` prints of a module whose process has one thread. It must succeed."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        cwd=PROGRAM_ROOT,
        env=os.environ | ONE_THREAD,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def get_ready(module: str) -> None:
    """Loads what a run needs, so that processes that are forked from here begin at once. Begins
    `module` anew where its libraries may have threads.
    """
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        # The libraries read these when they are imported.
        arguments = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, arguments, os.environ | ONE_THREAD)

    import engine.training.loop.prepare
    import engine.training.loop.trainer  # noqa: F401
    from engine.model.build.library import transformers
    from engine.runtime.optimizer.host_kernels import kernel

    transformers()
    for name in ("split", "join", "adamw_float", "adamw_split"):
        kernel(name)


def know_model(config: TrainConfig) -> None:
    """Builds and counts the model of runs, so that no process that is forked from here does."""
    from engine.model.build.build import build_model
    from engine.model.build.measure_shape import shape_of
    from engine.model.build.pretrained_files import load_config
    from tests.support.counted_once import counting_once

    _counting.append(counting_once())
    next(_counting[-1])
    shape_of(build_model(load_config(config.model.source), config.model))


_counting: list[Iterator[None]] = []
"""What counts once does so until the process ends."""
