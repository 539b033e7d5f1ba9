"""The checkpoints of one run: periodic ones, the last one, and those at a stop or a failure.

There are two ways. While steps continue, `begin` writes the state of the step that was submitted
last (`engine.training.checkpoints.async_writer`); updates of later steps wait for it as little as
the RAM for copies allows. While training stands still, `save` writes and waits. Only one checkpoint
is written at a time: one that falls due meanwhile is postponed to the first step at which the disk
is free again.

A run with `output.checkpoint: none` writes none of these, so no step needs saving.

A checkpoint beside training gives way where an update waits for it while the run is asked to end,
or while host memory is low.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from engine.config.settings import TrainConfig
from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import CheckpointWritten
from engine.text import in_gb, in_seconds
from engine.training.checkpoints.async_writer import AsyncCheckpoint, AsyncWriter
from engine.training.checkpoints.checkpoint import (
    CheckpointInfo,
    Contents,
    change_state,
    folders_by_step,
    write_checkpoint,
)
from engine.training.checkpoints.end_message import EndMessage
from engine.training.checkpoints.plane_snapshot import Ended, Snapshot
from engine.training.checkpoints.saved_on_disk import SavedSteps
from engine.training.loop.prediction_check import PredictionCheck
from engine.training.loop.prepare import Prepared
from engine.training.loop.resume import resume_state
from engine.training.loop.session import Session


class Saver:
    """Writes the checkpoints of one session of a run. Only the training loop calls it, but for
    `begin_early`, for which it lends what it holds (`engine.training.loop.early_save`).

    `asks_to_end`, which any thread may call, returns whether the run is asked to end, or memory is
    low.
    """

    def __init__(
        self,
        session: Session,
        prepared: Prepared,
        prediction_check: PredictionCheck,
        asks_to_end: Callable[[], bool],
    ):
        self._session = session
        self._prepared = prepared
        self._prediction_check = prediction_check
        self._kind = session.config.output.checkpoint
        self._saved_step = self._full_step = prepared.step
        self._writer = AsyncWriter(prepared.host_states, prepared.copies, asks_to_end)
        keeps_none = self._kind == "none" and not prepared.planned.keeps_best
        if keeps_none and not session.config.output.export:
            session.log(
                "warning",
                "This run keeps nothing that it trains, since output.checkpoint is none and "
                "output.export is false; change one of them to keep its weights.",
            )
        self._due: int | None = None
        """Step after which a postponed checkpoint fell due."""

    @property
    def kept(self) -> EndMessage:
        """What of this run is on the disk."""
        full = self._full_step
        if full != self._saved_step and not self._path(full).is_dir():
            full = 0  # newer checkpoints, of weights alone, have taken its place
        best = max(folders_by_step(self._session.folder.best_path), default=None)
        return EndMessage(self._kind, SavedSteps(self._saved_step or None, full or None, best))

    @property
    def while_stopping(self) -> str:
        """Why a run that was stopped has not ended yet, where the usual reason is wrong."""
        return "Finishing the step." if self._kind == "none" else ""

    def saving_text(self, step: int, config: TrainConfig) -> str:
        """Returns a text on what has to be written of `step`, about how long that takes, and from
        where a resume would continue until then; "" where nothing has to be written.
        """
        if self.has(step):
            return ""
        contents = self._contents(config)
        size = contents.plane_bytes if self._saved_step else contents.most_bytes
        text = f"Step {step:,} is being saved: {in_gb(size)}"
        earlier = self._session.recorder.snapshot.checkpoints[-1:]
        rates = [each.bytes / each.seconds for each in earlier if each.seconds > 0]
        if rates and rates[0] > 0:
            text += f", about {in_seconds(size / rates[0])} at the {in_gb(rates[0])}/s of the last"
        return f"{text}. If the process is ended sooner, {self.kept.continues()}."

    # ------------------------------------------------------------------ while steps continue

    def begin(self, step: int, config: TrainConfig) -> bool:
        """Begins to write the state after `step`, the last step that was submitted, or postpones
        that. Returns False for a small model, which is to be saved at once while training stands
        still.
        """
        if self._kind == "none":
            return True
        contents = self._contents(config)
        if contents.most_bytes < checkpoint_sizes.SMALL_BYTES:
            return False
        if self._writer.under_way is not None:
            is_new = step != self._writer.under_way.step  # it may be asked for twice
            if is_new and self._due is None:
                self._due = step
                self._session.log(
                    "info",
                    f"The checkpoint that fell due after step {step:,} is postponed: that of step "
                    f"{self._writer.under_way.step:,} is still being written.",
                )
        else:
            due_step = self._take_due(step)
            if not self.has(step):
                keep = config.output.keep_checkpoints
                self._begin(step, due_step, contents, keep)
        return True

    def begin_early(self, step: int, config: TrainConfig) -> bool:
        """Begins to write the state after `step`, of any size, while the training loop computes.
        Returns whether it is written, or being written; not so while an earlier one is, or where
        the updates of the next step have begun.
        """
        if self.has(step):
            return True
        if self._writer.under_way is not None:
            if self._writer.under_way.step == step:
                return True
            if not self._writer.under_way.is_done:
                return False
            self._take_note(self._writer.ended())
        keep = config.output.keep_checkpoints
        return self._begin(step, self._take_due(step), self._contents(config), keep)

    def _take_due(self, step: int) -> int:
        """Returns the step after which the checkpoint of `step` fell due, or 0 if that is `step`
        itself. Nothing is postponed any more.
        """
        due, self._due = self._due, None
        return 0 if due is None or due == step else due

    def poll(self, step: int, config: TrainConfig) -> None:
        """Records a checkpoint that was written meanwhile, and begins one that was postponed.

        `step` is the last step that was submitted. Raises what the writing raised, such as
        DiskFullError.
        """
        self._take_note(self._writer.ended())
        # A step that failed may have to be repeated before it can be saved.
        if self._due is not None and self._due <= step and self._writer.under_way is None:
            self.begin(step, config)

    def _begin(self, step: int, due_step: int, contents: Contents, keep: int) -> bool:
        root, record = self._session.folder.checkpoints_path, partial(self._record, due_step)
        return self._writer.begin(root, step, contents, keep, record)

    def _record(self, due_step: int, info: CheckpointInfo, snapshot: Snapshot) -> None:
        """Records a checkpoint that is complete; its own thread calls this."""
        self._session.recorder.emit(
            CheckpointWritten(
                info.step,
                str(info.path.relative_to(self._session.folder.path)),
                info.bytes,
                info.seconds,
                snapshot.waited_seconds,
                snapshot.copied_bytes,
                due_step,
                self._kind,
            )
        )

    def _take_note(self, done: AsyncCheckpoint | None) -> None:
        """Takes over the result of a checkpoint that has ended, if one has. Raises what its writing
        raised.
        """
        if done is None:
            return
        try:
            info = done.result()
        except Ended:
            # Its step failed before it was applied, or it gave way to an update.
            self._due = self._due or done.step
            return
        self._is_saved(info)

    def take_rounding(self, step: int, rounding: Mapping[str, Any]) -> None:
        """Writes into the checkpoint of `step` how later steps are rounded, since they were planned
        anew after it was begun. No lane may be working.
        """
        is_full = self._full_step == step
        under_way = self._writer.under_way
        if under_way is not None and under_way.step == step:
            under_way.wait()
            is_full = self._kind == "full"
        path = self._path(step)
        if not is_full or not path.is_dir():
            return
        try:
            change_state(path, {"rounding": dict(rounding)})
        except OSError as error:
            self._session.log(
                "warning",
                f"The checkpoint of step {step:,} does not tell of the new plan ({error.strerror}):"
                " a resume from it adds up in the order of the plan before.",
            )

    # ------------------------------------------------------------------ while training stands still

    def has(self, step: int) -> bool:
        """Returns whether the state after `step` needs no saving."""
        return self._kind == "none" or step in (0, self._saved_step)

    def save(self, step: int, config: TrainConfig, poll: Callable[[], None] | None) -> None:
        """Writes the state after `step`, the last one, once every submitted step is applied.

        No other checkpoint may be under way. `poll` is called often, and may raise to cancel the
        checkpoint. Raises what the writing raises, such as DiskFullError.
        """
        due_step = self._take_due(step)
        info = write_checkpoint(
            self._session.folder.checkpoints_path,
            step,
            self._contents(config),
            config.output.keep_checkpoints,
            self._session.progress("checkpoint", poll),
        )
        self._is_saved(info)
        path = str(info.path.relative_to(self._session.folder.path))
        self._session.recorder.emit(
            CheckpointWritten(
                info.step, path, info.bytes, info.seconds, info.seconds, 0, due_step, self._kind
            )
        )

    def keep_weights(self, step: int, config: TrainConfig) -> None:
        """Writes the weights of `step`, which the planes hold, where the run has not kept them: to
        export them, although it writes no checkpoints. Raises what the writing raises.
        """
        saved = self.kept.saved
        if step in (saved.newest, saved.best):
            return
        info = write_checkpoint(
            self._session.folder.checkpoints_path,
            step,
            replace(self._contents(config), holds="weights"),
            config.output.keep_checkpoints,
            self._session.progress("checkpoint"),
        )
        self._saved_step = info.step
        path = str(info.path.relative_to(self._session.folder.path))
        self._session.recorder.emit(
            CheckpointWritten(info.step, path, info.bytes, info.seconds, holds="weights")
        )

    def finish(self, poll: Callable[[], None] | None = None) -> None:
        """Waits for the checkpoint that is under way, if there is one.

        `poll` is called meanwhile, and may raise to end the wait. Raises what the writing raised.
        """
        self._take_note(self._writer.finished(poll))

    def cancel(self, but_of: int | None = None) -> None:
        """Cancels the checkpoint that is under way, unless it is that of step `but_of`."""
        self._due = None
        under_way = self._writer.under_way
        if under_way is not None and under_way.step != but_of:
            with contextlib.suppress(Exception):  # it was not to be written any more
                self._take_note(self._writer.cancelled())
            self._due = None

    def finish_or_cancel(self, step: int, is_whole: bool) -> None:
        """Brings the checkpoint under way to an end, after a failure.

        `step` is the last good one. Where the planes are whole, it is saved next, so an older one
        is cancelled. Otherwise the checkpoint under way is the best there is.
        """
        if is_whole:
            self.cancel(but_of=step)
        with contextlib.suppress(Exception):  # the error that ends the run is known already
            self.finish()

    def close(self) -> None:
        """Finishes the checkpoint under way, after an error too, if its step was applied."""
        under_way = self._writer.under_way
        if under_way is None:
            return
        if not under_way.snapshot.is_ready:
            # While a lane waits for disk space, it cannot be drained.
            self._session.recorder.wait_for_disk_space(None)
            with contextlib.suppress(Exception):  # the error that ends the run is known already
                self._prepared.drain()
        if under_way.snapshot.is_ready:
            with contextlib.suppress(Exception):
                self.finish()
        else:
            self.cancel()

    # ------------------------------------------------------------------ inside

    def _is_saved(self, info: CheckpointInfo) -> None:
        """Sets the step of a checkpoint that is complete as the saved one."""
        self._saved_step = info.step
        if self._kind == "full":
            self._full_step = info.step
        self._prediction_check.checkpoint(info.plane_bytes)

    def _path(self, step: int) -> Path:
        return self._session.folder.checkpoints_path / f"step-{step}"

    def _contents(self, config: TrainConfig) -> Contents:
        prepared = self._prepared
        state = resume_state(
            config,
            prepared.data.fingerprint,
            prepared.chosen.rounding,
            prepared.total_steps,
            prepared.host_states.held.skipped,
        )
        holds: Literal["full", "weights"] = "weights" if self._kind == "weights" else "full"
        return Contents(prepared.host_states, state, prepared.buffers, holds=holds)
