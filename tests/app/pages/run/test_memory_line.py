"""Memory over time says that it is flat where it was measured to be, and what was predicted."""

from app.pages.run.memory_line import (
    flat_text,
    memory_line_figure,
    memory_text,
    predicted_text,
)
from app.pages.run.run_figures import summaries
from engine.runs.record.events import (
    ForecastChecked,
    MemorySampled,
    PlanBuilt,
    RunStarted,
    StateChanged,
)
from engine.runs.record.snapshot import RunSnapshot
from tests.support.folded import fold
from tests.support.synthetic_run import GIB, records


def sampled(count=40, grows=0, predicted=None, **values) -> RunSnapshot:
    events = [RunStarted(total_steps=100), StateChanged("running")]
    for step in range(1, count + 1):
        events.append(MemorySampled(step=step, host_rss=10 * GIB + step * grows, **values))
    if predicted is not None:
        quantity = {"host_bytes": {"predicted": predicted, "measured": 10 * GIB}}
        events.append(ForecastChecked(1, "dry_run", quantity))
    return fold(records(events))


def test_memory_that_stays_is_flat_beside_its_prediction():
    found = sampled(predicted=9.5 * GIB, host_total=32 * GIB)
    assert memory_text(found) == "peak 10.0 GiB (predicted 9.50 GiB) · flat · 22.0 GiB free"
    assert flat_text(found) == "memory 10.0 GiB, flat"
    used, predicted = memory_line_figure(found, "step")["data"]
    assert used["y"] == [10.0] * 40
    assert predicted["y"] == [9.5, 9.5] and predicted["x"] == [1, 40]


def test_memory_that_grows_or_is_not_known_yet_is_not_flat():
    growing = sampled(grows=GIB // 8, host_total=32 * GIB)
    assert "grew by" in memory_text(growing) and "flat" not in memory_text(growing)
    few = sampled(count=3, host_total=32 * GIB)
    assert memory_text(few) == "peak 10.0 GiB · 22.0 GiB free" and "flat" not in flat_text(few)
    assert memory_text(RunSnapshot()) == flat_text(RunSnapshot()) == ""


def test_before_the_first_step_there_is_what_was_predicted():
    assert predicted_text(RunSnapshot()) == "" and summaries(RunSnapshot()) == {}
    quantities = {"host_bytes": {"predicted": 9 * GIB}, "gpu_peak_bytes": {"predicted": 4 * GIB}}
    planned = PlanBuilt({"predicted_seconds": 0.5})
    begin = [planned, RunStarted(total_steps=100), ForecastChecked(0, "dry_run", quantities)]
    assert summaries(fold(records(begin))) == {
        "memory_line": "predicted: RAM 9.00 GiB, GPU 4.00 GiB",
        "tflops": "predicted: 0.50 s a step, 50 s in all",
    }


def test_host_and_gpu_have_a_line_each():
    found = sampled(gpu_allocated=4 * GIB, gpu_total=8 * GIB, host_total=32 * GIB)
    assert memory_text(found) == (
        "RAM: peak 10.0 GiB · flat · 22.0 GiB free; GPU: peak 4.00 GiB · flat · 4.00 GiB free"
    )
    assert flat_text(found) == "memory 4.00 GiB, flat"
    assert [line["name"] for line in memory_line_figure(found, "step")["data"]] == ["RAM", "GPU"]
