"""Predictions are compared with measurements: the sums over a report, the comparison itself, the
record, `runs --json` and the screen.
"""

from __future__ import annotations

import json

import pytest

import launch
from app.pages.run.run_overview import details
from engine.config.settings import TrainConfig
from engine.machine.gpus import GpuInfo
from engine.machine.read_machine import Machine
from engine.planning.fit.predictions import compared, predictions
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import SessionFacts
from engine.runs.record.events import FitReported, ForecastChecked, LogLine, PlanBuilt, StepFinished
from engine.runs.record.following import last_of_kind
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from engine.text import GIB
from engine.tools.cli.runs import prediction_check_of
from engine.tools.cli.train import prediction_check_text
from engine.training.loop import planning
from engine.training.loop.prediction_check import PredictionCheck
from engine.training.loop.run import start_run
from tests.support.folded import fold
from tests.support.folders import make_config
from tests.support.forecasts import REPORT, item
from tests.support.synthetic_run import records, run_events
from tests.support.trained_runs import events_of, execute


def test_a_report_is_summed_by_the_names_of_its_items():
    assert {
        name: value / GIB if name.endswith("bytes") else value
        for name, value in predictions(REPORT, 12 * GIB).items()
    } == {
        "loading_peak_bytes": 1 + 0.5 + 4 + 2,
        "host_bytes": 18.5,
        "gpu_peak_bytes": pytest.approx(4.6),
        "step_seconds": 2.5,
        "checkpoint_bytes": 12,
    }
    more = [*REPORT["host"]["items"][:-1], item("Loading peak", 5)]
    found = predictions(REPORT | {"host": {"items": more}})
    assert found["loading_peak_bytes"] == 23.5 * GIB
    assert found["host_bytes"] == 18.5 * GIB
    assert "checkpoint_bytes" not in found
    drawn = predictions(REPORT | {"host": {"items": REPORT["host"]["items"][:-1]}})
    assert drawn["loading_peak_bytes"] == 5.5 * GIB, "no copy of weights that are drawn"
    assert predictions({}) == {} and "gpu_peak_bytes" not in predictions(REPORT | {"gpu": None})


def test_a_real_report_says_every_quantity_of_a_gpu(tmp_path):
    from engine.machine.rates import TYPICAL
    from engine.model.build.find_shape import shape_from_source

    # Where units live on the GPU, training may take less RAM than the weights that are read.
    config = make_config(tmp_path, **{"engine.device": "cuda", "engine.states": "host"})
    machine = Machine(
        "cpu", 8, 64 * GIB, 64 * GIB, 60 * GIB, (GpuInfo("a GPU", 24 * GIB, 23 * GIB),), "", 0
    )
    shape = shape_from_source(config.model)
    found = predictions(
        estimate(config, machine, shape, SessionFacts(rates=TYPICAL["cuda"])).to_dict(),
        shape.states.checkpoint_bytes(),
    )
    assert list(found) == [
        "loading_peak_bytes",
        "host_bytes",
        "gpu_peak_bytes",
        "step_seconds",
        "checkpoint_bytes",
    ]
    assert all(value > 0 for value in found.values())
    assert found["loading_peak_bytes"] <= found["host_bytes"]


def test_what_is_not_known_has_no_error():
    assert compared(
        {"step_seconds": 2.0, "host_bytes": 10}, {"step_seconds": 2.5, "checkpoint_bytes": 7}
    ) == {
        "host_bytes": {"predicted": 10, "measured": None, "error": None},
        "step_seconds": {"predicted": 2.0, "measured": 2.5, "error": 0.25},
        "checkpoint_bytes": {"predicted": None, "measured": 7, "error": None},
    }


def test_the_median_leaves_out_the_first_steps_and_memory_counts_the_context():
    prediction_check = PredictionCheck(
        {"loading_peak_bytes": 5, "step_seconds": 1.0}, None, lambda: {"peak_reserved": 4 * GIB}
    )
    known = [prediction_check.step(seconds) for seconds in (90.0, 30.0, 1.0, 9.0, 2.0, 2.0)]
    assert known == [False, False, False, False, True, False]
    event = prediction_check.event(6, "running")
    assert event.quantities["step_seconds"] == {"predicted": 1.0, "measured": 2.0, "error": 1.0}
    assert event.quantities["gpu_peak_bytes"]["measured"] == pytest.approx(4.6 * GIB)
    assert event.quantities["host_bytes"]["measured"] > 10 << 20
    assert "loading_peak_bytes" not in event.quantities, "a resumed run reads no weights"


def test_a_run_records_both_and_runs_as_json_has_the_errors(tmp_path, capsys):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    execute(run)
    checked = events_of(run, ForecastChecked)
    assert [(event.step, event.moment) for event in checked] == [(5, "running"), (8, "end")]
    report = events_of(run, FitReported)[0].report
    quantities = checked[-1].quantities
    # No rates are measured on the CPU, so the time of a step is not predicted there.
    assert quantities["step_seconds"]["predicted"] is None
    assert quantities["step_seconds"]["measured"] > 0
    assert "gpu_peak_bytes" not in quantities
    assert quantities["host_bytes"]["predicted"] == predictions(report)["host_bytes"]
    for name in ("loading_peak_bytes", "host_bytes"):
        assert abs(quantities[name]["error"]) < 0.1, f"{name}: {quantities[name]}"
    assert abs(quantities["checkpoint_bytes"]["error"]) < 0.2
    assert run.recorder.snapshot.prediction_check == checked[-1]
    assert launch.main(["--runs-dir", str(tmp_path / "runs"), "runs", "--json"]) == 0
    (listed,) = json.loads(capsys.readouterr().out)
    assert listed["forecast"] == quantities and listed["state"] == "finished"


