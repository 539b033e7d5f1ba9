"""A table is about one optimizer, or about the first that fits in each cell."""

from __future__ import annotations

import pytest

from engine.config.settings import TrainConfig
from engine.fit.model_table import (
    OPTIMIZERS,
    Cell,
    as_csv,
    as_dicts,
    cell,
    cell_in_words,
    columns,
    largest_model,
    machines_for,
    table,
)
from engine.fit.needs import Verdict
from engine.machine.known_machines import named_machine
from engine.model.catalog import entry_of

LLAMA = entry_of("meta-llama/Llama-3.1-8B")
CONFIG = TrainConfig.from_dict(
    {
        "name": "t",
        "model": {"source": "m"},
        "data": {"source": "d"},
        "engine": {"gradients": "host"},
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
    alone = [cell_with(ram_gib, name) for name in OPTIMIZERS]
    fitting = [each for each in alone if each.verdict != Verdict.DOES_NOT_FIT]
    assert [each.optimizer for each in fitting[:1]] == ([optimizer] if optimizer else [])
    expected = fitting[0] if fitting else alone[-1]
    assert (found.optimizer, found.verdict, found.host_bytes, found.missing) == (
        expected.optimizer,
        expected.verdict,
        expected.host_bytes,
        expected.missing,
    )
    assert found.any_optimizer and not expected.any_optimizer


def test_a_cell_says_which_optimizer_it_is_about_where_any_is_wanted():
    assert cell_in_words(cell_with(96)).endswith(", bf16")
    assert cell_in_words(cell_with(160)).endswith(", fp32")
    assert cell_in_words(cell_with(32)).endswith(" of RAM more, 8 bits")
    assert "8 bits" not in cell_in_words(cell_with(160, "adamw_8bit"))


def test_files_of_a_table_name_the_optimizer_of_each_cell():
    shown = columns(["RTX 4090"], named_machine("H200", 2048))
    rows = table(CONFIG, shown, [LLAMA, entry_of("Qwen/Qwen2.5-0.5B")], False, any_optimizer=True)
    said = [
        [found["optimizer"] for found in row["cells"].values()] for row in as_dicts(rows, shown)
    ]
    assert said == [["adamw", "adamw_8bit"], ["adamw", "adamw"]]
    lines = as_csv(rows, shown).splitlines()
    assert [line.rpartition(",")[2] for line in lines] == ["optimizer", *said[0], *said[1]]


def test_smaller_moments_make_larger_models_and_smaller_machines_fit():
    machine = named_machine("H200", 96)
    _, plain = largest_model(CONFIG, machine)
    entry, found = largest_model(CONFIG, machine, any_optimizer=True)
    assert found.optimizer != "adamw" and plain.optimizer == "adamw"
    assert cell(CONFIG, entry.shape("bfloat16"), machine).verdict == Verdict.DOES_NOT_FIT
    shape = LLAMA.shape("bfloat16")
    plain_ram = {
        offer.known.name: offer.ram_gib for offer in machines_for(CONFIG, shape, timed=False)
    }
    offers = machines_for(CONFIG, shape, timed=False, any_optimizer=True)
    smaller = [o for o in offers if o.ram_gib < plain_ram.get(o.known.name, 1e9)]
    assert smaller and all(offer.cell.optimizer != "adamw" for offer in smaller)
    assert len(offers) >= len(plain_ram)
