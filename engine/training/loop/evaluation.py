"""A run's loss on validation rows, and its answers to prompts."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from engine.config.settings import TrainConfig
from engine.data.batches.loader import Prompt
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import one_pass
from engine.data.tokens.encode import Encoder
from engine.data.tokens.template_process import template_process
from engine.data.tokens.trained_ends import ids_of
from engine.errors import DataError, NonFiniteError
from engine.model.build.units import StreamedModel
from engine.planning.fit.answers_memory import SPARE_TOKENS
from engine.progress import Progress
from engine.runs.record.events import (
    Answer,
    EvalFinished,
    ExactMatchMeasured,
    Number,
    PromptsAnswered,
)
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.generate import Sampler, end_tokens, longest_row
from engine.runtime.step.inference_passes import sweeps
from engine.training.loop.oom_recovery import Moment, OomRecovery
from engine.training.loop.prepare import Prepared
from engine.training.loop.reference_logps import evaluated_pairs
from engine.training.loop.session import Session

# ---------------------------------------------------------------------- prompts

# A run answers fixed prompts at intervals, so that its answers can be compared over time.


class FixedPrompts:
    """The prompts of `output.sample_prompts`, which are answered greedily at each evaluation.

    Each prompt has the same form as the training examples. An answer ends with one of the tokens in
    `ends`, or as the chat template ends it.
    """

    def __init__(self, config: TrainConfig, model: StreamedModel, tokenizer: Any, ends: set[int]):
        """Raises DataError for a prompt that the model cannot be given."""
        self._prompts = config.output.sample_prompts
        self._most = config.output.sample_tokens
        self._tokenizer = tokenizer
        self._ends = ends
        self._longest = longest_row(model.config)
        self._ids: list[list[int]] = []
        if not self._prompts:
            return
        encoder = Encoder.of(config.data, tokenizer)
        self._ids = [encoder.question(prompt) for prompt in self._prompts]
        # The data need not be conversations, and the prompts are written by the template.
        self._ends = ends | set(ids_of(tokenizer, encoder.renderer.ends.tokens))
        template_process().end_if_memory_is_short()  # the run's memory is judged next
        for place, ids in enumerate(self._ids):
            if self._longest is not None and len(ids) >= self._longest:
                raise DataError(
                    f"output.sample_prompts[{place}]: the prompt has {len(ids):,} tokens and this "
                    f"model takes {self._longest:,} at most; shorten it."
                )

    def answer(
        self,
        sampler: Callable[[], Sampler],
        step: int,
        progress: Progress,
        check: Callable[[], None],
    ) -> PromptsAnswered | None:
        """Returns the answers with the current weights, or None if there are no prompts.

        Every submitted step must be applied. `check` is called often; if it raises an exception,
        the work ends.
        """
        if not self._prompts:
            return None
        written, most = 0, self._most * len(self._prompts)

        def on_token(_: int, __: int) -> None:
            nonlocal written
            check()
            written += 1
            progress(written, most, "Answering the sample prompts")

        limits = AnswerLimits(self._most, self._ends, self._longest)
        answers = sampler().generate(self._ids, limits, on_token=on_token)
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        pairs = zip(self._prompts, texts)
        return PromptsAnswered(step, [{"prompt": prompt, "answer": text} for prompt, text in pairs])


# ---------------------------------------------------------------------- evaluation


Poll = Callable[[], None]

SHOWN_SAMPLES = 8
"""Number of answers to validation prompts in the record, at most."""
MOST_ROW_LOSSES = 512
"""Number of losses of rows in the record of an evaluation, at most. Of more rows, consecutive ones
share a loss, always the same ones.
"""
FEW_PROMPTS = 3
"""Number of validation prompts that are answered at evaluations, where they cost little."""
FEW_SHARE = 0.02
"""Largest share of a session's time in which they are answered."""


class _Budget:
    """Time that may be spent on something, as a share of all time since this object was made."""

    def __init__(self, share: float):
        self._share = share
        self._began = time.perf_counter()
        self._spent = 0.0
        self._next = 0.0
        """Seconds that the next time is expected to take."""

    def allows(self) -> bool:
        """Returns whether the next time is within the share."""
        passed = time.perf_counter() - self._began
        return self._spent + self._next <= self._share * passed

    def expect(self, seconds: float) -> None:
        """Says how long the next time takes, as far as is known."""
        self._next = seconds

    def spend(self, seconds: float) -> None:
        """Says how long this time has taken."""
        self._spent += seconds
        self._next = seconds


