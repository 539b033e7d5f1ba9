"""Plans with regularized losses, and the planes that they leave."""

from __future__ import annotations

from functools import partial

from engine.config.regularization import Regularization
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import EmbedBackward
from tests.support.tiny import VOCAB, plain_model, random_batches, streamed, tiny_config

SMOOTHED, NOISY = Regularization(label_smoothing=0.1), Regularization(neftune_alpha=5.0)
BOTH = Regularization(0.2, 8.0)
BASE = PlanChoices().changed(micro_batches=2)


def planes_after(
    choices, regularization, dtype="float32", parts=None, vocabulary=VOCAB, backend=None
):
    plain = plain_model(tiny_config("qwen3", vocab_size=vocabulary, tie_word_embeddings=False))
    how = dict(backend=backend, dtype=dtype, parts=parts, regularization=regularization)
    run = streamed(plain, choices, **how)
    in_chunks = [op.chunk for op in run.engine.plan.ops if isinstance(op, EmbedBackward)]
    assert any(in_chunks) == choices.streaming.embed_and_head_in_kept_gradients
    return run.planes_after(
        choices.batching.micro_batches, made=partial(random_batches, vocabulary=vocabulary)
    )
