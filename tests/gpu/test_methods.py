"""Adapters and preferences on a GPU: whole runs learn there what they learn on the CPU, resume to
the bit, and any plan of adapters on lanes that run at once gives the same bits.
"""

from __future__ import annotations

import pytest

from engine.config.adapters import Adapters
from engine.planning.schedule.ops import Lane
from engine.runs.record.events import StepFinished
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config
from tests.support.made_pairs import marked_config, pair_config
from tests.support.plans_with_adapters import BASE, planes_after
from tests.support.same_bits import assert_same_bits
from tests.support.trained_runs import events_of, execute, planes_on_disk

LORA = {"train.method": "lora", "train.lora_rank": 4, "train.learning_rate": 1e-2}
JOBS = {
    "adapters": (make_config, LORA),
    "adapters that drop": (make_config, LORA | {"train.lora_dropout": 0.2}),
    "the last blocks": (make_config, {"train.method": "parts", "train.last_blocks": 1}),
    "dpo": (pair_config, {}),
    "dpo of adapters": (pair_config, LORA),
    "orpo": (pair_config, {"train.objective": "orpo"}),
    "kto": (marked_config, {}),
    "smoothing and noise": (
        make_config,
        {"train.label_smoothing": 0.1, "train.neftune_alpha": 5.0},
    ),
}
PLANS = {
    "kept and resident": dict(blocks_without_recompute=1, blocks_kept_in_slots=1),
    "block inputs on the host": dict(offloaded_block_inputs=True, block_input_rings=1),
    "GPU-resident": dict(gpu_resident_units=2),
    "GPU-resident apart": dict(
        gpu_resident_units=3, gpu_resident_apart=True, slots=3, prefetch_depth=2
    ),
}
ADAPTERS = {"everywhere": Adapters(rank=4), "dropping": Adapters(rank=4, dropout=0.3)}


def finished(config, folder):
    """A run with these settings, which has ended."""
    run = start_run(config, folder)
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    return run


@pytest.mark.gpu
@pytest.mark.parametrize("job", JOBS)
def test_a_gpu_learns_what_the_cpu_learns(deterministic, tmp_path, job):
    make, values = JOBS[job]
    config = make(tmp_path, **values)
    here = events_of(finished(config, tmp_path / "cpu"), StepFinished)
    on_gpu = config.with_values({"engine.device": "cuda", "engine.kernels": "eager"})
    there = events_of(finished(on_gpu, tmp_path / "gpu"), StepFinished)
    # What is dropped is drawn by each device's own generator, so only the first loss is compared.
    compared = 1 if "drop" in job else len(here)
    close = 0.2 if "drop" in job else 2e-4
    assert len(here) == len(there) == 8
    for mine, other in list(zip(there, here))[:compared]:
        assert mine.loss == pytest.approx(other.loss, rel=close), mine.step
        if compared > 1:
            assert mine.grad_norm == pytest.approx(other.grad_norm, rel=5e-3), mine.step
            assert mine.preference == pytest.approx(other.preference, rel=1e-2, abs=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kernels", ["eager", "compiled"])
@pytest.mark.parametrize("job", ["adapters that drop", "dpo of adapters", "kto"])
def test_a_stopped_run_resumes_to_the_bit(deterministic, tmp_path, job, kernels):
    make, values = JOBS[job]
    on_gpu = {"engine.device": "cuda", "model.dtype": "bfloat16", "engine.kernels": kernels}
    config = make(tmp_path, **values | on_gpu)
    whole = finished(config, tmp_path / "runs")
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {3: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    found, expected = planes_on_disk(again), planes_on_disk(whole)
    assert [name for name in expected if found[name] != expected[name]] == []


@pytest.mark.computing
@pytest.mark.parametrize("case", ADAPTERS)
def test_any_plan_gives_the_same_bits(lanes, case):
    expected = planes_after(BASE, ADAPTERS[case], "bfloat16", lanes())
    for changes in PLANS.values():
        choices = BASE.changed(**changes)
        assert_same_bits(planes_after(choices, ADAPTERS[case], "bfloat16", lanes()), expected)


@pytest.mark.computing
@pytest.mark.parametrize("late", [(Lane.COMPUTE,), (Lane.HOST,), (Lane.H2D, Lane.D2H)], ids=str)
def test_delays_change_nothing(lanes, late):
    choices = BASE.changed(offloaded_block_inputs=True)
    expected = planes_after(choices, ADAPTERS["everywhere"], "bfloat16", lanes())
    assert_same_bits(
        planes_after(choices, ADAPTERS["everywhere"], "bfloat16", lanes(late)), expected
    )