def test_what_a_step_takes_for_a_moment_is_measured(tmp_path):
    """A subscriber holds memory while step 6 is recorded, after the first comparison and before the
    last one. Nothing has predicted it.
    """
    held = 192 << 20
    run = start_run(make_config(tmp_path), tmp_path / "runs")

    def hold(record):
        if isinstance(record.event, StepFinished) and record.event.step == 6:
            assert bytearray(held).count(0) == held  # each page is touched

    run.recorder.subscribe(hold)
    assert run.execute().state == "finished"
    first, last = [event.quantities["host_bytes"] for event in events_of(run, ForecastChecked)]
    assert last["predicted"] == first["predicted"]
    grown = last["measured"] - first["measured"]
    assert 0.8 * held < grown < 1.2 * held, (first, last)


def test_a_record_of_an_older_version_has_no_comparison(tmp_path):
    folder = create_run(
        tmp_path, TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})
    )
    assert prediction_check_of(folder.path) == {}
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(20):
        if not isinstance(event, ForecastChecked):
            recorder.emit(event)
    recorder.close()
    assert prediction_check_of(folder.path) == {} and details(recorder.snapshot)["forecast"] is None


def test_the_latest_whole_line_of_a_kind_is_found(tmp_path):
    recorder = RunRecorder(tmp_path, "r")
    assert last_of_kind(recorder.path, "forecast_checked") is None
    for step in (3, 7):
        recorder.emit(ForecastChecked(step))
    recorder.emit(LogLine("info", 'somebody wrote {"kind":"forecast_checked","run_id":'))
    recorder.close()
    assert last_of_kind(recorder.path, "forecast_checked").event.step == 7
    content = recorder.path.read_bytes()
    recorder.path.write_bytes(content.replace(b'"step":7', b'"step":?'))
    assert last_of_kind(recorder.path, "forecast_checked").event.step == 3, (
        "a damaged line costs what it said"
    )
    recorder.path.write_bytes(content[: content.index(b'"step":7')])
    assert last_of_kind(recorder.path, "forecast_checked").event.step == 3
    assert last_of_kind(tmp_path / "nowhere", "log_line") is None


@pytest.mark.parametrize("quantities", [{"a": 3}, {"a": {"measured": "many"}}, []])
def test_a_damaged_comparison_is_no_record(quantities):
    from engine.runs.record.events import Record

    line = {
        "kind": "forecast_checked",
        "run_id": "r",
        "seq": 1,
        "time": 2.0,
        "quantities": quantities,
    }
    with pytest.raises(TypeError):
        Record.from_json(line)


def test_both_are_said_in_words():
    snapshot = fold(records(run_events(40)))
    shown = details(snapshot)["forecast"]
    assert shown["rows"][0] == {
        "name": "RAM while loading",
        "predicted": "30.0 GiB",
        "measured": "30.5 GiB",
        "error": "+1.7 %",
        "tone": "",
    }
    assert {row["name"]: (row["error"], row["tone"]) for row in shown["rows"]} == {
        "RAM while loading": ("+1.7 %", ""),
        "RAM while training": ("−1.0 %", ""),
        "GPU memory": ("−3.1 %", ""),
        "Step": ("+13.6 %", "warn"),
        "Checkpoint": ("0.0 %", ""),
    }
    assert "whole session" in shown["caption"]
    assert (
        prediction_check_text(
            {
                "step_seconds": {"predicted": 2.0, "measured": 2.5, "error": 0.25},
                "gpu_peak_bytes": {"predicted": None, "measured": GIB, "error": None},
                "host_bytes": {"predicted": 4, "measured": None, "error": None},
            }
        )
        == "Step 2.5 s of 2 s (+25.0 %), GPU memory 1.0 GiB"
    )


CHOICES = (
    "micro_batches",
    "rounds",
    "blocks_without_recompute",
    "blocks_kept_in_slots",
    "offloaded_block_inputs",
    "slots",
)


def test_a_run_trains_with_the_plan_of_its_report(tmp_path, monkeypatch):
    sample = planning.sample_host_memory
    # What is free a moment after the report would make the minimum-memory plan.
    monkeypatch.setattr(planning, "sample_host_memory", lambda: (sample()[0], 0))
    run = start_run(make_config(tmp_path, **{"train.steps": 2}), tmp_path / "runs")
    assert run.execute().state == "finished"
    reported = events_of(run, FitReported)[0].report["choices"]
    (built,) = events_of(run, PlanBuilt)
    assert {name: built.choices[name] for name in CHOICES} == {
        name: reported[name] for name in CHOICES
    }
    assert built.choices["blocks_without_recompute"] > 0
