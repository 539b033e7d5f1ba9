"""The best weights of a run: those that it has kept, or a checkpoint."""

from __future__ import annotations

from dataclasses import replace

from engine.runs.record.snapshot import RunSnapshot
from engine.runs.record.validation import Best


def best_of(snapshot: RunSnapshot) -> Best | None:
    """Returns the step with the lowest validation loss or the most exact answers, as the run
    chooses, or None without an evaluation after a step. Its weights also count as kept where a
    checkpoint holds them.
    """
    best = snapshot.best
    if best is None or best.kept:
        return best
    in_checkpoint = any(each.step == best.step for each in snapshot.checkpoints)
    return replace(best, kept=in_checkpoint)
