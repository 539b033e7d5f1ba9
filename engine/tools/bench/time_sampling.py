"""The speed of sampling from random weights: answers to random prompts, with no end tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.runtime.sampling.generate import Sampler
from engine.tools.bench.steps import Planes
from engine.training.weights.open_for_sampling import sampling_engine


@dataclass(frozen=True)
class SamplingJob:
    """Answers to draw: `answers` to each of `prompts` prompts."""

    prompts: int
    answers: int
    new_tokens: int
    prompt_tokens: int = 64

    @property
    def text(self) -> str:
        """The job in words."""
        rows = f"{self.prompts} prompts of {self.prompt_tokens} tokens x {self.answers} answers"
        return f"{rows} of {self.new_tokens} tokens"


def time_sampling(planes: Planes, job: SamplingJob) -> dict[str, Any]:
    """Draws the answers of a job twice, and returns figures of the second time, in which kernels
    are chosen and compiled. What it takes to compute prompts and to record steps is in them.
    """
    backend = planes.backend
    engine = sampling_engine(
        planes.model, planes.host_states, backend, many_rows=job.prompts * job.answers > 1
    )
    try:
        sampler = Sampler(engine)
        vocabulary = planes.model.config.get_text_config().vocab_size
        prompts = np.random.default_rng(0).integers(0, vocabulary, (job.prompts, job.prompt_tokens))
        limits = AnswerLimits(job.new_tokens, set())
        for _ in range(2):
            backend.reset_peak()
            began = time.perf_counter()
            steps: list[float] = []
            tokens = 0
            with sampler.decoding() as decoding:
                for number, prompt in enumerate(np.repeat(prompts, job.answers, 0).tolist()):
                    decoding.add(prompt, limits, Drawing(temperature=1.0, seed=number))
                while not decoding.is_idle:
                    begun = time.perf_counter()
                    tokens += len(decoding.step())
                    steps.append(time.perf_counter() - begun)
            seconds = time.perf_counter() - began
    finally:
        engine.close()
    return {
        "job": job.text,
        "way": sampler.way,
        "slow_note": sampler.slow_note,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "median_step_seconds": float(np.median(steps)),
        "peak_device_bytes": backend.memory()["peak"],
        "blocks_on_device": engine.choices.placement.blocks_kept_in_slots,
        "blocks": len(planes.model.blocks),
    }
