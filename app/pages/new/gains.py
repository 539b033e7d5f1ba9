"""What more GPU memory or RAM would save of a step of a draft. Finding it takes seconds, so a
process of its own does it: neither the next fit panel nor a run waits for it.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import sys
import threading
from collections.abc import Mapping

import orjson

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.helper_process import HelperProcess, take_output
from engine.machine.read_machine import Machine
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool_times import gains

_PROGRAM = "from app.pages.new.gains import answer; answer()"
_LENGTH = struct.Struct("<Q")
_NICE = 10
_PATIENCE = 60.0
"""Seconds without an answer after which the process is ended."""
Found = Mapping[PartName, float]


class Gains:
    """Works out one answer at a time. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._helper: HelperProcess | None = None

    def find(self, config: TrainConfig, machine: Machine) -> Found | None:
        """Returns what `engine.planning.fit.pool_times.gains` does. Returns None where `give_up`
        was called meanwhile, where another answer is asked for, and where there is none.
        """
        self.give_up()
        try:
            helper = HelperProcess(_PROGRAM, {"OMP_NUM_THREADS": "1"}, quiet=True)
        except OSError:
            return None
        with self._lock:
            self._helper = helper
        try:
            asked = pickle.dumps((config, machine))
            helper.send(_LENGTH.pack(len(asked)), asked)
            found = helper.next_line(_PATIENCE)
        except OSError:
            return None
        finally:
            with self._lock:
                if self._helper is helper:
                    self._helper = None
            helper.close()
        return {PartName(name): saved for name, saved in found["gains"].items()} if found else None

    def give_up(self) -> None:
        """Ends the work that is under way."""
        with self._lock:
            if self._helper is not None:
                self._helper.kill()


def answer() -> None:
    """Answers one question on the input: the process that `Gains` starts does so, and ends."""
    os.nice(_NICE)
    output = take_output()
    asked = sys.stdin.buffer
    (length,) = _LENGTH.unpack(asked.read(_LENGTH.size))
    config, machine = pickle.loads(asked.read(length))
    threading.Thread(target=_end_with_owner, name="owner", daemon=True).start()
    try:
        found = gains(config, machine, shape_of_run(config))
    except RamstreamError:
        return  # the fit panel says what is wrong
    saved = {name.value: seconds for name, seconds in found.items()}
    output.write(orjson.dumps({"gains": saved}) + b"\n")
    output.flush()


def _end_with_owner() -> None:
    """Ends this process once its input has ended, since its owner is gone then."""
    while os.read(0, 1):
        pass
    signal.raise_signal(signal.SIGKILL)
