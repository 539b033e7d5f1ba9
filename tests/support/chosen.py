"""A job of eight billion parameters, and what is chosen for it on a GPU of any size."""

from __future__ import annotations

import dataclasses

from engine.config.settings import TrainConfig
from engine.machine.rates import Rates
from engine.planning.fit.choose import choose
from engine.planning.fit.job import Job, Target
from engine.planning.shape.activation_sizes import Activations
from engine.planning.shape.attention_shape import AttentionShape
from engine.planning.shape.model_shape import ModelShape
from engine.planning.shape.unit_shape import UnitShape
from engine.text import GIB

FAST_RATES = Rates(50e9, 50e9, 6e14, 5e14, 4e12, 4e9, 3e9, 45e9, 45e9, 3e14)
"""A machine with a large GPU has these rates."""


def big_shape(dtype: str = "bfloat16") -> ModelShape:
    """Qwen2.5 7B as its configuration gives it, without building it."""
    block = UnitShape(
        "block",
        233057792,
        233057792,
        18944,
        Activations(225400.0),
        Activations(237688.0, 2.0),
        Activations(106616.0),
    )
    embed_and_head = 152064 * 3584
    units = (
        UnitShape("embed", embed_and_head, embed_and_head),
        *(dataclasses.replace(block, name=f"block {k}") for k in range(28)),
        UnitShape("head", embed_and_head + 3584, embed_and_head + 3584),
    )
    return ModelShape(
        model_type="qwen2",
        source="qwen",
        dtype=dtype,
        attention=AttentionShape(implementation="sdpa", heads=28, width=3584),
        units=units,
        tied=False,
        packs=True,
        hidden_size=3584,
        vocab_size=152064,
        active_parameters=sum(u.parameter_count for u in units),
        max_position_embeddings=32768,
        logit_bytes=14 if dtype == "bfloat16" else 16,
        argument_numel=256,
    )


def config(**changes) -> TrainConfig:
    base = TrainConfig.from_dict(
        {
            "model": {"source": "m"},
            "data": {"source": "d", "packing": False},
            "train": {"batch_size": 148},
        }
    )
    return base.with_values({name.replace("__", "."): value for name, value in changes.items()})


def on_gpu(gib: float, shape: ModelShape | None = None, length: int = 1024, **changes):
    job = Job(shape or big_shape(), config(**changes), length)
    return choose(job, Target("cuda", round(gib * GIB), 200 * GIB))
