"""No figure of a bench can be false: each update is counted once and where it ran, the mean leaves
the warm-up out and says how far steps are apart, and what is above what the machine reaches is not
shown.
"""

from __future__ import annotations

import json
import re
import statistics
from types import SimpleNamespace

import pytest

import launch
from engine.tools.bench.bench_table import as_text, streamed_as_text
from engine.tools.bench.credible import share_of, without_doubtful
from engine.tools.bench.steady import steady
from engine.tools.bench.steps import UPDATED, rates, updated_by_place
from tests.support.device_updates import DEVICE_UPDATES, updated_on_device
from tests.support.folders import make_config
from tests.support.same_bits import BASE
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

TALL = 340
"""The table of so many tokens has several pieces."""
PLANS = {
    "on the host": BASE,
    "gradients on the GPU": BASE.changed(gradients_on_gpu=True),
    "late moments": BASE.changed(moments_after_weights=True),
    "some on the device": updated_on_device(DEVICE_UPDATES["some"], 2),
    "some, gradients on the GPU": updated_on_device(
        DEVICE_UPDATES["others"], 2, gradients_on_gpu=True
    ),
    "all on the device": updated_on_device(DEVICE_UPDATES["all"], 2),
    "two live on the device": BASE.changed(gpu_resident_units=2),
    "all live on the device": BASE.changed(gpu_resident_units=5),
}


@pytest.mark.parametrize("name", PLANS)
def test_each_parameter_is_updated_once_and_where_the_plan_says(name):
    choices = PLANS[name]
    plain = plain_model(tiny_config("llama", vocab_size=TALL))
    numels = {"embed": plain.model.embed_tokens.weight.numel()}
    for place, block in enumerate(plain.model.layers):
        numels[f"block {place}"] = sum(p.numel() for p in block.parameters())
    numels["head"] = sum(p.numel() for p in [*plain.model.norm.parameters(), plain.lm_head.weight])
    run = streamed(plain, choices, dtype="bfloat16")
    applied = []
    batches = random_batches(choices.batching.micro_batches, vocabulary=TALL)
    run.engine.train_step(1, batches, 1e-3, applied.append)
    run.engine.drain()
    spans = applied[0].spans
    planes = SimpleNamespace(
        model=SimpleNamespace(dtype="bfloat16"), host_states=run.host_states, workers=None
    )
    there = set(choices.updates.device_updated_units) | set(
        [*numels][: choices.placement.gpu_resident_units]
    )
    expected = {
        "host": sum(numel for unit, numel in numels.items() if unit not in there),
        "device": sum(numel for unit, numel in numels.items() if unit in there),
    }
    counted, found = updated_by_place(spans, planes), rates(spans, planes)
    # Planes also have a few elements between parameters.
    assert counted == {where: pytest.approx(numel, rel=0.01) for where, numel in expected.items()}
    assert sum(counted.values()) == sum(layout.numel for layout in run.host_states.layouts.values())
    for where, rate in (("host", "adamw_g_s"), ("device", "device_adamw_g_s")):
        took = sum(span.end - span.start for span in spans if span.op.kind in UPDATED[where])
        if expected[where]:
            assert found[rate] == pytest.approx(counted[where] / took / 1e9)
        else:
            assert found[rate] is None
    run.close()


# ------------------------------------------------------------------ warm-up and spread


@pytest.mark.parametrize(
    "seconds, warm_up, is_steady",
    [
        ([0.262, 0.135, 0.128], 1, False),
        ([0.262, 0.135, 0.134, 0.136], 1, True),
        ([1.0, 1.0, 1.0], 0, True),
        # Two steps that compile are as long as each other, and no warm step is as long.
        ([5.0, 5.0, 1.0, 1.01, 1.02, 1.0], 2, True),
        ([3.0, 2.0, 1.0, 0.5], 2, False),
        ([2.0], 0, False),
    ],
)
def test_the_warm_up_ends_when_two_steps_agree(seconds, warm_up, is_steady):
    found = steady(seconds)
    assert (found.warm_up, found.is_steady) == (warm_up, is_steady)
    own = seconds[warm_up:]
    reported = found.to_dict()
    assert reported["seconds"] == pytest.approx(statistics.fmean(own)) and reported["steps"] == len(
        own
    )
    assert (reported["least_seconds"], reported["most_seconds"]) == (min(own), max(own))
    spread = statistics.stdev(own) if len(own) > 1 else None
    assert reported["seconds_deviation"] == spread


