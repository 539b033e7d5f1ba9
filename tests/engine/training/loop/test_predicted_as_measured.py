"""What a run measures of a prediction is what was predicted: the same bytes, the same time.

The end line of a run with adapters said "Checkpoint 523 MiB of 9 MiB (+5509.1 %)": the weights that
are not trained, which all checkpoints share, were measured and not predicted.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import CheckpointWritten, FitReported, ForecastChecked, StepFinished
from engine.tools.cli.train import prediction_check_text
from engine.training.checkpoints.restore import verified_manifest
from engine.training.loop.evaluation import Evaluator
from engine.training.loop.run import resume_run, start_run
from engine.training.loop.saving import Saver
from tests.support.trained_runs import events_of, execute

SETTINGS = {
    "train.steps": 8,
    "output.eval_every": 0,
    "output.exact_match_samples": 0,
    "output.sample_prompts": [],
    "output.checkpoint_every": 0,
    "output.timeline_every": 1000,
}
KINDS = {
    "full": {},
    "weights alone": {"output.checkpoint": "weights"},
    "adapters": {"train.method": "lora"},
    "adapters with norm": {"train.method": "lora", "train.lora_save_modules": ["norm"]},
    "adapters alone": {"train.method": "lora", "output.export_form": "adapter"},
    "weights of adapters": {"train.method": "lora", "output.checkpoint": "weights"},
    "parts": {"train.method": "parts", "train.last_blocks": 1},
    "moments in 8 bits": {"train.optimizer": "adamw_8bit"},
    "moments in bf16": {"train.optimizer": "adamw_bf16"},
    "bfloat16": {"model.dtype": "bfloat16"},
    "adapters with evaluations": {
        "train.method": "lora",
        "output.eval_every": 2,
        "output.checkpoint_every": 3,
    },
}


def config_of(**values) -> TrainConfig:
    preset = PROGRAM_ROOT / "presets" / "starter-preferences.yaml"
    return TrainConfig.load(preset).with_values(SETTINGS | values)


def at_the_end(run):
    (event,) = [each for each in events_of(run, ForecastChecked) if each.moment == "end"][-1:]
    return event.quantities


def disk_items(run):
    report = events_of(run, FitReported)[-1].report
    return {item["name"]: item["bytes"] for item in report["disk"]["items"]}


def size(folder: Path, pattern: str = "*") -> int:
    """Returns the bytes of files, each counted once where several names share it."""
    files = {path.stat().st_ino: path for path in folder.rglob(pattern) if path.is_file()}
    return sum(path.stat().st_size for path in files.values())


@pytest.mark.slow("eleven runs of the small model, some fifteen seconds")
@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_exports_and_ram_are_measured_as_predicted(tmp_path, kind):
    run = start_run(config_of(**KINDS[kind]), tmp_path)
    assert execute(run).state == "finished"
    quantities, items = at_the_end(run), disk_items(run)
    assert quantities["checkpoint_bytes"]["error"] == 0
    for ram in ("loading_peak_bytes", "host_bytes"):
        assert abs(quantities[ram]["error"]) < 0.1
    written = events_of(run, CheckpointWritten)
    kept = size(run.folder.checkpoints_path)
    if len(written) == 1:  # the report counts those that are there at the same time
        assert kept == pytest.approx(items["Checkpoints"], rel=0.001, abs=40_000)
    exported = size(run.folder.export_path, "*.safetensors")
    assert exported == pytest.approx(items["Export"], rel=0.001, abs=25_000)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_the_end_line_of_adapters_compares_the_same_bytes(tmp_path):
    run = start_run(config_of(**KINDS["adapters"]), tmp_path)
    execute(run)
    (written,) = events_of(run, CheckpointWritten)
    manifest = verified_manifest(run.folder.path / written.path)
    planes = sum(unit.bytes for unit in manifest.units)
    found = at_the_end(run)["checkpoint_bytes"]
    assert (found["predicted"], found["measured"], found["error"]) == (planes, planes, 0.0)
    assert written.bytes > 1.9 * planes  # the first checkpoint has the frozen weights, too
    assert "(+0.0 %)" in prediction_check_text({"checkpoint_bytes": found})


def test_a_stopped_and_a_resumed_run_compare_the_same_bytes(tmp_path):
    run = start_run(config_of(**KINDS["adapters"]), tmp_path)

    def stop(record):
        if isinstance(record.event, StepFinished) and record.event.step == 4:
            run.request("stop")

    run.recorder.subscribe(stop)
    assert execute(run).state == "stopped"
    assert at_the_end(run)["checkpoint_bytes"]["error"] == 0
    resumed = resume_run(tmp_path, run.id)
    assert execute(resumed).state == "finished"
    quantities = at_the_end(resumed)
    assert quantities["checkpoint_bytes"]["error"] == 0
    assert "loading_peak_bytes" not in quantities


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_evaluations_and_checkpoints_are_no_part_of_a_step(tmp_path, monkeypatch):
    """Each of them takes an hour, by the clock that times a step."""
    measure, save, clock = Evaluator.measure_loss, Saver.save, time.perf_counter
    waited = []
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + sum(waited))

    def slowly(work):
        def waits(*given, **named):
            waited.append(3600)
            return work(*given, **named)

        return waits

    monkeypatch.setattr(Evaluator, "measure_loss", slowly(measure))
    monkeypatch.setattr(Saver, "save", slowly(save))
    every = {"output.eval_every": 1, "output.checkpoint_every": 1}
    run = start_run(config_of(**every), tmp_path)
    execute(run)
    assert len(waited) > 8
    assert at_the_end(run)["step_seconds"]["measured"] < 60
    assert max(event.seconds for event in events_of(run, StepFinished)[1:]) < 60
