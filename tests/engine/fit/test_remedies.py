"""What is offered where a job lacks RAM, and what the report says of moments."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.fit.memory_items import MemoryItem
from engine.fit.needs import Verdict
from engine.fit.remedies import Remedy
from engine.fit.report import FitReport, estimate
from engine.machine.known_machines import named_machine, with_figures
from engine.model.catalog import entry_of
from engine.words import GIB

MACHINE = with_figures(named_machine("H200", 512), disk_gib=4096)
MODEL = "Qwen/Qwen2.5-7B"


def job(optimizer: str = "adamw", dtype: str = "bfloat16") -> TrainConfig:
    """Returns a job whose leanest plan takes the same RAM wherever boundaries and gradients would
    be.
    """
    return TrainConfig.from_dict(
        {
            "name": "job",
            "model": {"source": MODEL, "dtype": dtype},
            "data": {"source": "d"},
            "train": {"optimizer": optimizer},
            "engine": {"save_level": "boundary", "gradients": "host"},
        }
    )


def with_ram(config: TrainConfig, ram: int) -> FitReport:
    """Returns the report of a job on a machine with so many bytes of RAM."""
    shape = entry_of(MODEL).shape(config.model.dtype)
    return estimate(config, replace(MACHINE, ram_available=ram), shape)


def short_of(config: TrainConfig, gib: float) -> FitReport:
    """Returns the report of a job on a machine whose RAM lacks so many GiB."""
    return with_ram(config, with_ram(config, GIB).host.total - round(gib * GIB))


def of_moments(report: FitReport) -> list[Remedy]:
    return [remedy for remedy in report.remedies if "train.optimizer" in remedy.changes]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("lacking", "optimizer", "words"), [(10, "adamw_bf16", "bf16"), (35, "adamw_8bit", "8 bits")]
)
def test_a_job_that_lacks_ram_is_offered_the_most_exact_moments_that_fit(
    dtype, lacking, optimizer, words
):
    config = job(dtype=dtype)
    report = short_of(config, lacking)
    assert report.verdict == Verdict.DOES_NOT_FIT
    (remedy,) = of_moments(report)
    assert remedy.changes == {"train.optimizer": optimizer}
    said, outcome = remedy.text.split(": ")
    assert said == (
        f"Keep AdamW's moments in {words}; results change slightly, and fp32 masters stay"
    )
    assert outcome.endswith((" RAM", "(gradients are rounded to bf16 once a round)"))
    after = with_ram(config.with_values(remedy.changes), report.host.limit)
    assert after.verdict != Verdict.DOES_NOT_FIT


def test_nothing_larger_than_the_job_s_own_moments_is_offered():
    (remedy,) = of_moments(short_of(job("adamw_bf16"), 10))
    assert remedy.changes == {"train.optimizer": "adamw_8bit"}
    assert not of_moments(short_of(job("adamw_8bit"), 1))
    assert not of_moments(short_of(job(), 60)), "no moments are small enough"


def test_smaller_moments_come_after_what_keeps_results_and_before_fewer_and_shorter_rows():
    changes = {"engine.save_level": "boundary_host", "data.max_seq_len": 16384}
    report = short_of(job().with_values(changes), 1)
    assert [next(iter(remedy.changes)) for remedy in report.remedies] == [
        "engine.save_level",
        "engine.gradients",
        "train.optimizer",
        "train.batch_size",
        "data.max_seq_len",
    ]


def test_where_disk_and_ram_are_short_smaller_moments_are_combined_with_what_helps_the_disk():
    config = job().with_values({"output.export": False})
    limit = with_ram(config, GIB).host.total - 25 * GIB
    shape = entry_of(MODEL).shape("bfloat16")
    machine = replace(MACHINE, ram_available=limit, disk_free=shape.checkpoint_bytes("weights"))
    report = estimate(config, machine, shape)
    (remedy,) = report.remedies
    assert remedy.changes["train.optimizer"] == "adamw_bf16"
    assert remedy.changes["output.checkpoint"] == "none"
    assert (
        estimate(config.with_values(remedy.changes), machine, shape).verdict != Verdict.DOES_NOT_FIT
    )


@pytest.mark.parametrize(
    ("optimizer", "kind", "size"),
    [("adamw", "fp32", 4), ("adamw_bf16", "bf16", 2), ("adamw_8bit", "8 bits", 1.09)],
)
def test_the_report_says_how_moments_are_kept_and_their_real_bytes(optimizer, kind, size):
    shape = entry_of(MODEL).shape("bfloat16")
    report = estimate(job(optimizer), MACHINE, shape)
    items = {item.kind: item for item in report.host.items}
    for moment, name in ((MemoryItem.EXP_AVG, "first"), (MemoryItem.EXP_AVG_SQ, "second")):
        assert items[moment].note == f"AdamW's {name} moment, {kind}, {size} bytes a parameter"
        assert items[moment].bytes == pytest.approx(size * shape.plane_numel, rel=0.005)
    assert items[MemoryItem.GRAD].note == "gradients, 2 bytes a parameter"


def test_gradients_are_parked_where_ram_is_short_and_only_there():
    asked = job().with_values({"engine.gradients": "auto"})
    enough = with_ram(asked, 400 * GIB)
    assert not enough.choices["parked_gradients"]
    planes = {item.kind.value: item.bytes for item in enough.host.items}
    short = with_ram(asked, enough.host.total - 5 * GIB)
    assert short.choices["parked_gradients"] and short.verdict != Verdict.DOES_NOT_FIT
    assert "grad" not in {item.kind.value for item in short.host.items}
    parked = {item.kind.value: item.bytes for item in short.gpu.items}["Parked gradients"]
    assert parked == planes["grad"]
    on_host = with_ram(job(), enough.host.total - 5 * GIB)
    assert on_host.verdict == Verdict.DOES_NOT_FIT
    assert {"engine.gradients": "auto"} in [remedy.changes for remedy in on_host.remedies]