class Evaluator:
    """Measures the current weights; every submitted step must be applied.

    Its methods call `poll` often, to check for requests; if `poll` raises an exception, the work
    ends. The evaluator does not store `poll`: a method of its owner would form a reference cycle,
    which would keep the memory of a finished run allocated.

    If the GPU's memory does not last, the evaluation is planned with less and repeated.
    """

    def __init__(self, session: Session, prepared: Prepared, oom_recovery: OomRecovery):
        """Raises DataError for a fixed prompt that the model cannot be given."""
        self._session = session
        self._prepared = prepared
        self._oom_recovery = oom_recovery
        model, tokenizer, config = prepared.model, prepared.tokenizer, session.config
        trained = prepared.data.ends
        self._ends = end_tokens(model.config, tokenizer, config.model.source, trained)
        self._prompts = FixedPrompts(config, model, tokenizer, self._ends)
        self._few = _Budget(FEW_SHARE)
        self._is_speed_told = False

    def measure_loss(self, step: int, poll: Poll) -> None:
        """Records the mean loss on the validation rows, if any of their tokens has a loss.

        A step that is evaluated already, before a resume for example, is not evaluated again.

        Raises NonFiniteError if the loss is NaN or infinite.
        """
        work = functools.partial(self._measure_loss, step, poll)
        self._oom_recovery.repeated(Moment(step, "evaluation"), work)

    def _measure_loss(self, step: int, poll: Poll) -> None:
        prepared = self._prepared
        rows, evaluated = prepared.data.eval, self._session.recorder.snapshot.evals.step
        if not len(rows) or not rows.loss_tokens or (evaluated and evaluated[-1] == step):
            return
        began = time.perf_counter()
        chosen, longest = prepared.chosen, self._session.config.data.max_seq_len
        micro_batches = one_pass(rows, chosen.micro_batch_size, chosen.pad_up_to(longest))
        losses: list[Number] = []
        tokens: list[int] = []
        figures: dict[str, float] = {}
        if isinstance(rows, PairRows | MarkedRows):
            pairs = evaluated_pairs(prepared.engine, sweeps(micro_batches), poll)
            if isinstance(rows, MarkedRows):
                size, pad_up_to = chosen.micro_batch_size, chosen.pad_up_to(longest)
                kl_completions = sweeps(one_pass(rows.kl_completions, size, pad_up_to))
                diverged = evaluated_pairs(prepared.engine, kl_completions, poll).diverged()
                pairs = replace(pairs, divergence=diverged)
            loss, figures = pairs.loss(), pairs.metrics()
        else:
            found = prepared.engine.evaluate_rows(micro_batches, poll)
            loss = found.loss
            losses, tokens = means_of_rows(found.sums, found.tokens)
        if not math.isfinite(loss):
            raise NonFiniteError(_not_finite(step))
        seconds = time.perf_counter() - began
        self._session.recorder.emit(
            EvalFinished(step, loss, rows.loss_tokens, seconds, losses, tokens, figures)
        )

    def answer_prompts(self, step: int, poll: Poll) -> None:
        """Answers the fixed prompts, if there are any, and records the answers.

        Nothing is answered where the record has the answers after this step.
        """
        answered = self._session.recorder.snapshot.prompt_answers
        if answered and answered[-1].step == step:
            return
        work = functools.partial(self._answer_prompts, step, poll)
        self._oom_recovery.repeated(Moment(step, "prompts"), work)

    def _answer_prompts(self, step: int, poll: Poll) -> None:
        progress = self._session.progress("prompts")
        answered = self._prompts.answer(self._sampler, step, progress, poll)
        if answered is not None:
            self._session.recorder.emit(answered)

    def answer_few(self, step: int, poll: Poll) -> None:
        """Answers the first validation prompts and records the answers, so that a person sees how
        they change: where validation prompts are answered before and after training alone, and
        there are no prompts of `output.sample_prompts`. It takes at most `FEW_SHARE` of the
        session's time, for which some evaluations are left out.
        """
        output = self._session.config.output
        is_asked = output.exact_match_samples and not output.sample_prompts
        is_asked = is_asked and output.best_by != "exact_match"
        answered = self._session.recorder.snapshot.prompt_answers
        if not is_asked or (answered and answered[-1].step == step) or not self._few.allows():
            return
        work = functools.partial(self._answer_few, step, poll)
        self._oom_recovery.repeated(Moment(step, "prompts"), work)

    def _answer_few(self, step: int, poll: Poll) -> None:
        samples = self._session.config.output.exact_match_samples
        prompts = self._prepared.data.eval_prompts(min(FEW_PROMPTS, samples))
        if not prompts:
            return
        began = time.perf_counter()
        texts = self._answers(prompts, self._session.progress("prompts"), "Answering", poll)
        self._few.spend(time.perf_counter() - began)
        answers = [Answer(prompt=p.prompt_text, answer=text) for p, text in zip(prompts, texts)]
        self._session.recorder.emit(PromptsAnswered(step, answers))

    def measure_exact_match(self, moment: str, step: int, poll: Poll) -> None:
        """Counts the validation prompts that are answered exactly as expected, and records the
        count.

        `moment` is before, during or after training. Prompts that these weights have answered
        during training are not asked again.
        """
        work = functools.partial(self._measure_exact_match, moment, step, poll)
        self._oom_recovery.repeated(Moment(step, "exact_match"), work)

    def _measure_exact_match(self, moment: str, step: int, poll: Poll) -> None:
        prepared, output = self._prepared, self._session.config.output
        prompts = prepared.data.eval_prompts(output.exact_match_samples)
        if not prompts:
            return
        known = self._answered(step, len(prompts))
        if known is not None:
            if moment == "after":
                self._session.recorder.emit(
                    ExactMatchMeasured(step, moment, known.correct, known.total, known.samples)
                )
            return
        began = time.perf_counter()
        progress = self._session.progress("sample")
        texts = self._answers(prompts, progress, f"Answering, {moment} training", poll)
        few = min(1.0, FEW_PROMPTS / len(prompts))
        # A GPU that waits for weights answers all of them in the time of a few.
        scale = few if prepared.backend.device.type == "cpu" else 1.0
        self._few.expect(scale * (time.perf_counter() - began))
        correct = sum(text == prompt.expected_text for text, prompt in zip(texts, prompts))
        samples = [_sample(prompt, text) for prompt, text in zip(prompts[:SHOWN_SAMPLES], texts)]
        self._session.recorder.emit(
            ExactMatchMeasured(step, moment, correct, len(prompts), samples)
        )

    def _answers(
        self, prompts: Sequence[Prompt], progress: Progress, message: str, poll: Poll
    ) -> list[str]:
        """Returns the greedy answers to `prompts`."""
        prepared = self._prepared
        longest = max(prompt.answer_tokens for prompt in prompts)
        most = longest * len(prompts)
        written = 0

        def on_token(_: int, __: int) -> None:
            nonlocal written
            poll()
            written += 1
            progress(min(written, most), most, message)

        answers = self._sampler().generate(
            [prompt.prompt_ids for prompt in prompts],
            AnswerLimits(longest + SPARE_TOKENS, self._ends, longest_row(prepared.model.config)),
            on_token=on_token,
        )
        tokenizer = prepared.tokenizer
        return [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]

    def _sampler(self) -> Sampler:
        """Returns the run's sampler. Where it is slow, the record says so, once."""
        sampler = self._prepared.sampler
        if not self._is_speed_told and sampler.slow_note:
            self._session.log("warning", sampler.slow_note)
        self._is_speed_told = True
        return sampler

    def _answered(self, step: int, total: int) -> ExactMatchMeasured | None:
        """Returns the answers of the weights after `step` to all `total` prompts during training,
        or None if the record has none.
        """
        for known in reversed(self._session.recorder.snapshot.exact_matches):
            if known.step == step and known.total == total and known.moment == "during":
                return known
        return None


