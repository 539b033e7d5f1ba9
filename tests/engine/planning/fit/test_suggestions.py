"""What is offered where a job lacks RAM, and what the report says of moments."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures
from engine.machine.read_machine import Machine
from engine.planning.fit.exactness import Exactness
from engine.planning.fit.fill_memory import MemoryFiller
from engine.planning.fit.memory_items import MemoryItem
from engine.planning.fit.report import FitReport, estimate, with_times
from engine.planning.fit.requirements import FitStatus
from engine.planning.fit.suggestions import Suggestion
from engine.planning.shape.catalog import entry_of
from engine.planning.shape.model_shape import ModelShape
from engine.text import GIB

pytestmark = pytest.mark.computing

MACHINE = with_figures(named_machine("H200", 512), disk_gib=4096)
MODEL = "Qwen/Qwen2.5-7B"


@pytest.fixture(autouse=True)
def no_unit_lives_on_the_device(monkeypatch):
    """These jobs would fit if units could live on the card."""
    monkeypatch.setattr(MemoryFiller, "_may_be_gpu_resident", lambda *_: False)


def job(optimizer: str = "adamw", dtype: str = "bfloat16") -> TrainConfig:
    """Returns a job whose minimum-memory plan takes the same RAM wherever block inputs and
    gradients would be.
    """
    return TrainConfig.from_dict(
        {
            "name": "job",
            "model": {"source": MODEL, "dtype": dtype},
            "data": {"source": "d"},
            "train": {"optimizer": optimizer},
            "engine": {"activation_checkpointing": "full", "gradients": "host"},
        }
    )


def with_ram(config: TrainConfig, ram: int) -> FitReport:
    """Returns the report of a job on a machine with so many bytes of RAM."""
    shape = entry_of(MODEL).shape(config.model.dtype)
    return estimate(config, replace(MACHINE, ram_available=ram), shape)


def short_of(config: TrainConfig, gib: float) -> FitReport:
    """Returns the report of a job on a machine whose RAM lacks so many GiB."""
    return with_ram(config, with_ram(config, GIB).host.total - round(gib * GIB))


def of_moments(report: FitReport) -> list[Suggestion]:
    return [
        suggestion for suggestion in report.suggestions if "train.optimizer" in suggestion.changes
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    ("lacking", "optimizer", "words"), [(10, "adamw_bf16", "bf16"), (35, "adamw_8bit", "8 bits")]
)
def test_a_job_that_lacks_ram_is_offered_the_most_exact_moments_that_fit(
    dtype, lacking, optimizer, words
):
    config = job(dtype=dtype)
    report = short_of(config, lacking)
    assert report.status == FitStatus.DOES_NOT_FIT
    (suggestion,) = of_moments(report)
    assert suggestion.changes == {"train.optimizer": optimizer}
    shown, outcome = suggestion.text.split(": ")
    assert shown == f"Keep AdamW's moments in {words}" and outcome.endswith(" RAM")
    assert suggestion.exactness == (Exactness.ROUNDED_MOMENTS,)
    after = with_ram(config.with_values(suggestion.changes), report.host.limit)
    assert after.status != FitStatus.DOES_NOT_FIT


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_nothing_larger_than_the_job_s_own_moments_is_offered():
    (suggestion,) = of_moments(short_of(job("adamw_bf16"), 10))
    assert suggestion.changes == {"train.optimizer": "adamw_8bit"}
    assert not of_moments(short_of(job("adamw_8bit"), 1))
    assert not of_moments(short_of(job(), 80)), "no moments are small enough"


def test_smaller_moments_come_after_what_keeps_results_and_before_fewer_and_shorter_rows():
    changes = {"engine.activation_checkpointing": "offload", "data.max_seq_len": 16384}
    report = short_of(job().with_values(changes), 1)
    assert [next(iter(suggestion.changes)) for suggestion in report.suggestions] == [
        "engine.gradients",
        "engine.activation_checkpointing",
        "train.optimizer",
        "train.batch_size",
        "data.max_seq_len",
        "train.method",
        "engine.disk",
    ]
    assert report.suggestions[1].changes == {"engine.activation_checkpointing": "offload_pairs"}
    exactness = [suggestion.exactness for suggestion in report.suggestions]
    assert exactness == [
        (Exactness.SAME_BITS,),
        (Exactness.SAME_BITS,),
        (Exactness.ROUNDED_MOMENTS,),
        (Exactness.FEWER_TOKENS,),
        (Exactness.FEWER_TOKENS,),
        (Exactness.ADAPTERS_ALONE,),
        (Exactness.SAME_BITS,),
    ]


def test_where_disk_and_ram_are_short_smaller_moments_are_combined_with_what_helps_the_disk():
    config = job().with_values({"output.export": False})
    limit = with_ram(config, GIB).host.total - 25 * GIB
    shape = entry_of(MODEL).shape("bfloat16")
    machine = replace(
        MACHINE, ram_available=limit, disk_free=shape.states.checkpoint_bytes("weights")
    )
    report = estimate(config, machine, shape)
    suggestion, adapters = report.suggestions
    assert adapters.changes == {"train.method": "lora"}
    assert suggestion.changes["train.optimizer"] == "adamw_bf16"
    assert suggestion.changes["output.checkpoint"] == "none"
    assert (
        estimate(config.with_values(suggestion.changes), machine, shape).status
        != FitStatus.DOES_NOT_FIT
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
        assert items[moment].bytes == pytest.approx(size * shape.gradient_numel, rel=0.005)
    assert items[MemoryItem.GRAD].note == "gradients, 2 bytes a parameter"
    assert items[MemoryItem.WEIGHT_HIGH].note == "weights, bf16, 2 bytes a parameter"


def test_gradients_are_kept_on_the_gpu_where_ram_is_short_and_only_there():
    asked = job().with_values({"engine.gradients": "auto"})
    enough = with_ram(asked, 400 * GIB)
    assert not enough.choices["gradients_on_gpu"]
    planes = {item.kind.value: item.bytes for item in enough.host.items}
    short = with_ram(asked, enough.host.total - 5 * GIB)
    assert short.choices["gradients_on_gpu"] and short.status != FitStatus.DOES_NOT_FIT
    assert "grad" not in {item.kind.value for item in short.host.items}
    on_gpu = {item.kind.value: item.bytes for item in short.gpu.items}["Gradients kept on the GPU"]
    assert on_gpu == planes["grad"]
    on_host = with_ram(job(), enough.host.total - 5 * GIB)
    assert on_host.status == FitStatus.DOES_NOT_FIT
    first = on_host.suggestions[0]
    assert first.changes == {"engine.gradients": "gpu"}
    assert first.exactness == (Exactness.SAME_BITS,)


SMALL_CARD = "RTX 4090"
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "8 bits": ("Qwen/Qwen2.5-7B", 64, {}),
    "bf16": ("Qwen/Qwen2.5-3B", 32, {}),
    "gradients on the GPU": ("Qwen/Qwen2.5-1.5B", 24, {"engine.gradients": "host"}),
    "pairs": (
        "Qwen/Qwen2.5-7B",
        66,
        {
            "engine.activation_checkpointing": "offload",
            "engine.gradients": "host",
            "train.optimizer": "adamw_8bit",
        },
    ),
    "no pairs": (
        "Qwen/Qwen2.5-7B",
        64,
        {
            "engine.activation_checkpointing": "offload_pairs",
            "engine.gradients": "host",
            "train.optimizer": "adamw_8bit",
        },
    ),
    "block inputs": (
        "Qwen/Qwen2.5-7B",
        512,
        {
            "engine.activation_checkpointing": "full",
            "train.micro_batch_size": 32,
            "train.batch_size": 128,
        },
    ),
    "micro-batches": (
        "Qwen/Qwen2.5-3B",
        96,
        {"train.micro_batch_size": 128, "train.batch_size": 128},
    ),
    "only just": (
        "Qwen/Qwen2.5-3B",
        48,
        {"engine.gradients": "host", "engine.activation_checkpointing": "full"},
    ),
    "places and moments": (
        "Qwen/Qwen2.5-7B",
        64,
        {"engine.activation_checkpointing": "offload", "train.batch_size": 128},
    ),
    "long rows": ("Qwen/Qwen2.5-3B", 32, {"data.max_seq_len": 8192}),
    "rounds": ("Qwen/Qwen2.5-7B", 64, {"data.max_seq_len": 8192}),
}
"""Jobs on a small card with so many GiB of RAM, which do not fit or only just."""


def report_of(name: str) -> tuple[FitReport, TrainConfig, Machine, ModelShape]:
    """Returns the report of a case, and what it is about."""
    model, ram, changes = CASES[name]
    config = TrainConfig.from_dict(
        {"name": "job", "model": {"source": model}, "data": {"source": "d"}}
    ).with_values(changes)
    machine, shape = named_machine(SMALL_CARD, ram), entry_of(model).shape("bfloat16")
    return estimate(config, machine, shape), config, machine, shape


@pytest.mark.parametrize("name", CASES)
def test_a_suggestion_fits_as_promised_and_its_seconds_are_the_report_s(name):
    report, config, machine, shape = report_of(name)
    assert report.status != FitStatus.FITS and report.suggestions
    assert all(suggestion.seconds is None for suggestion in report.suggestions)
    # What goes to the disk changes no result, but wears the drive, so it comes last.
    others = [each for each in report.suggestions if "engine.disk" not in each.changes]
    assert report.suggestions[: len(others)] == tuple(others)
    costs = [max(map(list(Exactness).index, suggestion.exactness)) for suggestion in others]
    assert costs == sorted(costs)
    timed = with_times(report, config, machine, shape)
    fits = report.status == FitStatus.TIGHT
    full = re.compile(r"RAM will be \d+ % full; (most of it|the largest part) is [^_]+ \(.+\)\.")
    assert any(full.fullmatch(reason) for reason in report.reasons) == fits
    for suggestion in timed.suggestions:
        changed = config.with_values(suggestion.changes)
        then = entry_of(config.model.source).shape(adapters=changed.train.parts)
        after = estimate(changed, machine, then)
        assert after.status == FitStatus.FITS if fits else after.status != FitStatus.DOES_NOT_FIT
        assert suggestion.seconds == after.time["step_seconds"]
        assert all(size == getattr(after, name).total for name, size in suggestion.after)
        assert suggestion.instead_of == (report.time["step_seconds"] if fits else None)
        assert ("instead of" in suggestion.time_text) <= fits
        found = suggestion.to_dict()
        assert found["exactness"] == [kind.value for kind in suggestion.exactness]
        assert all(kind.sentence in found["exactness_text"] for kind in suggestion.exactness)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_what_auto_does_by_itself_is_offered_only_where_settings_forbid_it():
    for ram in (20, 40, 60, 80, 100):
        asked = job().with_values(
            {"engine.activation_checkpointing": "auto", "engine.gradients": "auto"}
        )
        report = with_ram(asked, ram * GIB)
        names = {name for suggestion in report.suggestions for name in suggestion.changes}
        assert not names & {"engine.activation_checkpointing", "engine.gradients"}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("micro-batches", {"train.micro_batch_size": Exactness.OTHER_ORDER}),
        (
            "block inputs",
            {
                "engine.activation_checkpointing": Exactness.SAME_BITS,
                "engine.rounds": Exactness.ROUNDED_GRADIENTS,
            },
        ),
    ],
)
def test_smaller_micro_batches_and_rounds_change_the_order_of_sums(name, kinds):
    report = report_of(name)[0]
    found = {
        next(iter(suggestion.changes)): suggestion.exactness for suggestion in report.suggestions
    }
    assert {changed: (kind,) for changed, kind in kinds.items()}.items() <= found.items()


def test_what_is_only_written_takes_no_time():
    config = job().with_values({"engine.activation_checkpointing": "auto"})
    machine = replace(MACHINE, disk_free=100 * GIB)
    shape = entry_of(MODEL).shape("bfloat16")
    report = with_times(estimate(config, machine, shape), config, machine, shape)
    assert report.suggestions
    for suggestion in report.suggestions:
        assert suggestion.exactness == (Exactness.SAME_BITS,)
        assert suggestion.seconds == suggestion.instead_of == report.time["step_seconds"]
        assert suggestion.time_text.endswith(" a step, as now")


def test_half_the_precision_of_the_blocks_is_said():
    config = job(dtype="float32").with_values({"train.optimizer": "adamw_8bit"})
    report = with_ram(config, with_ram(config, GIB).host.total - 5 * GIB)
    (suggestion,) = [each for each in report.suggestions if "model.dtype" in each.changes]
    assert suggestion.exactness == (Exactness.LOWER_PRECISION,)


def test_every_kind_of_exactness_is_one_sentence():
    for kind in Exactness:
        assert kind.sentence[0].isupper() and kind.sentence.endswith(".")
        assert kind.sentence.count(". ") == 0


# ---------------------------------------------------------------------- adapters


def of_adapters(report: FitReport) -> list[Suggestion]:
    return [suggestion for suggestion in report.suggestions if "train.method" in suggestion.changes]


def test_where_all_weights_cannot_be_trained_adapters_are_offered_with_their_figures():
    config = job().with_values(
        {"train.lora_rank": 8, "engine.activation_checkpointing": "offload_pairs"}
    )
    report = with_ram(config, 32 * GIB)
    assert report.status == FitStatus.DOES_NOT_FIT
    (suggestion,) = of_adapters(report)
    assert suggestion.changes == {"train.method": "lora", "engine.activation_checkpointing": "auto"}
    assert suggestion.exactness == (Exactness.ADAPTERS_ALONE,)
    changed = config.with_values(suggestion.changes)
    shape = entry_of(MODEL).shape(adapters=changed.train.parts)
    after = estimate(changed, replace(MACHINE, ram_available=32 * GIB), shape)
    assert after.status != FitStatus.DOES_NOT_FIT
    assert suggestion.text.startswith("Train adapters (LoRA) of rank 8 instead of all weights: ")
    assert suggestion.text.endswith(" of 32.0 GiB RAM")
    # What it takes at most is the weights and little more.
    taken = float(suggestion.text.split(": ")[1].split()[0]) * GIB
    assert 0 < taken - 2 * entry_of(MODEL).shape().parameter_count < 12 * GIB


def test_adapters_are_offered_on_any_gpus_and_only_where_they_fit_and_help():
    assert not of_adapters(with_ram(job(), 8 * GIB)), "the weights alone take more"
    assert not of_adapters(with_ram(job(), 500 * GIB)), "all weights can be trained"
    both = replace(MACHINE, gpus=MACHINE.gpus * 2, ram_available=32 * GIB)
    report = estimate(job().with_values({"engine.gpus": 2}), both, entry_of(MODEL).shape())
    (suggestion,) = of_adapters(report)
    assert suggestion.changes == {"train.method": "lora"}
    trained = job().with_values({"train.method": "lora"})
    shape = entry_of(MODEL).shape(adapters=trained.train.parts)
    lacking = estimate(trained, replace(MACHINE, ram_available=8 * GIB), shape)
    assert lacking.status == FitStatus.DOES_NOT_FIT and not of_adapters(lacking)


def test_adapters_are_offered_with_shorter_rows_where_they_alone_would_not_do():
    config = job().with_values({"train.micro_batch_size": 32, "data.max_seq_len": 32768})
    small = named_machine("RTX 4090", 32)
    (suggestion,) = of_adapters(estimate(config, small, entry_of(MODEL).shape()))
    assert set(suggestion.changes) == {
        "train.method",
        "train.batch_size",
        "train.micro_batch_size",
    }
    assert suggestion.exactness == (Exactness.FEWER_TOKENS, Exactness.ADAPTERS_ALONE)


def test_a_model_of_which_nothing_is_known_is_offered_no_adapters():
    shape = entry_of(MODEL).shape()
    config = job().with_values({"model.source": "nobody/knows-this"})
    report = estimate(config, replace(MACHINE, ram_available=32 * GIB), shape)
    assert report.status == FitStatus.DOES_NOT_FIT and not of_adapters(report)
