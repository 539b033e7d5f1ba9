"""A `Diagnosis` describes how a run is doing, with advice and a change of its settings where one
would help. The diagnosis of this file is that of its speed; `app.view.headline` chooses what is
shown first. All functions are pure and take a snapshot.

- Before the first step, it says what the run is doing.
- Then it names the main cause for which compute waits, and a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from app.form.settings_form import as_labelled
from app.view.step_time import PARTS, recent_shares
from app.words import in_share
from engine.config.limits import LARGEST
from engine.config.settings import AUTO, TrainConfig
from engine.runs.snapshot import RunSnapshot

COMPUTE_BOUND_SHARE = 0.05
"""No advice is needed if less than this share of the time is spent waiting."""
TOLD_SHARE = 0.01
"""Each further cause is named that accounts for at least this share of the time."""


@dataclass(frozen=True)
class Offer:
    """An `Offer` is a change of the run's settings that a person can accept."""

    label: str
    """The label describes the change in words."""
    changes: dict[str, Any]
    """These are the new config values by dotted name."""


@dataclass(frozen=True)
class Diagnosis:
    """A `Diagnosis` describes how a run is doing."""

    text: str
    """The text is one sentence."""
    tone: str = "calm"
    """`dashboard.css` has a colour for each tone."""
    advice: str = ""
    """The advice is another sentence, or empty."""
    offer: Offer | None = None
    also: tuple[str, ...] = ()
    """These are further sentences that are true of the run, each a remark of its own."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the diagnosis in the form that pages receive, with settings named by their labels
        in the form.
        """
        offer = None
        if self.offer is not None:
            offer = {"label": as_labelled(self.offer.label), "changes": self.offer.changes}
        return {
            "text": as_labelled(self.text),
            "tone": self.tone,
            "advice": as_labelled(self.advice),
            "offer": offer,
            "also": [as_labelled(remark) for remark in self.also],
        }


def diagnosis(snapshot: RunSnapshot, config: TrainConfig | None = None) -> Diagnosis:
    """Returns a diagnosis of the time of the latest steps. Without `config` (if the configuration
    does not load) no change is offered.
    """
    shares = recent_shares(snapshot)
    if not shares:
        return _before_the_first_step(snapshot)
    waiting = {name: share for name, share in shares.items() if name != "compute"}
    total = sum(waiting.values())
    if total < COMPUTE_BOUND_SHARE:
        return _compute_bound(total, config)
    cause = max(waiting, key=waiting.__getitem__)
    found = CAUSES[cause](_Case(snapshot, config, waiting[cause]))
    others = [
        f"{PARTS[name][0]} {in_share(share)}"
        for name, share in sorted(waiting.items(), key=lambda item: -item[1])
        if name != cause and share >= TOLD_SHARE
    ]
    also = f"; further waits: {', '.join(others)}" if others else ""
    return Diagnosis(f"{found.text}{also}.", "warn", found.advice, found.offer)


def _before_the_first_step(snapshot: RunSnapshot) -> Diagnosis:
    if snapshot.state == "preparing":
        return Diagnosis("Getting ready: the first step has not begun.")
    text = "The first step is under way."
    if snapshot.plan_choices.get("compiled"):
        text += " Its blocks are compiled in it, which takes a while once."
    return Diagnosis(text)


def _compute_bound(total: float, config: TrainConfig | None) -> Diagnosis:
    text = f"Compute-bound: {in_share(total)} of the time is spent waiting."
    if config is not None and config.engine.save_level not in (AUTO, "all"):
        return Diagnosis(
            text,
            "good",
            "Blocks compute their forward a second time because engine.save_level was set by hand; "
            "auto keeps activations where there is memory for them.",
            Offer("engine.save_level: auto", {"engine.save_level": AUTO}),
        )
    return Diagnosis(text, "good")


# ------------------------------------------------------------------ what compute waits for


@dataclass(frozen=True)
class _Case:
    """A `_Case` is a run whose compute waits mostly for one cause."""

    snapshot: RunSnapshot
    config: TrainConfig | None
    share: float
    """This share of the time is spent waiting for the cause."""

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


def _optimizer(case: _Case) -> Diagnosis:
    if case.snapshot.device != "cuda":
        return Diagnosis(
            f"The optimizer takes {case.percent}, and on the CPU nothing computes beside it",
            advice="More tokens a step would spread it over more work.",
            offer=case.more_tokens,
        )
    return Diagnosis(
        f"The host optimizer holds the GPU up for {case.percent}",
        advice="More tokens a step would hide it: it runs under the next step's first forward.",
        offer=case.more_tokens,
    )


def _h2d(case: _Case) -> Diagnosis:
    return _late(
        case,
        "Weights arrive late (H2D)",
        "More tokens for each load of the weights would hide it.",
        "engine.slots",
        "engine.rounds",
        "engine.residency",
    )


def _d2h(case: _Case) -> Diagnosis:
    return _late(
        case,
        "Gradients leave late (D2H)",
        "More tokens a step would hide it: gradients leave once a step.",
        "engine.save_level",
        "engine.rounds",
    )


def _late(case: _Case, what: str, advice: str, *settings: str) -> Diagnosis:
    """Returns the diagnosis of a late transfer. `advice` is used if none of the settings that
    affect the transfer was set by hand.
    """
    text = f"{what}: {case.worker} waits {case.percent} for them"
    by_hand = case.back_to_auto(*settings)
    if by_hand is not None:
        return Diagnosis(
            text,
            advice="These settings were set by hand; the planner chooses them by the measured bus.",
            offer=by_hand,
        )
    return Diagnosis(text, advice=advice, offer=case.more_tokens)


def _data(case: _Case) -> Diagnosis:
    return Diagnosis(
        f"Data-bound: {case.worker} waits {case.percent} while rows are put together",
        advice="Other programs may keep the CPU busy: end them, or give this one more cores.",
    )


def _other(case: _Case) -> Diagnosis:
    text = (
        f"{case.worker[0].upper()}{case.worker[1:]} waits {case.percent} for launches and other "
        "work of the program"
    )
    by_hand = case.back_to_auto("train.micro_batch_size", "engine.rounds")
    if by_hand is not None:
        return Diagnosis(
            text,
            advice=(
                "Larger micro-batches need fewer launches; the planner takes the largest that fits."
            ),
            offer=by_hand,
        )
    return Diagnosis(
        text,
        advice="The pieces of work are small: more tokens a step need fewer launches for each.",
        offer=case.more_tokens,
    )


CAUSES: dict[str, Callable[[_Case], Diagnosis]] = {
    "optimizer": _optimizer,
    "h2d": _h2d,
    "d2h": _d2h,
    "data": _data,
    "other": _other,
}
