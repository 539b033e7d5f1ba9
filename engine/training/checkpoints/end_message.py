"""What a run has on the disk when it ends, in words, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.output_settings import CheckpointKind
from engine.runtime.host.plane_version import PlaneVersion
from engine.training.checkpoints.saved_on_disk import SavedSteps

_NONE = "as this run writes no checkpoints"


@dataclass(frozen=True)
class EndMessage:
    """`EndMessage` holds what is written by this session of a run, and what is there."""

    kind: CheckpointKind
    saved: SavedSteps

    def when_finished(self, steps: int) -> str:
        """Returns the reason of a run that has done all its steps."""
        if self.kind != "none":
            return f"Finished all {steps} steps."
        if self.saved.newest is None:
            return f"Finished all {steps} steps; no checkpoint is kept, {_NONE}."
        return (
            f"Finished all {steps} steps, of which no checkpoint was written, {_NONE}; the "
            f"checkpoint of step {self.saved.newest:,} is still there."
        )

    def when_ended_early(self, why: str) -> str:
        """Returns the reason of a run that has ended before its last step; `why` says why."""
        return why if self.kind != "none" else f"{why} No checkpoint is kept, {_NONE}."

    def when_unexported(self, ended: str, step: int, why: str, unkept: str) -> str:
        """Returns the reason of a run that `ended` as it should but for its export, of the weights
        of `step`. `unkept` says why these could not be kept either, if so.
        """
        if unkept:
            return f"{ended} But the export failed: {why} Nothing is kept of the run: {unkept}"
        return (
            f"{ended} But the export failed: {why} The weights of step {step:,} are saved, and can "
            "be exported again."
        )

    def when_stopped(self, step: int) -> str:
        """Returns the reason of a run that was stopped after `step`, which was then saved."""
        if self.kind == "none":
            return (
                f"Stopped at step {step}, and nothing is kept of it, {_NONE}; {self.continues()}."
            )
        if self.kind == "weights" and self.saved.full != step:
            return (
                f"Stopped at step {step}. Its weights are saved, and a new run can train on from "
                f"them. {self._resumes()}"
            )
        return f"Stopped and saved at step {step}; it can be resumed."

    def after_failure(self, held: PlaneVersion, problem: str = "") -> str:
        """Returns what is kept of a run that failed, in one or two sentences.

        `problem` says why the last good step could not be saved.
        """
        if held.is_mixed:
            return (
                f"The updates of step {held.writing:,} were being written, so the weights are a "
                f"mixture of two steps and are not saved; {self.continues()}."
            )
        if not held.step:
            return "Nothing was trained yet."
        if self.saved.full == held.step:
            there = f"step {held.step:,} is saved, and a resume goes on from there"
            return f"No finished step is lost: {there}."
        if self.kind == "none":
            return f"Nothing is kept of step {held.step:,}, {_NONE}; {self.continues()}."
        if problem:
            what = problem.rstrip(".")
            return f"Step {held.step:,} could not be saved ({what}); {self.continues()}."
        return (
            f"The weights of step {held.step:,} are saved, and a new run can train on from them. "
            f"{self._resumes()}"
        )

    def _resumes(self) -> str:
        """Says what a resume does where the last weights are kept alone."""
        if self.saved.full is None:
            return "This run has no full checkpoint, so it cannot be resumed."
        return f"A resume goes back to the full checkpoint of step {self.saved.full:,}."

    def continues(self) -> str:
        """Says, as the end of a sentence, from where a resume goes on."""
        newest, full = self.saved.newest, self.saved.full
        if full is not None:
            return f"a resume goes on from the checkpoint of step {full:,}"
        if newest is not None:
            return (
                f"a new run can train on from the weights of step {newest:,}, and this one cannot "
                "be resumed"
            )
        begins = "a resume begins anew"
        if self.saved.best is not None:
            begins = f"the best weights, those of step {self.saved.best:,}, are kept, and {begins}"
        return begins if self.kind == "none" else f"as there is no checkpoint, {begins}"
