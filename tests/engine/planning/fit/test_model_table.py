"""A table is about one optimizer, or about the first that fits in each cell."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine.known_machines import named_machine
from engine.planning.fit.fitting_machines import largest_model, machines_for, smaller_models
from engine.planning.fit.model_table import (
    HERE,
    KEPT_ON_GPU,
    LEGEND,
    PAIRS,
    TRIED,
    Cell,
    as_csv,
    as_details,
    as_dicts,
    cell,
    cell_text,
    columns,
    counts_text,
    rows_of,
)
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus
from engine.planning.shape.catalog import catalog, entry_of
from engine.text import GIB

LLAMA = entry_of("meta-llama/Llama-3.1-8B")
CONFIG = TrainConfig.from_dict(
    {
        "name": "t",
        "model": {"source": "m"},
        "data": {"source": "d"},
        "engine": {"gradients": "host", "states": "host"},
    }
)
FITTING = {32: None, 72: "adamw_8bit", 96: "adamw_bf16", 160: "adamw"}
"""With so many GiB of RAM, this is the first optimizer with which the model fits."""


def cell_with(ram_gib: int, optimizer: str | None = None) -> Cell:
    """Returns the cell of the model with an optimizer, by default with the first that fits."""
    config = CONFIG.with_values({"train.optimizer": optimizer or "adamw"})
    shape = LLAMA.shape("bfloat16")
    machine = named_machine("H200", ram_gib)
    return cell(config, shape, machine, timed=False, any_optimizer=optimizer is None)


@pytest.mark.parametrize(("ram_gib", "optimizer"), FITTING.items())
def test_any_optimizer_is_the_first_that_fits(ram_gib, optimizer):
    found = cell_with(ram_gib)
    alone = [cell_with(ram_gib, name) for name in TRIED]
    fitting = [each for each in alone if each.status != FitStatus.DOES_NOT_FIT]
    assert [each.optimizer for each in fitting[:1]] == ([optimizer] if optimizer else [])
    expected = fitting[0] if fitting else alone[-1]
    assert (found.optimizer, found.status, found.host_bytes, found.missing) == (
        expected.optimizer,
        expected.status,
        expected.host_bytes,
        expected.missing,
    )
    assert found.any_optimizer and not expected.any_optimizer


def test_a_cell_says_which_optimizer_it_is_about_where_any_is_wanted():
    assert cell_text(cell_with(96)).endswith(", bf16")
    assert cell_text(cell_with(160)).endswith(", fp32")
    assert cell_text(cell_with(32)).endswith(" of RAM more, 8 bits")
    assert "8 bits" not in cell_text(cell_with(160, "adamw_8bit"))


def test_files_of_a_table_name_the_optimizer_of_each_cell():
    shown = columns(["RTX 4090"], named_machine("H200", 2048))
    models = [LLAMA, entry_of("Qwen/Qwen2.5-0.5B")]
    rows = list(rows_of(CONFIG, shown, models, False, any_optimizer=True))
    answer = [
        [found["optimizer"] for found in row["cells"].values()] for row in as_dicts(rows, shown)
    ]
    assert answer == [["adamw", "adamw_8bit"], ["adamw", "adamw"]]
    lines = as_csv(rows, shown).splitlines()
    assert [line.split(",")[-3] for line in lines] == ["optimizer", *answer[0], *answer[1]]


@pytest.mark.parametrize(
    ("ram_gib", "changes", "words"),
    [
        (48, {}, "just, 8 bits, GPU gradients, pairs"),
        (64, {}, "just, bf16, pairs"),
        (64, {"engine.states": "host"}, "just, bf16, GPU gradients, pairs"),
        (64, {"engine.gradients": "host", "engine.states": "host"}, "just, 8 bits"),
        (64, {"engine.states": "host", "train.batch_size": 8}, "just, bf16, GPU gradients"),
        (256, {}, "tokens/s, fp32"),
    ],
)
def test_a_cell_of_any_optimizer_names_the_whole_way(ram_gib, changes, words):
    places = {"engine.gradients": "auto", "engine.states": "auto"}
    config = CONFIG.with_values(places | changes)
    machine = named_machine("RTX 4090", ram_gib)
    shape = entry_of("mistralai/Mistral-7B-v0.1").shape("bfloat16")
    found = cell(config, shape, machine, any_optimizer=True)
    assert cell_text(found).endswith(words)
    assert (KEPT_ON_GPU in found.savings, PAIRS in found.savings) == (
        found.gradients_on_gpu,
        found.offload_pairs,
    )
    assert all(f"{way}: " in LEGEND for way in found.savings)
    with_optimizer = config.with_values({"train.optimizer": found.optimizer})
    report = estimate(with_optimizer, machine, shape)
    assert found.gradients_on_gpu == report.choices["gradients_on_gpu"]
    plain = cell(with_optimizer, shape, machine)
    assert plain.savings == found.savings and "GPU gradients" not in cell_text(plain)
    untimed = cell(config, shape, machine, timed=False, any_optimizer=True)
    assert untimed.gradients_on_gpu is None and not untimed.savings


def test_a_table_counts_the_models_that_fit_on_each_machine():
    shown = columns(["RTX 4090", "H200"], named_machine("H200", 2048))
    models = [LLAMA, entry_of("Qwen/Qwen2.5-0.5B"), entry_of("meta-llama/Llama-3.1-405B")]
    rows = list(rows_of(CONFIG, shown, models, timed=False))
    fitting = [0, 0, 0]
    for row in rows:
        for at, found in enumerate(row.cells):
            fitting[at] += found.status != FitStatus.DOES_NOT_FIT
    here, small, large = fitting
    assert counts_text(rows, shown) == (
        f"Of 3 models, this many fit: {HERE} {here}, RTX 4090 {small}, H200 {large}."
    )
    assert small < here


def test_what_is_missing_is_never_nothing():
    places = {"engine.activation_checkpointing": "full", "engine.slots": 2}
    config = CONFIG.with_values({"train.optimizer": "adamw_8bit"} | places)
    shape = LLAMA.shape("bfloat16")
    machine = named_machine("RTX 4090", 64)
    needed = cell(config, shape, replace(machine, ram_available=GIB), timed=False).host_bytes
    for lacking, words in ((1000, "0.1"), (GIB // 2, "0.5"), (3 * GIB, "3")):
        short = replace(machine, ram_available=needed - lacking)
        found = cell(config, shape, short, timed=False)
        assert found.missing == f"{words} GiB of RAM"


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_smaller_moments_make_larger_models_and_smaller_machines_fit():
    machine = named_machine("H200", 96)
    _, plain = largest_model(CONFIG, machine)
    entry, found = largest_model(CONFIG, machine, any_optimizer=True)
    assert found.optimizer != "adamw" and plain.optimizer == "adamw"
    assert cell(CONFIG, entry.shape("bfloat16"), machine).status == FitStatus.DOES_NOT_FIT
    shape = LLAMA.shape("bfloat16")
    plain_ram = {
        offer.known.name: offer.ram_gib for offer in machines_for(CONFIG, shape, timed=False)
    }
    offers = machines_for(CONFIG, shape, timed=False, any_optimizer=True)
    smaller = [o for o in offers if o.ram_gib < plain_ram.get(o.known.name, 1e9)]
    assert smaller and all(offer.cell.optimizer != "adamw" for offer in smaller)
    assert len(offers) >= len(plain_ram)


def test_smaller_models_that_fit_are_of_the_same_kind_first():
    machine = named_machine("RTX 4090", 32)
    shape = entry_of("Qwen/Qwen2.5-7B").shape()
    found = smaller_models(CONFIG, shape, machine, 3, lambda entry: True)
    assert len(found) == 3 and found[0].shape().model_type == "qwen2"
    sizes = [each.shape().parameter_count for each in found]
    assert max(sizes) < shape.parameter_count
    for entry in found:
        kept = cell(CONFIG, entry.shape(), machine, timed=False)
        assert kept.status != FitStatus.DOES_NOT_FIT
    # No larger one of the same kind would fit.
    same = [each.shape() for each in catalog() if each.shape().model_type == "qwen2"]
    between = [each for each in same if sizes[0] < each.parameter_count < shape.parameter_count]
    for other in between:
        assert cell(CONFIG, other, machine, timed=False).status == FitStatus.DOES_NOT_FIT


# ---------------------------------------------------------------------- adapters

LORA = CONFIG.with_values({"train.method": "lora"})


def test_a_table_of_adapters_has_what_a_report_of_each_says():
    config = LORA.with_values({"engine.gradients": "auto", "engine.states": "auto"})
    machine = named_machine("RTX 4090", 32)
    shown = columns([], machine)
    small = entry_of("Qwen/Qwen2.5-0.5B")
    llama, other = rows_of(config, shown, [LLAMA, small])
    shape = LLAMA.shape(adapters=config.train.parts)
    report = estimate(config, machine, shape)
    (found,) = llama.cells
    assert found.status == report.status != FitStatus.DOES_NOT_FIT
    assert found.step_seconds == pytest.approx(report.time["step_seconds"], rel=0.1)
    tokens = config.train.batch_size * config.data.max_seq_len
    assert found.tokens_per_second == pytest.approx(tokens / found.step_seconds)
    # The model's own parameters are counted as ever, and the adapters beside them.
    assert llama.parameters == llama.active_parameters == LLAMA.shape().parameter_count
    assert llama.trained_parameters == report.model["trained_parameters"] == 41_943_040
    whole = next(rows_of(CONFIG, shown, [LLAMA], timed=False))
    assert whole.cells[0].status == FitStatus.DOES_NOT_FIT
    assert whole.trained_parameters == whole.parameters == llama.parameters
    answer = as_details([llama, other]).splitlines()
    assert answer[0].split("  ")[0] == "model"
    assert " GiB" in answer[1]
    assert " s " in answer[1]
    lines = [line.split(",") for line in as_csv([llama], shown).splitlines()]
    reported = dict(zip(*lines))
    assert (reported["method"], reported["trained_parameters"]) == ("lora", "41943040")
    assert float(reported["step_seconds"]) == pytest.approx(found.step_seconds, abs=0.001)


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_more_models_and_smaller_machines_do_for_adapters():
    machine = named_machine("RTX 4090", 32)
    (largest, _), (larger, found) = (largest_model(each, machine) for each in (CONFIG, LORA))
    assert found.method == "lora"
    assert larger.shape().parameter_count > 4 * largest.shape().parameter_count
    shape = LLAMA.shape(adapters=LORA.train.parts)
    offers = machines_for(LORA, shape, timed=False)
    assert offers[0].ram_gib < machines_for(CONFIG, LLAMA.shape(), timed=False)[0].ram_gib


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"train.method": "parts", "train.last_blocks": 2}, "train.method"),
        ({"train.method": "lora", "train.lora_dropout": 0.1}, "train.lora_dropout"),
        ({"train.method": "lora", "train.lora_targets": ["q_proj"]}, "train.lora_targets"),
        ({"train.method": "lora", "train.lora_save_modules": ["norm"]}, "train.lora_save_modules"),
    ],
)
def test_what_depends_on_the_names_of_layers_has_no_table(changes, field):
    shown = columns([], named_machine("H200", 64))
    with pytest.raises(ConfigError) as caught:
        list(rows_of(CONFIG.with_values(changes), shown, [LLAMA]))
    assert caught.value.field == field and "check one model" in str(caught.value)
