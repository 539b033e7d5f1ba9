"""The best weights so far, by validation loss or exact match, in the run's folder `best`.

They are a checkpoint of weights alone, written in the same way, beside training: whatever happens
at any moment, the folder holds complete weights once it has held any. The new ones are written,
then named, and only then are the old ones deleted.

They matter less than the run. So they never pause a run, and leave the disk to the checkpoints and
the export: where there is no room, or the disk refuses, a warning is logged once, and training
continues.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError, DiskFullError
from engine.files import disk_free
from engine.planning.fit import checkpoint_sizes
from engine.planning.fit.checkpoint_sizes import export_bytes
from engine.runs.record.events import BestKept
from engine.runs.record.validation import Score
from engine.text import in_gib
from engine.training.checkpoints.async_writer import AsyncCheckpoint, AsyncWriter
from engine.training.checkpoints.checkpoint import (
    CheckpointInfo,
    Contents,
    folders_by_step,
    write_checkpoint,
)
from engine.training.checkpoints.plane_snapshot import Ended, Snapshot
from engine.training.loop.prepare import Prepared
from engine.training.loop.session import Session


class BestWeights:
    """The best weights of one session of a run; only the training loop calls this.

    An update that waits for their writing ends it where `gives_way`, which any thread may call,
    returns True.
    """

    def __init__(self, session: Session, prepared: Prepared, gives_way: Callable[[], bool]):
        self._session = session
        self._prepared = prepared
        self._root = session.folder.best_path
        output, shape = session.config.output, prepared.planned.job.shape
        exported = export_bytes(session.config, shape)
        self._is_on = output.keeps_best and prepared.planned.keeps_best
        self._others = {
            "a checkpoint": shape.states.checkpoint_bytes(output.checkpoint),
            "the export": exported if output.export else 0,
        }
        """Bytes on the disk that are reserved for these, by name."""
        self._writer = AsyncWriter(prepared.host_states, prepared.copies, gives_way)
        self._warned = False
        if output.keeps_best and len(prepared.data.eval) and not self._is_on:
            self._warn_once("The best weights are not kept: the disk has no room for them.")

    @property
    def is_on(self) -> bool:
        """Whether weights are kept in this session."""
        return self._is_on

    def path_of(self, step: int) -> Path | None:
        """Returns the folder of the weights of `step`, or None if they are not kept."""
        return folders_by_step(self._root).get(step)

    def take(self, step: int, is_last: bool = False) -> None:
        """Keeps the weights after `step` if they are better than those that are kept, and than
        those before training. Nothing is done if that step was not evaluated.

        The planes must hold that step. No checkpoint follows if this `is_last`.
        """
        validation = self._session.recorder.snapshot.validation
        score = validation.newest
        if not self._is_on or score is None or score.step != step:
            return
        known = [each for each in (validation.before, validation.kept) if each is not None]
        if not all(score.is_better_than(each, validation.by) for each in known):
            return
        self.cancel()  # what is still being written is worse
        contents = Contents(
            self._prepared.host_states,
            _score_record(score),
            self._prepared.buffers,
            holds="weights",
        )
        if not self._has_room(step, contents, is_last):
            return
        if contents.most_bytes < checkpoint_sizes.SMALL_BYTES:
            self._write_now(score, contents)
        else:
            self._begin(score, contents)

    def _has_room(self, step: int, contents: Contents, is_last: bool) -> bool:
        """Returns whether there is room beside what the run must write; if not, that is logged."""
        others = {
            what: size
            for what, size in self._others.items()
            if size and not (is_last and what == "a checkpoint")
        }
        needed = contents.needed_bytes(self._root)
        free = disk_free(self._session.folder.path)
        if free >= needed + sum(others.values()):
            return True
        beside = f" beside {' and '.join(others)}" if others else ""
        self._warn_once(
            f"The weights of step {step:,} are the best so far and are not kept: they need "
            f"{in_gib(needed)}{beside}, and {in_gib(free)} are free. Training goes on; free some "
            "disk space to keep the next that are better."
        )
        return False

    def _warn_once(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._session.log("warning", text)

    # ------------------------------------------------------------------ writing

    def _write_now(self, score: Score, contents: Contents) -> None:
        """Writes the weights of a small model while training stands still."""
        try:
            info = write_checkpoint(self._root, score.step, contents, keep=1)
        except CheckpointError as error:
            self._refused(score.step, error)
        else:
            self._record(info, score, waited=info.seconds, copied=0)

    def _begin(self, score: Score, contents: Contents) -> None:
        record = partial(self._record_snapshot, score)
        self._writer.begin(self._root, score.step, contents, 1, record)

    def _record_snapshot(self, score: Score, info: CheckpointInfo, snapshot: Snapshot) -> None:
        self._record(info, score, snapshot.waited_seconds, snapshot.copied_bytes)

    def _record(self, info: CheckpointInfo, score: Score, waited: float, copied: int) -> None:
        """Records weights that are complete; their own thread may call this."""
        path = str(info.path.relative_to(self._session.folder.path))
        self._session.recorder.emit(
            BestKept(
                step=info.step,
                path=path,
                bytes=info.bytes,
                seconds=info.seconds,
                waited_seconds=waited,
                copied_bytes=copied,
                **_score_record(score),
            )
        )

    def _refused(self, step: int, error: CheckpointError) -> None:
        reason = str(error).rstrip(".")
        if isinstance(error, DiskFullError):
            free = in_gib(disk_free(self._session.folder.path))
            reason = f"{in_gib(error.needed)} are needed, and {free} are free"
        self._warn_once(
            f"The weights of step {step:,} are the best so far and could not be kept: {reason}. "
            "Training goes on; those that were kept before are untouched."
        )

    # ------------------------------------------------------------------ what is under way

    def poll(self) -> None:
        """Records weights that were written meanwhile."""
        self._take_note(self._writer.ended())

    def finish(self, poll: Callable[[], None] | None = None) -> None:
        """Waits for the weights that are being written. `poll` is called meanwhile, and may raise
        to end the wait.
        """
        self._take_note(self._writer.finished(poll))

    def cancel(self) -> None:
        """Gives up the weights that are being written."""
        with contextlib.suppress(Exception):  # they are not to be written any more
            self._take_note(self._writer.cancelled())

    def close(self) -> None:
        """Finishes the weights that are being written, after an error too."""
        with contextlib.suppress(Exception):  # the error that ends the run is known already
            self.finish()

    def _take_note(self, done: AsyncCheckpoint | None) -> None:
        if done is None:
            return
        try:
            done.result()
        except Ended:
            pass  # it gave way, or better ones take its place
        except CheckpointError as error:
            self._refused(done.step, error)


def _score_record(score: Score) -> dict[str, Any]:
    """Returns the score as it is kept in the record and in the weights' folder."""
    return {"loss": score.loss, "correct": score.correct, "total": score.total}
