"""The head takes whole pairs at once where they fit its chunk, and then computes each position
once; whatever the chunk, losses, gradients and sums are the same but for rounding.
"""

from __future__ import annotations

import pytest
import torch

from engine.config.preference_settings import Objective
from engine.config.settings import ModelConfig
from engine.model.build.skeleton import Skeleton
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.step.engine_settings import EngineSettings
from engine.tools.bench.random_pairs import AnswersOfSteps, random_answers
from engine.tools.bench.steps import Planes
from tests.support.tiny import VOCAB, tiny_config

pytestmark = pytest.mark.computing
PAIRS, LENGTH = 5, 12
OF_PAIR = 2 * (LENGTH - 1)
CHUNKS = {"all": 1000, "two": 2 * OF_PAIR + 3, "one": OF_PAIR, "half": OF_PAIR // 2}
HOW = ModelConfig(source="random", init="random", dtype="float32")


def step_with(chunk: int, objective: Objective, monkeypatch):
    """The applied step, the trained weights, and how many positions the head computed in it."""
    passed: list[int] = []
    plain = Skeleton.logits

    def logits(self, hidden):
        passed.append(len(hidden))
        return plain(self, hidden)

    planes = Planes.open(tiny_config("llama"), CpuBackend(), HOW)
    answers = AnswersOfSteps(random_answers(objective, PAIRS, LENGTH, VOCAB), PAIRS)
    engine = planes.engine(EngineSettings(PlanChoices(), 2 * PAIRS * LENGTH, chunk, 1.0))
    applied = []
    try:
        answers.compare(engine)
        with monkeypatch.context() as patched:
            patched.setattr(Skeleton, "logits", logits)
            engine.train_step(1, answers.batches(), 1e-3, applied.append)
        engine.drain()
        weights = planes.host_states.tensor("block 0", "weight_high").clone()
        return applied[0], weights, passed
    finally:
        engine.close()
        planes.close()


@pytest.mark.parametrize("objective", ["dpo", "orpo"])
def test_a_pair_that_fits_passes_once(monkeypatch, objective):
    chosen = Objective(name=objective)
    found = {name: step_with(chunk, chosen, monkeypatch) for name, chunk in CHUNKS.items()}
    whole, weights, _ = found["all"]
    for name, (applied, trained, passed) in found.items():
        assert sum(passed) == PAIRS * OF_PAIR * (2 if name == "half" else 1), name
        assert max(passed) <= CHUNKS[name], name
        assert applied.loss == pytest.approx(whole.loss, rel=1e-5), name
        assert applied.grad_norm == pytest.approx(whole.grad_norm, rel=1e-4), name
        torch.testing.assert_close(
            torch.tensor(applied.sequence_sums), torch.tensor(whole.sequence_sums)
        )
        torch.testing.assert_close(trained, weights, rtol=1e-4, atol=1e-5)
    assert [len(passed) for _, _, passed in found.values()] == [1, 3, 5, 20]
