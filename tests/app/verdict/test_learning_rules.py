"""Each rule about the losses finds what it should, and nothing where there is nothing."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from app.labels import in_loss
from app.verdict.divergence import divergence, of_divergence, of_spikes, spikes
from app.verdict.learning import learning, of_learning, of_low_rate
from app.verdict.losses import block_error, losses_of, noise
from app.verdict.validation import (
    of_before,
    of_memorizing,
    of_plateau,
    of_validation,
    validation,
)
from engine.runs.record.before_training import worse_than_before
from engine.runs.record.evaluations import RowLosses, paired_error
from engine.runs.record.events import (
    DataPrepared,
    EvalFinished,
    RunEnded,
    RunStarted,
    SettingsChanged,
    StepFinished,
)
from engine.runs.record.snapshot import RunSnapshot
from tests.app.verdict.made_runs import CONFIG, OVERFIT, evaluated, falling, fold, steps
from tests.support.synthetic_run import records, run_events

NOISE = np.random.default_rng(7).standard_normal(400)


def shaken(step, size):
    """Returns the noise of a step, of this standard deviation."""
    return size * NOISE[step]


# ------------------------------------------------------------------ noise


def test_the_noise_is_found_under_a_trend_and_spikes():
    draw = np.random.default_rng(0)
    losses = np.linspace(5, 1, 400) + 0.2 * draw.standard_normal(400)
    losses[::50] += 30
    assert noise(losses) == pytest.approx(0.2, rel=0.2)
    assert noise(np.array([1.0, 2.0])) == 0.0
    wave = np.repeat(draw.standard_normal(40), 10)  # ten losses in a row are alike
    assert block_error(wave) == pytest.approx(np.std(wave) / math.sqrt(40), rel=0.3)


# ------------------------------------------------------------------ divergence


def test_a_loss_that_diverges_is_found_and_a_lower_rate_is_offered():
    rising = fold(*steps(60, loss=lambda step: falling(step) if step < 40 else 2.0 * (step - 39)))
    found = of_divergence(losses_of(rising), CONFIG)
    assert found.is_alarm and found.text.startswith("Getting worse: training loss ")
    assert found.offer.changes == {"train.learning_rate": 1e-4}
    assert "above" in found.evidence and "step 60" in found.evidence


def test_noise_a_spike_and_a_long_record_are_no_divergence():
    noisy = steps(200, loss=lambda step: 2 + 0.4 * math.sin(37 * step))
    spiked = steps(200, loss=lambda step: 50.0 if 190 < step < 197 else falling(step))
    for snapshot in (fold(*noisy), fold(*spiked), fold(*steps(29, loss=lambda step: 9.0 * step))):
        assert divergence(losses_of(snapshot)) is None
    whole = RunSnapshot()
    for record in records(run_events(300)):
        whole.apply(record)
    assert divergence(losses_of(whole)) is None


def test_a_divergence_is_withdrawn_only_after_ten_good_steps():
    def loss(step):
        return 20.0 if 50 <= step < 70 else 1.0

    found = []
    for count in range(55, 100):
        rose = divergence(losses_of(fold(*steps(count, loss=loss))))
        found.append(rose is not None and not rose.is_over)
    assert found.index(True) == 59 - 55  # ten steps are above
    assert found[found.index(True) :].index(False) == 79 - 59  # ten steps are good again
    assert not any(found[79 - 55 :])
    came_back = of_divergence(losses_of(fold(*steps(100, loss=loss))), CONFIG)
    assert (came_back.rule, came_back.tone) == ("rate too high", "calm")


def test_a_resume_and_a_new_rate_ask_for_ten_steps_since_then():
    def loss(step):
        return 1.0 if step < 50 else 9.0

    for between in (RunStarted(total_steps=200, resumed_step=49), SettingsChanged(50)):
        events = [*steps(49, loss=loss), between, *steps(58, loss=loss, first=50)]
        assert divergence(losses_of(fold(*events))) is None
        more = [*events, *steps(59, loss=loss, first=59)]
        assert divergence(losses_of(fold(*more))).best == 1.0  # that of before


def test_many_spikes_that_last_tell_of_a_high_rate():
    def spiky(step):
        return 2.0 + shaken(step, 0.05) + (3.0 if step % 20 in (0, 1, 2) else 0.0)

    found = of_spikes(losses_of(fold(*steps(150, loss=spiky))), CONFIG)
    assert found.is_alarm and "it jumped 5 times" in found.evidence
    assert found.offer.changes == {"train.learning_rate": 1e-4}
    short = steps(150, loss=lambda step: 2.0 + shaken(step, 0.05) + 3.0 * (step % 10 == 0))
    harder = steps(150, loss=lambda step: 2.0 + shaken(step, 0.05) + 3.0 * (step % 10 < 4))
    for snapshot in (fold(*short), fold(*harder), fold(*steps(90, loss=spiky))):
        assert spikes(losses_of(snapshot)) == 0


# ------------------------------------------------------------------ validation losses


def with_rows(rows, losses, tokens=50):
    """Returns a run whose evaluations have the losses of rows, each by `rows(step, loss)`."""
    events = [
        msgspec.structs.replace(event, row_losses=list(found.losses), row_tokens=list(found.tokens))
        for event in evaluated(*losses, tokens=tokens)
        if (found := rows(event.step, event.loss))
    ]
    return fold(*steps(), *events)


def test_a_small_rise_over_few_tokens_is_no_overfitting():
    few = fold(*steps(), *evaluated(1.0, 1.1, 1.2, 1.2, 1.2, tokens=100))
    assert of_validation(validation(few), losses_of(few)) is None
    many = fold(*steps(), *evaluated(1.0, 1.1, 1.2, 1.2, 1.2, tokens=10_000))
    found = of_validation(validation(many), losses_of(many))
    assert found.rule == "possibly overfitting" and "at step 20" in found.text
    assert found.text.startswith("Possibly overfitting: validation loss rises")
    assert "with this number of validation tokens" in found.evidence


def test_losses_of_pairs_are_counted_by_pairs():
    """Each pair has one loss, so a thousand tokens of a few pairs say little."""

    def of_pairs(pairs, *losses):
        events = [
            msgspec.structs.replace(event, preference={"rewards/margins": 1.0})
            for event in evaluated(*losses, tokens=100 * pairs)
        ]
        return fold(*steps(), DataPrepared({"eval_rows": pairs}), *events)

    rising = (0.5, 0.6, 0.75, 0.75, 0.75)
    few, many = of_pairs(100, *rising), of_pairs(1000, *rising)
    assert of_validation(validation(few), losses_of(few)) is None
    found = of_validation(validation(many), losses_of(many))
    assert found.rule == "possibly overfitting"
    assert "with this number of validation rows" in found.evidence
    falling_a_little = (0.69, 0.6)
    assert not validation(of_pairs(100, *falling_a_little)).has_improved
    assert validation(of_pairs(10_000, *falling_a_little)).has_improved


def test_rows_show_a_rise_that_few_tokens_could_not():
    def alike(step, loss):
        return RowLosses([loss + 0.5 * place for place in range(-5, 6)], [5] * 11)

    def unlike(step, loss):
        return RowLosses([loss + 0.4 * math.sin(step * place) for place in range(11)], [5] * 11)

    losses = (1.0, 1.1, 1.2, 1.2, 1.2)
    sure = with_rows(alike, losses)
    found = of_validation(validation(sure), losses_of(sure))
    assert (
        found.text.startswith("Validation loss rises")
        and "as the single validation rows show" in found.evidence
    )
    assert found.rule == "overfitting"
    unsure = with_rows(unlike, losses)
    assert of_validation(validation(unsure), losses_of(unsure)) is None


def test_the_error_of_a_difference_is_that_of_its_rows():
    draw = np.random.default_rng(1)
    before = draw.normal(2, 1, 400)
    changes = draw.normal(0.1, 0.2, 400)
    tokens = [7] * 400
    error = paired_error(RowLosses(list(before), tokens), RowLosses(list(before + changes), tokens))
    assert error == pytest.approx(0.2 / math.sqrt(400), rel=0.1)
    assert paired_error(None, RowLosses([1.0], [1])) is None
    assert (
        paired_error(RowLosses([1.0] * 7, [1] * 7), RowLosses([1.0] * 7, [1] * 7)) is None
    )  # too few
    assert paired_error(RowLosses([1.0] * 9, [1] * 9), RowLosses([1.0] * 8, [1] * 8)) is None
    assert paired_error(RowLosses([1.0] * 9, [0] * 9), RowLosses([1.0] * 9, [0] * 9)) is None


def test_one_better_evaluation_withdraws_overfitting():
    worse = fold(*steps(), *OVERFIT)
    assert of_validation(validation(worse), losses_of(worse)).rule == "possibly overfitting"
    better = fold(*steps(), *OVERFIT, EvalFinished(step=100, loss=1.7, loss_tokens=2000))
    assert of_validation(validation(better), losses_of(better)) is None


def test_both_losses_that_rise_are_no_overfitting_but_a_divergence():
    rising = fold(*steps(loss=lambda step: 1 + step / 300), *evaluated(1.0, 1.0, 1.3, 1.4, 1.5))
    found = of_validation(validation(rising), losses_of(rising))
    assert found.rule == "diverging" and found.text.startswith("Validation and training loss both")


def test_evaluations_of_other_rows_are_not_compared():
    events = [EvalFinished(step=place, loss=0.5, loss_tokens=900) for place in (5, 10)]
    other = fold(*steps(), *events, *evaluated(2.0, 1.9, 1.8, 1.7))
    went = validation(other)
    assert (went.first, went.best, len(went.losses)) == (2.0, 1.7, 4)
    assert of_validation(validation(other), losses_of(other)) is None


def test_after_a_resume_three_evaluations_must_be_worse_than_the_best_of_before():
    def run(*later):
        events = [*steps(), *evaluated(1.0, 2.0, 2.0, 2.0, every=10)]
        events += [RunStarted(total_steps=300, resumed_step=100), *steps(140, first=101)]
        for step, loss in later:
            events.append(EvalFinished(step=step, loss=loss, loss_tokens=2000))
        snapshot = fold(*events, total=300)
        return of_validation(validation(snapshot), losses_of(snapshot))

    assert run((110, 2.0), (120, 2.0)) is None
    assert run((110, 2.0), (120, 2.0), (130, 2.0)).rule == "possibly overfitting"


def test_a_loss_that_stands_still_is_a_calm_remark():
    def run(losses, rate=3e-4, total=100):
        events = [*steps(99), StepFinished(step=100, loss=0.01, learning_rate=rate)]
        snapshot = fold(*events, *evaluated(*losses), total=total)
        return of_plateau(snapshot, validation(snapshot), losses_of(snapshot))

    flat = [3.0, 2.0, 1.5, 1.2, 1.0, 1.0, 0.999, 1.0, 0.999, 1.0]
    found = run(flat)
    assert found.tone == "calm" and "stands still at 1.000 since step 60" in found.text
    assert run(flat, rate=2e-5) is None and run(flat[:7]) is None
    assert run([3.0, 2.0, 1.5, 1.2, 1.0, 0.99, 0.98, 0.97, 0.96, 0.95]) is None
    assert run(flat, total=300) is None  # a quarter of the run is longer than all of them


# ------------------------------------------------------------------ before training


def from_before(*losses, every=10, tokens=2000):
    """Returns evaluations, of which the first is that before training."""
    return [
        EvalFinished(step=every * place, loss=loss, loss_tokens=tokens)
        for place, loss in enumerate(losses)
    ]


def before(snapshot):
    return of_before(snapshot, worse_than_before(snapshot))


def test_what_is_above_the_evaluation_before_training_is_worse():
    def told(*losses, tokens=2000, loss=lambda step: 100.0 - step / 10, total=100):
        return before(fold(*from_before(*losses, tokens=tokens), *steps(total, loss=loss)))

    found = told(6.07, 300.0, 86.4)
    assert (found.rule, found.tone) == ("worse than before training", "bad") and found.evidence
    assert found.text == "Worse than before training: validation loss 6.070 → 86.40."
    assert told(6.07, 86.4) is None  # one evaluation of a run that goes on may be a bad moment
    assert told(6.07, 300.0, 6.3) is None and told(6.07, 5.0, 300.0) is None
    assert told(6.0, 7.0, 7.0, tokens=4) is None and told(6.0, 7.0, 7.0, tokens=100)
    ended = fold(*from_before(6.07, 86.4), *steps(), RunEnded("finished"))
    assert before(ended).rule == "worse than before training"
    advice = before(fold(*from_before(6.0, 4.0, 9.0, 9.0), *steps())).advice
    assert advice.startswith("Step 10 was better: 4.")
    assert before(fold(*evaluated(1.0, 9.0, 9.0), *steps())) is None  # nobody knows


def test_without_evaluations_the_first_step_tells_what_was_before_training():
    def told(loss, count=40):
        return before(fold(*steps(count, loss=loss)))

    def exploded(step):
        return 6.07 if step == 1 else 90 + 30 * math.sin(37 * step)

    found = told(exploded)
    assert found.rule == "worse than before training" and "6.070 (step 1)" in found.text
    assert told(exploded, 29) is None and told(lambda step: 5 + step / 100) is None
    # The first batch was an easy one, as others are.
    assert told(lambda step: 0.2 if step == 1 or step % 3 == 0 else 3.0, 60) is None
    draw = np.random.default_rng(3).standard_normal(200)
    assert told(lambda step: float(np.exp(0.9 * draw[step] - (step == 1))), 100) is None


def test_a_run_that_is_above_its_beginning_is_not_said_to_learn():
    """The loss exploded in the first steps and has fallen since, to what is still far too high."""

    def loss(step):
        return 6.0627 if step == 1 else 200 - step

    exploded = fold(*from_before(6.07, 300.0, 250.0, 150.0, every=30), *steps(loss=loss))
    found = learning(exploded, losses_of(exploded), validation(exploded))
    assert found.falls and not found.learns
    shown = of_learning(found)
    assert shown.tone == "calm" and "no lower than the 6.070 before training" in shown.text
    alone = fold(*steps(loss=lambda step: 6.0627 if step == 1 else 9 - step / 100))
    shown = of_learning(learning(alone, losses_of(alone), None))
    assert shown.tone == "calm" and "the 6.063 of the first step" in shown.text
    back = fold(*steps(loss=lambda step: 6.0627 if step == 1 else 60 * math.exp(-step / 20)))
    shown = of_learning(learning(back, losses_of(back), None))
    assert shown.text == f"Learning well. Training loss 6.063 → {in_loss(losses_last(back))}."


def losses_last(snapshot):
    """Returns the median of the latest fifth of the steps."""
    values = np.array(snapshot.steps.loss)
    return float(np.median(values[-len(values) // 5 :]))


# ------------------------------------------------------------------ memorizing


def test_rows_that_are_known_by_heart_are_memorized():
    def told(*losses, loss=lambda step: 4 * math.exp(-step / 6) + 0.0003, ended=(), every=20):
        snapshot = fold(*from_before(*losses, every=every), *steps(loss=loss), *ended)
        return of_memorizing(snapshot, validation(snapshot), losses_of(snapshot))

    found = told(6.07, 5.3, 5.2, 5.1, 5.1)
    assert (found.rule, found.tone) == ("memorizes", "warn") and found.evidence
    assert found.text.startswith("It memorizes its rows: training loss 0.0003")
    assert found.text.endswith(", validation loss 5.100.")
    assert "fewer passes" not in found.advice, "the validation loss has not risen"
    assert told(6.07, 5.1, ended=[RunEnded("finished")], every=100)  # one evaluation is all
    assert told(6.07, 5.1, every=100) is None
    # A task that is learned: the validation loss follows, and is far below what it was.
    assert told(6.07, 1.0, 0.9, 0.8, 0.7) is None
    assert told(6.07, 0.1, 0.05, 0.03, 0.03) is None
    # A real model that is trained for too long, as its validation loss begins to rise.
    trained = {"loss": lambda step: 1.5 * math.exp(-step / 15) + 0.03}
    assert told(1.6, 1.1, 1.0, 1.05, 1.1, **trained)
    risen = told(1.6, 1.0, 1.1, 1.2, 1.3, 1.4, every=16, **trained)
    assert "fewer passes" in risen.advice
    # Validation rows of another, harder kind than those of training, from the beginning.
    assert told(3.0, 2.9, 2.9, 2.9, 2.9, loss=lambda step: 0.2 + 0.1 / step) is None


# ------------------------------------------------------------------ learning


def judged(count, loss, total=300, extra=()):
    snapshot = fold(*steps(count, loss=loss), *extra, total=total)
    return of_learning(learning(snapshot, losses_of(snapshot), validation(snapshot)))


def test_a_run_that_learns_says_from_where_to_where():
    found = judged(100, falling)
    assert (found.rule, found.tone) == ("doing well", "good")
    assert found.text.startswith("Learning well. Training loss 1.")
    assert "first 20 steps" in found.evidence
    found = judged(100, falling, extra=evaluated(2.0, 1.5, 1.0))
    assert found.text == "Learning well. Validation loss 2.000 → 1.000."
    found = judged(100, falling, extra=evaluated(2.0, 1.0, 1.1))
    assert found.text == "Learning well. Validation loss 2.000 → 1.100, lowest 1.000 at step 66."


def test_while_evidence_is_short_it_is_too_early_to_say():
    found = judged(7, falling)
    assert found.text == "Warming up: verdict by step 100."
    assert judged(90, lambda step: 5 + shaken(step, 0.01)).text.endswith("by step 100.")
    assert judged(150, lambda step: 5 + shaken(step, 0.01), 1000).text.endswith("by step 200.")
    unclear = judged(120, lambda step: 5 + shaken(step, 3.0))  # the noise would hide a fall
    assert unclear.rule == "too early" and "by step 100." not in unclear.text


def test_a_run_that_does_not_learn_is_told_so():
    found = judged(100, lambda step: 5 + shaken(step, 0.01))
    assert (found.rule, found.tone) == ("not learning", "warn") and "100 steps" in found.text
    learned = judged(100, lambda step: 0.04)
    assert learned.text == "The training loss has hardly changed: 0.0400 now."
    slow = judged(200, lambda step: 5 - step / 1000 + shaken(step, 0.01))
    assert slow.rule == "doing well"
    by_rows = judged(100, lambda step: 5 + shaken(step, 0.01), extra=evaluated(5.0, 4.9))
    assert by_rows.rule != "not learning"  # the validation loss fell by more than 1 %
    held = judged(100, lambda step: 5 + shaken(step, 0.01), extra=evaluated(5.0, 4.99))
    assert held.rule == "not learning" and "4.990 in the best one" in held.evidence


def test_a_rate_that_was_too_low_is_told_at_the_end():
    def low(loss):
        snapshot = fold(*steps(200, loss=loss), total=200)
        losses = losses_of(snapshot)
        return of_low_rate(losses, learning(snapshot, losses, None), CONFIG)

    found = low(lambda step: 5 - step / 200)
    assert found.tone == "calm" and found.offer.changes == {"train.learning_rate": 9e-4}
    assert "try a learning rate of 0.0009" in found.text and found.place == "beside"
    assert low(falling) is None and low(lambda step: 5.0) is None
