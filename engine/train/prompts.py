"""A run answers fixed prompts at intervals, so that its answers can be compared over time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engine.config.settings import TrainConfig
from engine.data.encode import Encoder
from engine.data.template_process import template_process
from engine.data.trained_ends import ids_of
from engine.errors import DataError
from engine.model.units import StreamedModel
from engine.progress import Progress
from engine.runs.events import PromptsAnswered
from engine.sampling.generate import AnswerLimits, Sampler, longest_row


class FixedPrompts:
    """The prompts of `output.sample_prompts` are answered greedily at each evaluation.

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
        self, sampler: Sampler, step: int, progress: Progress, check: Callable[[], None]
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
        answers = sampler.generate(self._ids, limits, on_token=on_token)
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in answers]
        pairs = zip(self._prompts, texts)
        return PromptsAnswered(step, [{"prompt": prompt, "answer": text} for prompt, text in pairs])
