"""The verdict on a run: the gravest finding is its main one, and the others stand under it. All
functions are pure and take a snapshot.

- A run that has failed, or was stopped, shows why it ended, then what is wrong with its learning.
- A finished run shows what it reached, and what is wrong with that. Its main finding is never one
  of memory or speed.
- An active run shows what is most urgent, by `ORDER`. If nothing is, whether it learns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from app.verdict.divergence import of_divergence, of_skipped, of_spikes
from app.verdict.few_rows import with_rows
from app.verdict.findings import Finding, Rule, Tone, Verdict
from app.verdict.learning import (
    learning,
    of_answers,
    of_learning,
    of_low_rate,
    of_small_model,
)
from app.verdict.losses import losses_of
from app.verdict.memory_rules import of_grown_memory, of_memory
from app.verdict.next_try import next_try, passes_of
from app.verdict.outcome import (
    has_no_right_answer,
    how_it_can_go_on,
    how_it_ended,
    what_it_reached,
)
from app.verdict.speed import of_speed
from app.verdict.validation import of_before, of_memorizing, of_plateau, of_validation, validation
from engine.config.settings import TrainConfig
from engine.runs.record.before_training import better_kept, worse_than_before
from engine.runs.record.snapshot import OVER_STATES, RunSnapshot
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps

ORDER: tuple[Rule, ...] = get_args(Rule)
"""Rules in their order, the gravest first."""
CALM_RULES = ("speed", "memory")
"""Rules whose finding is the main one only as an alarm."""
ENDED_TONES: dict[str, Tone] = {
    "failed": "bad",
    "interrupted": "warn",
    "stopped": "calm",
    "discarded": "calm",
}
"""Tone of a run that has ended before its last step, by its state."""
JUDGED_BY_ROWS: tuple[Rule, ...] = (
    *("worse than before training", "memorizes", "overfitting", "possibly overfitting"),
    "doing well",
)
"""Rules by which a run that goes on is judged by its validation rows."""
BUT = {
    "worse than before training": ", but it is worse than before training",
    "diverging": ", but it diverged",
    "memorizes": ", but it memorizes its rows",
    "no better": ", but it is no better than before training",
    "overfitting": ", but it overfits",
    "possibly overfitting": ", but it possibly overfits",
    "not learning": ", but it has not learned",
    "rate too high": ", with many spikes in its loss",
    "skipped steps": ", with steps that were skipped at the end",
}
"""Beginning of the text of a finished run where a rule found something wrong."""


def verdict(
    snapshot: RunSnapshot,
    state: str,
    saved: SavedSteps = NOTHING_SAVED,
    config: TrainConfig | None = None,
) -> Verdict:
    """Returns the verdict on a run in `state`. `saved` are its checkpoints on the disk. Without
    `config` (if the configuration does not load) no change of settings is offered.
    """
    if state == "finished":
        return with_rows(_of_a_finished_run(snapshot, config), snapshot)
    if state in OVER_STATES or state == "interrupted":
        return _of_a_run_that_ended(snapshot, state, saved, config)
    found = _of_the_disk(snapshot, state)
    if len(snapshot.steps):
        found += [
            *_early_stopping(snapshot, config),
            *of_memory(snapshot),
            *_speed(snapshot, config),
        ]
    else:
        found.append(_before_the_first_step(snapshot, state))
    main, *also = sorted(found, key=_rank)
    judged = Verdict(main, tuple(also))
    return with_rows(judged, snapshot) if main.rule in JUDGED_BY_ROWS else judged


def _rank(found: Finding) -> tuple[bool, bool, int]:
    """Returns the place of a finding: alarms come first, and calm ones of the machine last."""
    return not found.is_alarm, found.rule in CALM_RULES, ORDER.index(found.rule)


def _of_a_run_that_ended(
    snapshot: RunSnapshot, state: str, saved: SavedSteps, config: TrainConfig | None
) -> Verdict:
    ended, then = how_it_ended(snapshot, state), how_it_can_go_on(state, saved)
    found = _early_stopping(snapshot, config)
    if state != "failed":  # how fast it went is no matter where it failed
        found += _speed(snapshot, config)
    alarms = [each for each in found if each.is_alarm]
    main = Finding("ended", ENDED_TONES[state], ended, then)
    return Verdict(main, (*alarms, *of_grown_memory(snapshot)))


def _of_a_finished_run(snapshot: RunSnapshot, config: TrainConfig | None) -> Verdict:
    passes = passes_of(snapshot, config)
    judged = [_at_its_end(found, snapshot, passes) for found in _early_stopping(snapshot, config)]
    judged.sort(key=_rank)
    if not judged:
        return Verdict(Finding("ended", "calm", what_it_reached(snapshot)))
    first, *others = judged
    if first.is_alarm:
        main = replace(first, text=what_it_reached(snapshot, BUT[first.rule]))
    else:
        # What it reached says more than that it learns, which is found last.
        *others, learns = judged
        went = validation(snapshot)
        is_worse = went is not None and went.is_above_best
        is_good = learns.rule == "doing well" and not others and not is_worse
        is_good = is_good and not has_no_right_answer(snapshot)
        main = replace(learns, tone="good" if is_good else "calm", text=what_it_reached(snapshot))
    small = of_small_model(snapshot, config)
    if small is not None:  # neither passes nor another rate would help
        kept = [each for each in others if each.rule != "rate too low"]
        others = [small, *(replace(each, advice="") for each in kept)]
        main = replace(main, advice="")
    slow = [found for found in _speed(snapshot, config) if found.is_alarm]
    return Verdict(main, (*others, *of_grown_memory(snapshot), *slow))


def _at_its_end(found: Finding, snapshot: RunSnapshot, passes: float | None) -> Finding:
    """Returns a finding of a run that has finished after so many passes: a validation loss that has
    not fallen below that before training will not do so.
    """
    went = validation(snapshot)
    has_gained = went is None or not went.is_above_before or went.best_step > 0
    if found.rule != "too early" or has_gained or _answers_more(snapshot):
        return found
    advice = f"Next time try {next_try('no better', passes)}."
    return replace(found, rule="no better", tone="warn", advice=advice)


def _answers_more(snapshot: RunSnapshot) -> bool:
    """Returns whether more validation prompts are answered exactly than before training."""
    right = {match.moment: match.correct for match in snapshot.exact_matches}
    return right.get("after", 0) > right.get("before", 0)


def _speed(snapshot: RunSnapshot, config: TrainConfig | None) -> list[Finding]:
    found = of_speed(snapshot, config)
    return [] if found is None else [found]


def _early_stopping(snapshot: RunSnapshot, config: TrainConfig | None) -> list[Finding]:
    """Returns the findings on how the run learns; the last one is whether it does."""
    if not len(snapshot.steps):
        return []
    losses = losses_of(snapshot)
    went = validation(snapshot)
    seen = learning(snapshot, losses, went)
    passes = passes_of(snapshot, config)
    rose, worse, kept = of_divergence(losses, config), worse_than_before(snapshot), None
    if worse is None or worse.of == "validation":
        kept = better_kept(snapshot)
    # A run is judged by the weights that it leaves: worse ones after its best are not those.
    overfits = of_validation(went, losses, passes, kept, None if kept is None else worse)
    memorizes = of_memorizing(snapshot, went, losses, passes)
    if kept is not None:
        worse = None
        if overfits is not None:
            memorizes = None
    if rose is not None and overfits is not None and overfits.rule == rose.rule:
        overfits = None
    graver = [rose, of_before(snapshot, worse, passes), memorizes, overfits]
    spiky, skipped = of_spikes(losses, config), of_skipped(snapshot, config)
    found = [each for each in (*graver, spiky, skipped) if each is not None]
    is_wrong = any(each.is_alarm for each in graver if each is not None)
    if not found and not seen.does_not:
        calm = [of_plateau(snapshot, went, losses), of_answers(snapshot, seen)]
        if snapshot.state == "finished":
            calm.append(of_low_rate(losses, seen, config, passes))
        found = [each for each in calm if each is not None]
    return found if is_wrong else [*found, of_learning(seen)]


def _before_the_first_step(snapshot: RunSnapshot, state: str) -> Finding:
    if state == "preparing":
        return Finding("too early", "calm", "Preparing: the first step has not begun.")
    text = "The first step is under way."
    if state != "running":
        text = "No step was made yet."
    elif snapshot.plan_choices.get("compiled"):
        text += " It also compiles the blocks, which takes a while once."
    return Finding("too early", "calm", text)


def _of_the_disk(snapshot: RunSnapshot, state: str) -> list[Finding]:
    """Returns what a paused run waits for on a full disk: in a few words, and what can be done."""
    if state != "paused" or not snapshot.lacks_space_for:
        return []
    what, _, more = snapshot.reason.partition(": ")
    is_said = "by itself" in more
    then = "" if is_said else "The run goes on by itself once there is space."
    advice = f"{more[:1].upper()}{more[1:]} {then}".strip()
    return [Finding("disk", "warn", f"Paused: {what[:1].lower()}{what[1:].rstrip('.')}", advice)]
