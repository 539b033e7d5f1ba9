"""The pages tell the ranks of a run apart, where it has several."""

from __future__ import annotations

from app.pages.run.memory_line import memory_text
from app.pages.run.ranks import MOST_DRAWN, rank_table, ranks_text
from app.pages.run.run_overview import tiles
from engine.runs.record.events import MemorySampled, PlanBuilt, RunStarted, StepFinished
from engine.runs.record.snapshot import RunSnapshot
from tests.support.synthetic_run import GIB, records

ROW = {
    "host": 3 * GIB,
    "gpu_allocated": 10 * GIB,
    "gpu_reserved": 12 * GIB,
    "gpu_driver": 13 * GIB,
    "gpu_total": 80 * GIB,
    "power": 650.0,
}


def snapshot_of(ranks, device="cuda", **plan):
    listed = [ROW | {"rank": rank, "gpu_peak": (11 + rank) * GIB} for rank in range(ranks)]
    if device == "cpu":
        nothing = {name: 0 for name in ROW if name.startswith("gpu") or name == "power"}
        listed = [row | nothing | {"gpu_peak": 0} for row in listed]
    first = listed[0]
    sample = MemorySampled(
        1,
        host_rss=50 * GIB,
        gpu_peak=first["gpu_peak"],
        gpu_total=first["gpu_total"],
        host_total=100 * GIB,
        power=650.0 * ranks if device == "cuda" else 0,
        ranks=listed if ranks > 1 else [],
    )
    snapshot = RunSnapshot()
    events = [
        PlanBuilt(choices={"ranks": ranks} | plan),
        RunStarted(device=device, total_steps=9, ceiling_tflops=800.0 * ranks),
        StepFinished(1, seconds=1.0, tokens=10, tokens_per_second=10, tflops=600.0 * ranks),
        sample,
    ]
    for record in records(events):
        snapshot.apply(record)
    return snapshot


def tile(snapshot, label):
    (found,) = [each for each in tiles(snapshot) if each["label"] == label]
    return found


def test_each_gpu_has_a_row():
    snapshot = snapshot_of(2)
    table = rank_table(snapshot)
    assert table["heads"] == [
        "Rank",
        "RAM of its own",
        "GPU memory, peak",
        "Whole card",
        "Power",
    ]
    assert [row[0] for row in table["rows"]] == ["0", "1"]
    assert table["rows"][1][2:] == ["12.0 GiB of 80.0 GiB", "13.0 GiB", "650 W"]
    assert table["caption"].startswith("2 GPUs compute each step together")


def test_tiles_and_the_line_of_memory_tell_of_all_gpus_and_of_one():
    snapshot = snapshot_of(2)
    flops = tile(snapshot, "Compute, latest steps")
    assert (
        flops["value"] == "1,200 TFLOPS"
        and flops["note"] == "600 TFLOPS a GPU, 75 % of its top speed"
    )
    memory = tile(snapshot, "GPU memory")
    assert memory["value"] == "12.0 GiB" and "rank 1, the fullest" in memory["note"]
    assert "; fullest of 2 GPUs: peak 12.0 GiB" in memory_text(snapshot)
    assert tile(snapshot, "Power")["value"] == "1,300 W"


def test_processes_on_a_cpu_have_no_gpu():
    snapshot = snapshot_of(2, "cpu")
    table = rank_table(snapshot)
    assert table["heads"] == ["Rank", "RAM of its own"]
    assert [len(row) for row in table["rows"]] == [2, 2]
    assert ranks_text(snapshot) == "2 processes"
    assert "a GPU" not in tile(snapshot, "Compute, latest steps")["note"]
    assert tile(snapshot, "RAM")["note"] == "2 processes"


def test_one_rank_is_told_as_ever():
    snapshot = snapshot_of(1)
    assert rank_table(snapshot) is None and ranks_text(snapshot) == ""
    assert tile(snapshot, "Compute, latest steps")["note"] == "75 % of this machine’s top speed"
    assert tile(snapshot, "GPU memory")["note"] == "peak, of 80.0 GiB"
    assert "fullest" not in memory_text(snapshot)


def test_a_new_plan_forgets_the_ranks_and_a_damaged_one_has_one():
    snapshot = snapshot_of(2)
    snapshot.apply(records([PlanBuilt(choices={"ranks": "many"})])[0])
    assert snapshot.rank_count == 1 and rank_table(snapshot) is None
    assert len(rank_table(snapshot_of(MOST_DRAWN + 5))["rows"]) == MOST_DRAWN
