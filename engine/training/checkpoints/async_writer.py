"""An `AsyncCheckpoint` writes one checkpoint on threads of its own while steps go on."""

from __future__ import annotations

import threading
from collections.abc import Callable

from engine.runtime.optimizer.host_threads import default_threads
from engine.training.checkpoints.checkpoint import CheckpointInfo
from engine.training.checkpoints.plane_snapshot import Snapshot


class AsyncCheckpoint:
    """An `AsyncCheckpoint` calls ``write()``, which writes `snapshot`, as soon as that is ready.

    `told` is called with the result on the writing thread, once the checkpoint is whole.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        write: Callable[[], CheckpointInfo],
        told: Callable[[CheckpointInfo], None],
    ):
        self._snapshot = snapshot
        self._write = write
        self._told = told
        self._error: BaseException | None = None
        self._info: CheckpointInfo | None = None
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Tells whether nothing is being written any more."""
        return not self._thread.is_alive()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits until nothing is being written any more, or for `seconds`; returns which it was."""
        self._thread.join(seconds)
        return self.is_done

    def cancel(self) -> None:
        """Gives the checkpoint up, unless it is whole already, and waits until that is done."""
        self._snapshot.end()
        self._thread.join()

    def result(self) -> CheckpointInfo:
        """Returns the checkpoint, when it is done. Raises what the writing raised."""
        if self._error is not None:
            raise self._error
        assert self._info is not None
        return self._info

    def _run(self) -> None:
        copying: list[threading.Thread] = []
        try:
            # Half of the threads stay ahead of the updates, whose lane copies only what it needs
            # now. With a quarter, updates wait (measured on 16 cores). The others are left to
            # AdamW and to the threads that launch the device's work.
            for _ in range(max(1, default_threads() // 2)):
                ahead = self._snapshot.copy_ahead
                thread = threading.Thread(target=ahead, name="copy-planes", daemon=True)
                thread.start()  # a system may refuse it
                copying.append(thread)
            self._info = self._write()
            self._told(self._info)
        except BaseException as error:  # noqa: BLE001  raised by `result`, in the training loop
            self._error = error
        finally:
            # Whatever happened, no update waits any longer.
            self._snapshot.end()
            for thread in copying:
                thread.join()
            self._snapshot.release()
