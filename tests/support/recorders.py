"""A stand-in for CUDA graphs on the CPU: a recording runs the recorded work again."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.device.graph_recorder import Recording


class Again:
    """Runs `work` in each replay, with the objects that it was recorded with."""

    def __init__(self, work: Callable[[], None], told: list[str]):
        self._work = work
        self._told = told

    def replay(self) -> None:
        self._told.append("replay")
        self._work()


class AgainRecorder:
    """Records work without running it, and tells what it was asked for. `refuses` is the number of
    a recording that fails, from 1.
    """

    def __init__(self, refuses: int | None = None, draws: bool = False):
        self.told: list[str] = []
        self._refuses = refuses
        self._draws = draws

    def rehearse(self, work: Callable[[], None]) -> None:
        self.told.append("rehearse")
        work()

    def record(self, work: Callable[[], None]) -> Recording:
        self.told.append("record")
        if self.told.count("record") == self._refuses:
            raise RuntimeError("operation not permitted when stream is capturing")
        # The last op of the recorded step would delete the arguments of its blocks.
        micro_batch = inspect.getclosurevars(work).nonlocals["micro_batch"]
        micro_batch.forget_arguments = lambda: None
        return Again(work, self.told)

    def has_drawn(self) -> bool:
        return self._draws

    def tidy(self) -> None:
        self.told.append("tidy")

    def wait(self) -> None:
        self.told.append("wait")

    def clear(self) -> None:
        self.told.append("clear")


class RecordingBackend(CpuBackend):
    """A backend of the CPU that records by running again."""

    def __init__(self, recorder: AgainRecorder | None = None):
        super().__init__()
        self.again = recorder or AgainRecorder()

    def recorder(self) -> AgainRecorder:
        return self.again
