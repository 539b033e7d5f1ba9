"""Fixed prompts that a run answers as it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.encode import Encoder
from engine.errors import DataError
from engine.model.units import StreamedModel
from engine.progress import Progress
from engine.runs.events import PromptsAnswered
from engine.runtime.generate import AnswerLimits, Sampler, longest_row


class FixedPrompts:
    """Texts that a run answers greedily at each evaluation, each asked as the examples of training
    are written.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        config: DataConfig,
        model: StreamedModel,
        tokenizer: Any,
        ends: set[int],
    ):
        """Raises DataError for a prompt that cannot be asked."""
        self._prompts, self._most, self._tokenizer, self._ends = (
            prompts,
            max_new_tokens,
            tokenizer,
            ends,
        )
        self._longest = longest_row(model.config)
        encoder = Encoder(tokenizer, config.train_on, config.max_seq_len) if prompts else None
        self._ids = [encoder.question(prompt) for prompt in prompts]
        for k, ids in enumerate(self._ids):
            if self._longest is not None and len(ids) >= self._longest:
                raise DataError(
                    f"output.sample_prompts[{k}]: the prompt has {len(ids):,} tokens and this "
                    f"model takes {self._longest:,} at most; shorten it."
                )

    def answer(
        self, sampler: Sampler, step: int, progress: Progress, check: Callable[[], None]
    ) -> PromptsAnswered | None:
        """The answers of the weights as they are, every step applied; None without prompts. `check`
        is called often, and what it raises gives up.
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
        return PromptsAnswered(
            step, [{"prompt": prompt, "answer": text} for prompt, text in zip(self._prompts, texts)]
        )
