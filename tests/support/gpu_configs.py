"""Settings of a job for a GPU."""

from __future__ import annotations

import torch

from tests.support.folders import make_config, make_model


def gpu_config(tmp_path, dtype: str, **values):
    make_model(
        tmp_path / "model", "llama", getattr(torch, dtype), hidden_size=256, intermediate_size=512
    )
    return make_config(
        tmp_path,
        **{"engine.device": "cuda", "model.dtype": dtype, "train.learning_rate": 1e-3} | values,
    )