def _sample(prompt: Prompt, answer: str) -> dict[str, str]:
    """Returns an answer to a validation prompt in the form of the record."""
    sample = {
        "prompt": prompt.prompt_text,
        "expected": prompt.expected_text,
        "answer": answer,
    }
    return sample | ({"rejected": prompt.rejected_text} if prompt.rejected_text else {})


def _not_finite(step: int) -> str:
    """Returns a sentence about an evaluation after `step` whose loss is NaN or infinite."""
    if not step:
        return (
            "The validation loss before the first step is not a finite number, so these weights "
            "cannot be trained; check the model in model.source, or set model.dtype to float32."
        )
    return (
        f"The validation loss after step {step} is not a finite number; start a new run with a "
        "lower train.learning_rate."
    )


def means_of_rows(sums: np.ndarray, tokens: np.ndarray) -> tuple[list[Number], list[int]]:
    """Returns the mean loss of each row or document, rounded to six digits, and the tokens that it
    is the mean of. Row i has the sum `sums[i]` over `tokens[i]` tokens. Of more than
    `MOST_ROW_LOSSES` rows, consecutive ones are taken together.
    """
    if len(sums) > MOST_ROW_LOSSES:
        entry = np.arange(len(sums)) * MOST_ROW_LOSSES // len(sums)
        sums = np.bincount(entry, sums, minlength=MOST_ROW_LOSSES)
        tokens = np.bincount(entry, tokens, minlength=MOST_ROW_LOSSES).astype(np.int64)
    means = sums / np.maximum(tokens, 1)
    return [float(f"{mean:.6g}") for mean in means.tolist()], tokens.tolist()
