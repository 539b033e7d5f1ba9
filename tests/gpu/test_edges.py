"""The verdict at the edge on a GPU: with just enough memory a run completes, with a little less it
is refused.
"""

from __future__ import annotations

import pytest
import torch

from engine.planning.fit.requirements import FitStatus
from engine.text import GIB, MIB
from engine.training.loop import planning
from engine.training.loop.run import start_run
from tests.support.edges import judged_under_a_limit
from tests.support.folders import make_config, make_data, make_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma3_text"])
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
def test_a_run_completes_with_just_enough_gpu_memory_and_is_refused_with_a_mebibyte_less(
    tmp_path, monkeypatch, family, kernels
):
    make_model(
        tmp_path / "model",
        family,
        torch.bfloat16,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=6,
    )
    make_data(tmp_path / "data.jsonl", 4000)
    config = make_config(
        tmp_path,
        **{
            "train.steps": 3,
            "train.warmup_steps": 1,
            "train.batch_size": 64,
            "train.micro_batch_size": "auto",
            "data.max_seq_len": 256,
            "model.dtype": "bfloat16",
            "engine.device": "cuda",
            "engine.kernels": kernels,
        },
    )
    asked: list[tuple] = []
    estimate = planning.estimate
    monkeypatch.setattr(
        planning, "estimate", lambda *arguments: asked.append(arguments) or estimate(*arguments)
    )

    def run(mebibytes: int):
        return start_run(
            config.with_values({"engine.gpu_memory_gib": mebibytes * MIB / GIB}), tmp_path / "runs"
        ).execute()

    try:
        assert run(16 * 1024).state == "finished"
        job, *rest = asked[-1]
        low, high = 0, 16 * 1024
        while high - low > 1:
            middle = (low + high) // 2
            capped = job.with_values({"engine.gpu_memory_gib": middle * MIB / GIB})
            fits = estimate(capped, *rest).status != FitStatus.DOES_NOT_FIT
            low, high = (low, middle) if fits else (middle, high)
        enough = run(high)
        assert enough.state == "finished", enough.reason
        refused = run(low)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (refused.state, refused.error_type) == ("failed", "FitError")
    assert "does not fit" in refused.reason and "GPU" in refused.reason


def test_the_kernel_holds_a_run_to_what_it_said_it_needs(tmp_path):
    judged_under_a_limit(tmp_path, "cuda")
