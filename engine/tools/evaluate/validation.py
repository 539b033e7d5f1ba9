"""The validation rows of a run, asked of loaded weights: their loss, the answers to their prompts,
and whether these are right.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from engine.config.settings import TrainConfig
from engine.data.batches.loader import PreparedData, Prompt
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import one_pass
from engine.data.tokens.template_process import template_process
from engine.data.tokens.trained_ends import ids_of
from engine.errors import DataError, FitError, GpuMemoryError, NonFiniteError
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.planning.fit.answers_memory import SPARE_TOKENS
from engine.progress import Progress, labeled
from engine.runs.summaries.evaluation_results import (
    Answer,
    AnswersMatched,
    LossMeasured,
    PairsCompared,
    PromptsAnswered,
    Side,
)
from engine.runtime.sampling.generate import AnswerLimits
from engine.runtime.step.inference_passes import sweeps
from engine.tools.chat.chat_engines import ChatEngine
from engine.training.loop.evaluation import means_of_rows
from engine.training.loop.prepare import prepare_rows
from engine.training.loop.reference_logps import sequence_logps

SHOWN_TOKENS = 256
"""Tokens of an answer that is shown side by side, at most."""
_PASS_TOKENS = 4096
"""Positions of a micro-batch at most, unless it is a single row."""
_BORROWED_PROMPTS = 32
"""Number of prompts that a paused run answers at once. Between them it can be resumed."""


def validation_rows(config: TrainConfig, progress: Progress) -> PreparedData:
    """Returns the rows of a run, without its weights. Raises DataError where they cannot be read,
    and where none of them are for validation.
    """
    read = read_model(config)
    model = build_model(read.config, config.model, config.train.parts)
    data = prepare_rows(config, model, read.tokenizer, labeled(progress, "Reading the data"))
    template_process().end_if_memory_is_short()  # the weights are loaded next
    if not len(data.eval):
        raise DataError(
            "This run has no validation rows, so nothing can be compared with them; set "
            "data.eval_fraction in the next run, or choose benchmarks."
        )
    return data


class ValidationRows:
    """The validation rows of a run, and one side that they are asked of."""

    def __init__(self, id: str, side: Side, data: PreparedData, progress: Progress):
        """`progress` gets how much of a part is done, and may end the work with an exception."""
        self._id = id
        self._side = side
        self._data = data
        self._progress = progress

    # ------------------------------------------------------------------ the loss

    def loss(self, of: ChatEngine) -> LossMeasured | PairsCompared | None:
        """Returns the loss of these weights or, of pairs, which of their answers are likelier; None
        where answers have marks, of which there is no such figure.

        Raises NonFiniteError for a loss that is no number, and FitError where the GPU's memory does
        not last for a single row.
        """
        rows = self._data.eval
        if isinstance(rows, MarkedRows):
            return None
        size = max(1, _PASS_TOKENS // max(1, rows.longest * rows.sequences_per_row))
        while True:
            try:
                measure = self._compared if isinstance(rows, PairRows) else self._loss
                return measure(of, size)
            except (torch.OutOfMemoryError, GpuMemoryError) as error:
                if size == 1:
                    raise _short_of_memory(of, error) from error
                size = size // 2

    def _loss(self, of: ChatEngine, size: int) -> LossMeasured:
        rows = self._data.eval
        total, weight, done = 0.0, 0.0, 0
        sums, tokens = [], []
        for sweep in sweeps(one_pass(rows, size)):
            check = self._checked(done, len(rows), "Validation loss")
            engine = of.sampler().engine
            found = of.call(partial(engine.evaluate_rows, sweep, check))
            share = sum(batch.loss_weight for batch in sweep)
            total += found.loss * share
            weight += share
            sums.append(found.sums)
            tokens.append(found.tokens)
            done += sum(len(batch.input_ids) for batch in sweep)
        loss = total / (weight or 1.0)
        if not np.isfinite(loss):
            raise NonFiniteError(f"The validation loss of {of.label} is not a finite number.")
        losses, counts = means_of_rows(np.concatenate(sums), np.concatenate(tokens))
        return LossMeasured(self._id, self._side, loss, list(map(float, losses)), counts)

    def _compared(self, of: ChatEngine, size: int) -> PairsCompared:
        rows = self._data.eval
        engine = of.sampler().engine
        check = self._checked(0, 0, "Chosen and rejected answers")
        found = of.call(partial(sequence_logps, engine, rows, (size, 0), check))
        return PairsCompared(self._id, self._side, (found[:, 0] > found[:, 1]).tolist())

    def _checked(self, done: int, total: int, message: str) -> Callable[[], None]:
        return lambda: self._progress(done, total, message)

    # ------------------------------------------------------------------ answers

    def matched(self, of: ChatEngine, most: int) -> AnswersMatched | None:
        """Returns which of the first `most` prompts are answered exactly as expected; None where
        the data have no prompts. An answer is cut a little behind the longest expected one, as in
        the run itself.
        """
        prompts = self._data.eval_prompts(most)
        if not prompts:
            return None
        longest = max(prompt.answer_tokens for prompt in prompts) + SPARE_TOKENS
        answers, _ = self._answers(of, prompts, longest, "Answers right")
        right = [answer == prompt.expected_text for answer, prompt in zip(answers, prompts)]
        return AnswersMatched(self._id, self._side, right)

    def answered(self, of: ChatEngine, most: int) -> PromptsAnswered | None:
        """Returns the answers to the first `most` prompts, which are to be read side by side; None
        where the data have no prompts.
        """
        prompts = self._data.eval_prompts(most)
        if not prompts:
            return None
        began = time.perf_counter()
        answers, tokens = self._answers(of, prompts, SHOWN_TOKENS, "Answers side by side")
        shown = [
            Answer(prompt.prompt_text, prompt.expected_text, answer)
            for prompt, answer in zip(prompts, answers)
        ]
        seconds = time.perf_counter() - began
        return PromptsAnswered(self._id, self._side, shown, tokens, seconds)

    def _answers(
        self, of: ChatEngine, prompts: Sequence[Prompt], longest: int, message: str
    ) -> tuple[list[str], int]:
        """Returns the greedy answers to prompts, and the number of their tokens."""
        builder = of.prompt_builder
        ends = builder.ends | set(ids_of(builder.tokenizer, self._data.ends))
        limits = AnswerLimits(longest, ends, builder.longest)
        most, written = longest * len(prompts), 0

        def on_token(*_: Any) -> None:
            nonlocal written
            written += 1
            self._progress(min(written, most), most, message)

        answers: list[list[int]] = []
        at_once = _BORROWED_PROMPTS if of.is_borrowed else len(prompts)
        for start in range(0, len(prompts), at_once):
            asked = [prompt.prompt_ids for prompt in prompts[start : start + at_once]]
            generate = partial(of.sampler().generate, asked, limits, on_token=on_token)
            with _told_memory(of):
                answers += of.call(generate)
        self._progress(most, most, message)
        decode = builder.tokenizer.decode
        texts = [decode(ids, skip_special_tokens=True).strip() for ids in answers]
        return texts, sum(map(len, answers))


@contextlib.contextmanager
def _told_memory(of: ChatEngine) -> Iterator[None]:
    try:
        yield
    except (torch.OutOfMemoryError, GpuMemoryError) as error:
        raise _short_of_memory(of, error) from error


def _short_of_memory(of: ChatEngine, error: Exception) -> FitError:
    in_use = getattr(error, "in_use", "")
    return FitError(
        f"The GPU ran out of memory{f' ({in_use})' if in_use else ''} while {of.label} was "
        "evaluated; close other programs or use a GPU with more memory."
    )
