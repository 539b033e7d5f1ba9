"""`launch.py bench` end to end on the CPU: what it prints is what it measured, and the training
that streaming is compared with is that of plain transformers.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import launch
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import FitError
from engine.machine.rates import (
    CPU,
    ONE_THREAD,
    rates_file,
    store_rates,
    stored_cpu_rates,
    stored_rates,
)
from engine.machine.read_machine import read_machine
from engine.model.build.find_shape import shape_from_source
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.choose import choose
from engine.planning.fit.cost_model import MicroBatch, largest_product
from engine.planning.fit.job import Job, Target
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import requirements_of
from engine.planning.fit.simulate_step import predicted_seconds
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.step.cross_entropy import LossChunks
from engine.tools.bench.resident import ResidentSettings, _accumulate, _split, train_resident
from engine.tools.bench.steady import steady
from engine.tools.bench.steps import random_rows
from tests.support.folders import make_config
from tests.support.tiny import FAMILIES, VOCAB, plain_loss, plain_model, tiny_config

pytestmark = pytest.mark.computing


@pytest.fixture
def preset(tmp_path):
    path = tmp_path / "preset.yaml"
    make_config(tmp_path).save(path)
    return path


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr("engine.tools.cli.bench.CEILING_SECONDS", {"cpu": 0.01})
    monkeypatch.setattr("engine.runtime.measure.machine_rates.PARAMETERS", {"cpu": 1 << 16})


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
def test_an_evaluation_is_timed_beside_its_kernels(preset, capsys):
    command = ["bench", str(preset), "--seconds", "0.1", "--streamed-only", "--evaluation", "9"]
    settings = ["--set", "train.micro_batch_size=1", "--set", "train.batch_size=4"]
    assert launch.main([*command, *settings, "--json"]) == 0
    (training,) = json.loads(capsys.readouterr().out)["trainings"]
    found = training["streamed"]["evaluation"]
    assert found["rows"] == found["micro_batches"] == 9
    assert found["fetches"] == found["units"]
    assert found["apart_fetches"] == 9 * found["units"]
    assert found["of_floor"] == pytest.approx(found["seconds"] / found["floor_seconds"])
    assert 0 < found["loss"] < 20
    with pytest.raises(SystemExit):
        launch.main([*command[:-1], "0"])
    assert "give 1 or more" in capsys.readouterr().err


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_a_training_has_as_many_steps_as_are_asked_for(preset, capsys):
    command = ["bench", str(preset), "--seconds", "0.0001", "--streamed-only", "--json"]
    for asked in (1, 6):
        assert launch.main([*command, "--steps", str(asked)]) == 0
        (training,) = json.loads(capsys.readouterr().out)["trainings"]
        streamed = training["streamed"]
        seconds = streamed["seconds_by_step"]
        assert len(seconds) == asked
        # No forward follows the last step, so it counts only where it is alone.
        assert streamed["steps"] == len(steady(seconds[:-1] or seconds).seconds)
    with pytest.raises(SystemExit):
        launch.main([*command, "--steps", "0"])
    assert "'0' is no number of steps; give 1 or more" in capsys.readouterr().err


def test_a_preset_is_measured_streamed_and_resident(preset, capsys):
    assert launch.main(["bench", str(preset), "--seconds", "0.2", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert "Measuring the bus" in err and "Traceback" not in err
    for name, value in found["ceilings"].items():
        only_gpus = name in ("call", "link")  # a launch, and the link between two of them
        assert only_gpus or all(
            rate > 0 for rate in (value.values() if isinstance(value, dict) else [value])
        ), name
    (training,) = found["trainings"]
    streamed, resident = training["streamed"], training["resident"]
    assert len(streamed["losses"]) == len(streamed["seconds_by_step"]) >= 4
    assert streamed["seconds"] == pytest.approx(
        np.mean(streamed["seconds_by_step"][-1 - streamed["steps"] : -1])
    )
    assert streamed["tflops"]["parameters"] == pytest.approx(
        6 * streamed["parameters"] * streamed["tokens_per_step"] / streamed["seconds"] / 1e12
    )
    assert streamed["tflops"]["hardware"] >= streamed["tflops"]["model"]
    assert sum(streamed["exposed"].values()) == pytest.approx(
        streamed["exposed_share"] * streamed["seconds"]
    )
    assert streamed["predicted_seconds"] > 0
    assert {way["recompute"] for way in resident["ways"]} == {True, False}
    assert resident["ratio"] == pytest.approx(
        min(way["seconds"] for way in resident["ways"]) / streamed["seconds"]
    )


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_the_table_says_what_was_measured(preset, capsys):
    assert (
        launch.main(["bench", str(preset), "--seconds", "0.1", "--set", "train.batch_size=4"]) == 0
    )
    out = capsys.readouterr().out
    for line in (
        "memory of the host",
        "AdamW on the host",
        "step, update to update",
        "warm-up",
        "predicted",
        "bound by",
        "without recompute",
        "streamed against the better",
    ):
        assert line in out
    assert all(len(line) < 200 for line in out.splitlines())


def test_without_a_preset_only_the_machine_is_measured(capsys):
    assert launch.main(["bench", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) == {"machine", "ceilings", "trainings", "samplings"}
    assert found["trainings"] == found["samplings"] == []


def test_the_rates_are_kept_for_plans(capsys):
    assert launch.main(["bench", "--json"]) == 0
    peak_rates, rates = json.loads(capsys.readouterr().out)["ceilings"], stored_rates("CPU")
    assert rates.h2d == peak_rates["h2d_with_d2h"] and rates.matmul == peak_rates["matmul"]
    assert rates.adamw == max(peak_rates["adamw"].values()) and stored_rates("another card") is None
    rates_file().write_text("{}{", encoding="utf-8")
    assert stored_rates("CPU") is None
    store_rates("CPU", rates)
    assert stored_rates("CPU") == rates
    rates_file().write_text(
        json.dumps(
            {
                key: values | {"h2d": "nan"}
                for key, values in json.loads(rates_file().read_text(encoding="utf-8")).items()
            }
        ),
        encoding="utf-8",
    )
    assert stored_rates("CPU") is None


def test_the_cpu_is_measured_with_one_thread_too(capsys):
    """Small blocks are computed so, and a step is predicted with the rates that its blocks have."""
    config = TrainConfig.load("presets/starter.yaml")
    shape, machine = shape_from_source(config.model), read_machine()
    assert requirements_of(config, machine, shape).step_seconds is None
    assert launch.main(["bench", "--json"]) == 0
    alone, together = stored_rates(ONE_THREAD), stored_rates(CPU)
    assert 0 < alone.overhead < 0.1
    assert alone.device_memory > 0
    assert together.overhead > 0
    small, large = 8 * 128, 1 << 20
    assert largest_product(shape, small) == 2 * small * 96 * 256
    assert stored_cpu_rates(largest_product(shape, small)) == alone
    assert stored_cpu_rates(largest_product(shape, large)) == together
    report = estimate(config, replace(machine, gpus=()), shape_of_run(config))
    target = Target("cpu", None, machine.ram_available)
    choices = choose(Job(shape, config, 128), target).choices
    assert report.time["step_seconds"] == pytest.approx(
        predicted_seconds(shape, choices, alone, MicroBatch(8, 128), "cpu")
    )
    assert report.time["estimated"] is False
    elsewhere = replace(machine, gpus=(), here=False)
    assert estimate(config, elsewhere, shape_of_run(config)).time["step_seconds"] is None
    half = config.with_values({"model.dtype": "bfloat16"})
    assert (
        estimate(half, replace(machine, gpus=()), shape_of_run(half)).time["step_seconds"] is None
    ), "products are measured in float32"


@pytest.mark.slow("torch compiles several blocks, for five seconds or more")
def test_several_trainings_on_the_same_weights(preset, capsys):
    assert (
        launch.main(
            [
                "bench",
                str(preset),
                "--seconds",
                "0.1",
                "--streamed-only",
                "--json",
                "--then",
                "train.batch_size=2 train.micro_batch_size=1",
                "--then",
                "data.max_seq_len=32",
            ]
        )
        == 0
    )
    first, second, third = (
        training["streamed"] for training in json.loads(capsys.readouterr().out)["trainings"]
    )
    assert first["tokens_per_step"] == 2 * second["tokens_per_step"]
    assert second["choices"]["micro_batch_size"] == 1
    assert third["tokens_per_step"] == first["tokens_per_step"] * 32 // make_length(preset)


def make_length(preset) -> int:
    return TrainConfig.load(preset).data.max_seq_len


def test_bad_input_ends_in_a_sentence(preset, tmp_path, capsys):
    for arguments, says in (
        (["bench", str(tmp_path / "none.yaml")], "there is no such preset"),
        (["bench", str(preset), "--set", "train.batch=3"], "there is no such setting"),
        (["bench", str(preset), "--set", "engine.device=cuda"], "no CUDA GPU"),
        (["bench", str(preset), "--then", "model.dtype=bfloat16"], "changes the model"),
        (["bench", "--then", "train.steps=3"], "no first training"),
        (["bench", str(preset), "--set", "model.source=nothing/here"], "nothing/here"),
    ):
        if says.startswith("no CUDA") and torch.cuda.is_available():
            continue
        assert launch.main(arguments) == 2
        err = capsys.readouterr().err.splitlines()
        assert err[-1].startswith("ramstream: ") and says in err[-1]


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gemma2"])
def test_the_resident_step_has_the_gradients_of_plain_training(family):
    plain = plain_model(tiny_config(family))
    (batch,) = random_rows([4], 12, VOCAB)
    plain_loss(plain, [batch]).backward()
    expected = {name: p.grad.clone() for name, p in plain.named_parameters()}
    plain.zero_grad()
    for part in _split([batch], 2):
        _accumulate(
            plain,
            torch.from_numpy(part.input_ids),
            torch.from_numpy(part.labels),
            1 / batch.loss_tokens,
            LossChunks(7),
        )
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m: f"{name}: {m}"
        )


def test_micro_batches_too_large_for_the_device_are_passed_over(monkeypatch):
    config, batches, tried = tiny_config("qwen2"), random_rows([4], 8, VOCAB), []

    def full(model, ids, *rest):
        tried.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("no memory")
        return _accumulate(model, ids, *rest)

    monkeypatch.setattr("engine.tools.bench.resident._accumulate", full)
    model = ModelConfig(source="tiny", dtype="bfloat16")
    settings = ResidentSettings(True, [4, 2, 1], 16, 0.0)
    found = train_resident(config, model, CpuBackend(), batches, settings)
    assert found.micro_batch_size == 1
    assert tried[:3] == [4, 2, 1]
    assert found.counted.seconds
    with pytest.raises(FitError, match="even with 2 rows"):
        settings = ResidentSettings(False, [4, 2], 16, 0.0)
        train_resident(config, model, CpuBackend(), batches, settings)


def test_random_rows_are_full_and_carry_loss():
    first, second = random_rows([3, 3], 10, VOCAB, seed=1)
    assert first.input_ids.shape == (3, 10)
    assert first.loss_tokens == 27
    assert first.tokens == 30
    assert (first.labels[:, :-1] == first.input_ids[:, 1:]).all()
    assert (first.input_ids != second.input_ids).any()
    assert first.input_ids.min() >= 0 and first.input_ids.max() < VOCAB
    logits = torch.zeros(3, 10, VOCAB)
    loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(first.labels).flatten())
    assert loss.item() == pytest.approx(np.log(VOCAB), rel=1e-6)


def test_a_model_that_cannot_be_read_is_told_before_anything_is_measured(capsys, tmp_path):
    preset = tmp_path / "preset.yaml"
    # The hub's own name has a shape in the catalog, so that its needs are known without the hub.
    preset.write_text(
        "model: {source: Qwen/Qwen2.5-0.5B, init: random}\ndata: {source: x, max_seq_len: 16}\n"
    )
    assert launch.main(["bench", str(preset), "--streamed-only"]) == 2
    shown = capsys.readouterr().err
    assert "Qwen/Qwen2.5-0.5B" in shown and "Measuring" not in shown
