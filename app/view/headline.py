"""The headline of a run is chosen here: the one sentence that is shown first, with the others as
remarks. All functions are pure and take a snapshot.

- A run that is over says what it reached, or why it ended. Its memory and its speed are remarks.
- Of an active run, the gravest finding comes first: a loss that diverges, then overfitting, then
  memory that would be full before the end, then what compute waits for.
"""

from __future__ import annotations

from app.view.diagnosis import Diagnosis, Offer, diagnosis
from app.view.learning_signs import Divergence, HeldOut, divergence, held_out
from app.view.memory_words import MemoryKind, full_at, is_in_danger, memory_kinds
from app.view.outcome import how_it_can_go_on, how_it_ended, what_it_reached
from app.words import STATE_TONES, in_bytes, in_digits
from engine.checkpoints.saved_steps import NOTHING_SAVED, SavedSteps
from engine.config.settings import TrainConfig
from engine.runs.snapshot import OVER_STATES, RunSnapshot

LOWER_RATE = 3
"""A diverging run is advised to use its learning rate divided by this."""


def headline(
    snapshot: RunSnapshot,
    state: str,
    saved: SavedSteps = NOTHING_SAVED,
    config: TrainConfig | None = None,
) -> Diagnosis:
    """Returns what is shown first of a run in `state`, with the rest as remarks. `saved` are its
    checkpoints on the disk. Without `config` (if the configuration
    does not load) no change of settings is offered.
    """
    if state in OVER_STATES or state == "interrupted":
        return _of_a_run_that_is_over(snapshot, state, saved, config)
    speed = diagnosis(snapshot, config)
    kinds = [kind for kind in memory_kinds(snapshot) if kind.growth.is_growing]
    danger = [kind for kind in kinds if is_in_danger(snapshot, kind)]
    filling = [_full_before_the_end(snapshot, kind) for kind in danger]
    calm = [_growing_words(kind) for kind in kinds if kind not in danger]
    return _together([*_learning(snapshot, config), *filling, speed], calm)


def _of_a_run_that_is_over(
    snapshot: RunSnapshot, state: str, saved: SavedSteps, config: TrainConfig | None
) -> Diagnosis:
    learning = _learning(snapshot, config)
    if state == "finished":
        went = held_out(snapshot)
        tone = "calm" if went is not None and went.is_above_best else "good"
        first = Diagnosis(what_it_reached(snapshot), "warn" if learning else tone)
    else:
        first = Diagnosis(
            how_it_ended(snapshot, state), STATE_TONES[state], how_it_can_go_on(state, saved)
        )
    speed = diagnosis(snapshot, config)
    slow = [speed] if speed.tone == "warn" else []
    grown = [_grown_words(kind) for kind in memory_kinds(snapshot) if kind.growth.is_growing]
    return _together([first, *learning, *slow], grown)


def _together(found: list[Diagnosis], remarks: list[str]) -> Diagnosis:
    """Returns the first of the findings, with the others and `remarks` as its remarks. The offer is
    the first one among them all. A good finding is no remark.
    """
    first, *others = found
    also = [f"{each.text} {each.advice}".rstrip() for each in others if each.tone == "warn"]
    offer = next((each.offer for each in found if each.offer is not None), None)
    return Diagnosis(first.text, first.tone, first.advice, offer, (*also, *remarks))


# ------------------------------------------------------------------ learning


def _learning(snapshot: RunSnapshot, config: TrainConfig | None) -> list[Diagnosis]:
    """Returns what is wrong with how the run learns, the gravest first."""
    found = []
    rose = divergence(snapshot)
    if rose is not None:
        found.append(_diverging(rose, config))
    went = held_out(snapshot)
    if went is not None and went.overfits:
        found.append(_overfitting(went))
    return found


def _diverging(rose: Divergence, config: TrainConfig | None) -> Diagnosis:
    offer = None
    if config is not None:
        rate = float(f"{config.train.learning_rate / LOWER_RATE:.2g}")
        label = f"learning rate {in_digits(rate)} instead of "
        offer = Offer(
            f"{label}{in_digits(config.train.learning_rate)}", {"train.learning_rate": rate}
        )
    return Diagnosis(
        f"The training loss rises: {in_digits(rose.last)} in the latest steps, "
        f"{in_digits(rose.best)} at its best.",
        "warn",
        "A lower learning rate is the first thing to try.",
        offer,
    )


def _overfitting(went: HeldOut) -> Diagnosis:
    return Diagnosis(
        f"Held-out loss rises while the training loss falls: {in_digits(went.last)} now, "
        f"{in_digits(went.best)} at step {went.best_step:,}.",
        "warn",
        "The model learns its rows by heart: fewer steps, more data or a lower learning rate would "
        "help.",
    )


# ------------------------------------------------------------------ memory


def _full_before_the_end(snapshot: RunSnapshot, kind: MemoryKind) -> Diagnosis:
    full = full_at(snapshot, kind)
    if full is None:
        return Diagnosis(_growing_words(kind, ""), "warn")
    return Diagnosis(
        _growing_words(kind, ""),
        "warn",
        f"At this rate it is full at about step {full:,} of {snapshot.total_steps:,}: save now; a "
        "stop and a resume begin with fresh memory.",
    )


def _growing_words(kind: MemoryKind, then: str = " At this rate it lasts to the end.") -> str:
    grown = kind.growth
    return (
        f"{_name(kind)} memory grows all along: {in_bytes(grown.grown)} more since step "
        f"{grown.grows_since:,}, {in_bytes(kind.most)} now.{then}"
    )


def _grown_words(kind: MemoryKind) -> str:
    """Returns how much memory grew in a run that is over."""
    grown = kind.growth
    of = f" of {in_bytes(kind.limit)}" if kind.limit else ""
    return (
        f"{_name(kind)} memory grew by {in_bytes(grown.grown)} after step {grown.grows_since:,}, "
        f"to {in_bytes(kind.most)}{of}."
    )


def _name(kind: MemoryKind) -> str:
    return "Host" if kind.name == "host" else kind.name
