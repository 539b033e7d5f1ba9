"""Checkpoints and the best weights are written in one way while steps go on: an `AsyncWriter` has
one of them written at a time, as an `AsyncCheckpoint` on threads of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.host_threads import default_threads
from engine.training.checkpoints.checkpoint import CheckpointInfo, Contents, write_checkpoint
from engine.training.checkpoints.plane_snapshot import Snapshot
from engine.training.checkpoints.staging import StagingBuffers

POLL_SECONDS = 0.1
"""Seconds between two checks for requests while waiting for a checkpoint."""
Record = Callable[[CheckpointInfo, Snapshot], None]
"""Records a checkpoint that is whole. Its own thread calls this."""


class AsyncCheckpoint:
    """The state after `step`, which is written under `root` as soon as the snapshot in `contents`
    is ready. Of the checkpoints there, the newest `keep` are kept.
    """

    def __init__(self, root: Path, step: int, contents: Contents, keep: int, record: Record):
        assert contents.snapshot is not None  # steps go on
        self.step = step
        self.snapshot = contents.snapshot
        self._root = root
        self._contents = contents
        self._keep = keep
        self._record = record
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
        self.snapshot.end()
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
                ahead = self.snapshot.copy_ahead
                thread = threading.Thread(target=ahead, name="copy-planes", daemon=True)
                thread.start()  # a system may refuse it
                copying.append(thread)
            self.snapshot.wait_until_ready()
            self._info = write_checkpoint(self._root, self.step, self._contents, self._keep)
            self._record(self._info, self.snapshot)
        except BaseException as error:  # noqa: BLE001  raised by `result`, in the training loop
            self._error = error
        finally:
            # Whatever happened, no update waits any longer.
            self.snapshot.end()
            for thread in copying:
                thread.join()
            self.snapshot.release()


class AsyncWriter:
    """Has checkpoints of `states` written, one at a time. Who takes one that has ended asks for its
    result, which may be an error.

    copies: room for chunks whose update may not wait. An update that waits ends the checkpoint
    where `gives_way`, which any thread may call, returns True.
    """

    def __init__(
        self, states: HostStates, copies: StagingBuffers, gives_way: Callable[[], bool] | None
    ):
        self._states = states
        self._copies = copies
        self._gives_way = gives_way
        self.under_way: AsyncCheckpoint | None = None

    def begin(self, root: Path, step: int, contents: Contents, keep: int, record: Record) -> bool:
        """Begins to write the state after `step`, the last one that was submitted, as
        `AsyncCheckpoint` says. Returns False where the updates of a later step have begun.
        """
        assert self.under_way is None
        snapshot = Snapshot(self._states, contents.planes, self._copies, self._gives_way)
        if not self._states.held.read_by(step, snapshot):
            return False
        protected = replace(contents, snapshot=snapshot)
        self.under_way = AsyncCheckpoint(root, step, protected, keep, record)
        return True

    def ended(self) -> AsyncCheckpoint | None:
        """Returns the checkpoint that was under way and has ended, once; None where none has."""
        if self.under_way is None or not self.under_way.is_done:
            return None
        done, self.under_way = self.under_way, None
        self._states.held.release(done.snapshot)
        return done

    def finished(self, poll: Callable[[], None] | None = None) -> AsyncCheckpoint | None:
        """Waits for the checkpoint under way, and returns it as `ended` does. `poll` is called
        meanwhile, and may raise to end the wait.
        """
        while self.under_way is not None and not self.under_way.wait(POLL_SECONDS):
            if poll is not None:
                poll()
        return self.ended()

    def cancelled(self) -> AsyncCheckpoint | None:
        """Gives the checkpoint under way up, and returns it as `ended` does: it may be whole."""
        if self.under_way is not None:
            self.under_way.cancel()
        return self.ended()
