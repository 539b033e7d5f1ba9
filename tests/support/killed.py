"""Runs that are killed at chosen moments."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

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