# ------------------------------------------------------------------ what cannot be


def test_a_share_above_the_whole_is_refused_and_so_is_its_rate():
    figures = {"rate": 29.29e9, "share": share_of(29.29e9, 5e9), "other": share_of(0.9, 1.0)}
    found = without_doubtful(figures, {"share": "rate", "other": ""})
    assert found["rate"] is None
    assert found["share"] is None
    assert found["other"] == 0.9
    (shown,) = found["doubtful"]
    assert "rate" in shown
    assert "5.86" in shown
    assert "cannot be" in shown
    assert share_of(1.04, 1.0) == 1.0, "what was measured before the steps may be a little low"
    assert share_of(None, 1.0) is None
    assert without_doubtful({"share": None}, {"share": ""})["doubtful"] == []


def shares_in(text: str) -> list[float]:
    """Returns the percentages of a text that are shares of something."""
    errors = re.sub(r"\([+-][\d.,]+ %\)", "", text)
    return [float(found) for found in re.findall(r"([\d.]+) %", errors)]


@pytest.mark.parametrize("settings", [[], ["model.dtype=bfloat16"]])
def test_what_is_printed_is_possible(tmp_path, capsys, monkeypatch, settings):
    monkeypatch.setattr("engine.tools.cli.bench.CEILING_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("engine.runtime.measure.machine_rates.PARAMETERS", {"cpu": 1 << 16})
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path).save(preset)
    command = ["bench", str(preset), "--seconds", "0.3", "--json"]
    for each in settings:
        command += ["--set", each]
    assert launch.main(command) == 0
    result = json.loads(capsys.readouterr().out)
    (training,) = result["trainings"]
    found = training["streamed"]
    for name in ("utilization", "exposed_share", "adamw_of_alone", "device_adamw_of_memory"):
        assert found[name] is None or 0 <= found[name] <= 1.1, name
    # Nothing ran on a device, and nothing was measured there.
    for name in (
        "device_adamw_parameters_per_second",
        "device_adamw_of_memory",
        "peak_device_bytes",
        "peak_reserved_bytes",
        "planned_device_bytes",
        "launch_seconds",
    ):
        assert found[name] is None, name
    assert result["ceilings"]["call"] is None and result["ceilings"]["link"] is None
    assert found["updated_parameters"]["device"] == 0
    assert found["updated_parameters"]["host"] == pytest.approx(
        found["trained_parameters"], rel=0.02
    )
    in_bf16 = bool(settings)
    assert (found["utilization"] is None) == in_bf16, "products are measured in float32 there"
    assert (found["predicted_seconds"] is None) == in_bf16
    counted = found["seconds_by_step"][:-1][found["warm_up_steps"] :]
    assert found["seconds"] == pytest.approx(statistics.fmean(counted))
    assert len(counted) == found["steps"]
    assert found["least_seconds"] == min(counted) <= max(counted) == found["most_seconds"]
    assert max(found["busy"].values()) <= 1.1 * max(found["seconds_by_step"])
    text = as_text(result)
    assert all(share <= 100 for share in shares_in(text)), text
    for absent in ("to the device", "launches a step's work", "memory of the device"):
        assert absent not in text
    if not found["is_steady"]:
        assert "no two steps in a row agreed" in text
    assert f"in {found['steps']} steps)" in text and "warm-up" in text
    doubted = without_doubtful(
        found | {"adamw_of_alone": 5.85}, {"adamw_of_alone": "adamw_parameters_per_second"}
    )
    text = streamed_as_text(doubted)
    assert "585 %" not in text
    assert "not shown" in text
