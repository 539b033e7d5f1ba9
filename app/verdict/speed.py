"""Where the time of the steps goes: the main cause for which compute waits, with advice, or steps
that take longer than predicted. All functions are pure.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.labels import in_share, in_step_time
from app.verdict.findings import Finding, Offer, Tone
from app.verdict.losses import median
from app.verdict.step_shares import PART_LABELS, shares
from engine.config.limits import LARGEST
from engine.config.settings import AUTO, TrainConfig
from engine.runs.record.snapshot import RunSnapshot

FEWEST_STEPS = 20
"""Least number of clean steps: without compiling, an evaluation or a checkpoint before them."""
LATEST_STEPS = 60
"""Number of latest steps of which the clean ones are judged."""
FIRST_STEPS = 2
"""Number of first steps of a session, in which blocks are compiled and memory is touched for the
first time.
"""
WAITING_SHARE = 0.1
"""Share of the time from which waits are worth an alarm."""
SHOWN_SHARE = 0.01
"""Share of the time from which a further cause is named."""
SLOWER = 0.25
"""Share by which a slow step takes longer than predicted from measured rates."""
OTHERS = 0.1
"""Share of the CPU from which other programs may be why."""
JUDGED_EVERY = 10
"""Number of steps after each of which the rule is judged; its alarm lasts as many steps longer."""


def of_speed(snapshot: RunSnapshot, config: TrainConfig | None = None) -> Finding | None:
    """Returns what the time of the latest steps goes to, or None while there are too few. Without
    `config` (if the configuration does not load) no change is offered.

    On the CPU, everything runs in turn, so that no wait is an alarm; steps that take longer than
    predicted are one.
    """
    end = len(snapshot.steps) - len(snapshot.steps) % JUDGED_EVERY
    found = _judged(snapshot, config, end)
    if found is None or found.is_alarm:
        return found
    before = _judged(snapshot, config, end - JUDGED_EVERY)
    return before if before is not None and before.is_alarm else found


def slow_text(snapshot: RunSnapshot) -> str:
    """Returns the sentence on steps that take longer than predicted; empty while none do."""
    end = len(snapshot.steps) - len(snapshot.steps) % JUDGED_EVERY
    _, kept, seconds = _latest(snapshot, end)
    found = None if kept.sum() < FEWEST_STEPS else _slow(snapshot, seconds, "")
    return "" if found is None else found.text


def _judged(snapshot: RunSnapshot, config: TrainConfig | None, end: int) -> Finding | None:
    """Returns the finding of the steps before row `end`."""
    first, kept, seconds = _latest(snapshot, end)
    count = int(kept.sum())
    if count < FEWEST_STEPS:
        return None
    found = shares(snapshot.steps, first, kept)
    if not found:
        return None
    waiting = {name: share for name, share in found.items() if name != "compute"}
    total = sum(waiting.values())
    evidence = f"A typical step takes {in_step_time(seconds)}, as {count} steps show"
    slow = _slow(snapshot, seconds, evidence)
    # On the CPU everything runs in turn: what it waits for says nothing of why that takes long.
    if slow is not None and (total < WAITING_SHARE or snapshot.device != "cuda"):
        return slow
    if total < WAITING_SHARE:
        return _compute_bound(snapshot, total, config, f"{evidence}.")
    cause = max(waiting, key=waiting.__getitem__)
    case = CAUSES[cause](_Case(snapshot, config, waiting[cause]))
    others = [
        f"{PART_LABELS[name]} {in_share(share)}"
        for name, share in sorted(waiting.items(), key=lambda item: -item[1])
        if name != cause and share >= SHOWN_SHARE
    ]
    also = f"; other waits: {', '.join(others)}" if others else ""
    limit = f"{evidence}. Waits of {in_share(WAITING_SHARE)} or more are worth a change."
    return Finding("speed", _alarm(snapshot), f"{case.text}{also}.", case.advice, limit, case.offer)


def _alarm(snapshot: RunSnapshot) -> Tone:
    return "warn" if snapshot.device == "cuda" else "calm"


def _latest(snapshot: RunSnapshot, end: int) -> tuple[int, np.ndarray, float]:
    """Returns the first of the latest rows before row `end`, kept[steps] from that row on for those
    that are clean, and their median seconds.
    """
    first = max(0, end - LATEST_STEPS)
    kept = _clean(snapshot, first, end)
    seconds = np.array(snapshot.steps.seconds[first:])[kept]
    return first, kept, float(median(seconds)) if len(seconds) else 0.0


def _clean(snapshot: RunSnapshot, first: int, end: int) -> np.ndarray:
    """Returns kept[steps] from row `first` on: whether a step, of those before row `end`, did
    nothing but train.
    """
    numbers = np.array(snapshot.steps.step[first:])
    apart = [*snapshot.evals.step[-LATEST_STEPS:]]
    apart += [written.step for written in snapshot.checkpoints[-LATEST_STEPS:]]
    kept = numbers > (snapshot.resumed_step or 0) + FIRST_STEPS
    kept &= ~np.isin(numbers - 1, apart)
    kept[max(0, end - first) :] = False
    return kept


def _slow(snapshot: RunSnapshot, seconds: float, evidence: str) -> Finding | None:
    """Returns that steps take longer than predicted, if the prediction is from measured rates."""
    time = snapshot.fit.get("time") or {}
    predicted = time.get("step_seconds")
    if not predicted or time.get("estimated") or seconds <= (1 + SLOWER) * predicted:
        return None
    return Finding(
        "speed",
        "warn",
        f"{seconds / predicted:.1f}× slower than predicted: {_why_slow(snapshot)}.",
        "If nothing else used this machine, measure it again in Hardware.",
        f"{evidence}. {in_step_time(predicted)} were predicted. "
        f"A difference of {in_share(SLOWER)} or less is not reported.",
    )


def _why_slow(snapshot: RunSnapshot) -> str:
    """Returns what is known of other programs, as a clause."""
    memory, steps = snapshot.memory, snapshot.steps
    first = bisect.bisect_left(memory.step, steps.step[-LATEST_STEPS:][0])
    known = [share for share in memory.cpu_others[first:] if share >= 0]
    if not known:
        return "other programs may have used this machine"
    others = float(np.mean(known))
    if others < OTHERS:
        return "no other program used much of the CPU"
    return f"{in_share(others)} of the CPU went to other programs"


def _compute_bound(
    snapshot: RunSnapshot, total: float, config: TrainConfig | None, evidence: str
) -> Finding:
    worker = "GPU" if snapshot.device == "cuda" else "CPU"
    text = f"The {worker} is busy; {in_share(total)} of the time it waits."
    if config is not None and config.engine.activation_checkpointing not in (AUTO, "none"):
        return Finding(
            "speed",
            "good",
            text,
            "engine.activation_checkpointing was set by hand, so each layer computes its forward "
            "pass twice. Set to auto, it does so only where memory is short.",
            evidence,
            Offer(
                "engine.activation_checkpointing: auto", {"engine.activation_checkpointing": AUTO}
            ),
        )
    return Finding("speed", "good", text, evidence=evidence)


# ------------------------------------------------------------------ what compute waits for


@dataclass(frozen=True)
class _Cause:
    """Text about the main wait of a run."""

    text: str
    advice: str = ""
    offer: Offer | None = None


@dataclass(frozen=True)
class _Case:
    """A run whose compute waits mostly for one cause."""

    snapshot: RunSnapshot
    config: TrainConfig | None
    share: float
    """Share of the time that is spent waiting for the cause."""

    @property
    def worker(self) -> str:
        return "the GPU" if self.snapshot.device == "cuda" else "compute"

    @property
    def percent(self) -> str:
        return f"{in_share(self.share)} of the time"

    @property
    def more_tokens(self) -> Offer | None:
        """Offers twice as many rows per step and, if the number of steps is set, half as many
        steps. The total number of rows stays the same.
        """
        if self.config is None:
            return None
        train = self.config.train
        rows = 2 * train.batch_size
        if rows > LARGEST["batch_size"]:
            return None
        changes: dict[str, Any] = {"train.batch_size": rows}
        label = f"{rows:,} rows a step instead of {train.batch_size:,}"
        if train.steps is not None and train.steps > 1:
            steps = math.ceil(train.steps / 2)
            changes["train.steps"] = steps
            label += f", {steps:,} steps instead of {train.steps:,}"
        return Offer(label, changes)

    def back_to_auto(self, *names: str) -> Offer | None:
        """Offers to return to `auto` those of the settings that were set by hand."""
        if self.config is None:
            return None
        changed = {}
        for name in names:
            section, _, key = name.partition(".")
            if getattr(getattr(self.config, section), key) != AUTO:
                changed[name] = AUTO
        if not changed:
            return None
        return Offer(", ".join(f"{name}: auto" for name in changed), changed)


def _optimizer(case: _Case) -> _Cause:
    if case.snapshot.device != "cuda":
        return _Cause(
            f"The optimizer takes {case.percent}, and on the CPU nothing computes beside it",
            advice="More tokens a step would spread it over more work.",
            offer=case.more_tokens,
        )
    return _Cause(
        f"The GPU waits {case.percent} for the CPU optimizer",
        advice="More tokens a step would hide it.",
        offer=case.more_tokens,
    )


def _disk(case: _Case) -> _Cause:
    return _Cause(
        f"{case.worker[0].upper()}{case.worker[1:]} waits {case.percent} for moments on the disk",
        advice="More tokens a step, smaller moments (train.optimizer) or more RAM would help.",
        offer=case.more_tokens,
    )


def _h2d(case: _Case) -> _Cause:
    return _late(
        case,
        "Weights arrive late",
        "More tokens for each load of the weights would hide it.",
        "engine.slots",
        "engine.rounds",
        "engine.blocks_kept_in_slots",
    )


def _d2h(case: _Case) -> _Cause:
    return _late(
        case,
        "Gradients leave late",
        "More tokens a step would hide it.",
        "engine.activation_checkpointing",
        "engine.rounds",
    )


def _late(case: _Case, what: str, advice: str, *settings: str) -> _Cause:
    """Returns the finding on a late transfer. `advice` is used if none of the settings that affect
    the transfer was set by hand.
    """
    text = f"{what}: {case.worker} waits {case.percent} for them"
    by_hand = case.back_to_auto(*settings)
    if by_hand is not None:
        return _Cause(
            text,
            advice="These settings were set by hand. Set to auto, they follow the measured bus.",
            offer=by_hand,
        )
    return _Cause(text, advice=advice, offer=case.more_tokens)


def _exchange(case: _Case) -> _Cause:
    return _Cause(
        f"The GPUs exchange weights and gradients: {case.worker} waits {case.percent} for that",
        advice="More tokens a step would hide it.",
        offer=case.more_tokens,
    )


def _data(case: _Case) -> _Cause:
    return _Cause(
        f"{case.worker[0].upper()}{case.worker[1:]} waits {case.percent} for rows of the data",
        advice="End programs that keep the CPU busy, or give this one more cores.",
    )


def _other(case: _Case) -> _Cause:
    text = (
        f"{case.worker[0].upper()}{case.worker[1:]} waits {case.percent} for launches and other "
        "work of the program"
    )
    by_hand = case.back_to_auto("train.micro_batch_size", "engine.rounds")
    if by_hand is not None:
        return _Cause(
            text,
            advice=(
                "Larger micro-batches need fewer launches. Set to auto, they are as large as fits."
            ),
            offer=by_hand,
        )
    return _Cause(
        text,
        advice="More tokens a step would help: the pieces of work are small.",
        offer=case.more_tokens,
    )


CAUSES: dict[str, Callable[[_Case], _Cause]] = {
    "optimizer": _optimizer,
    "disk": _disk,
    "exchange": _exchange,
    "h2d": _h2d,
    "d2h": _d2h,
    "data": _data,
    "other": _other,
}
