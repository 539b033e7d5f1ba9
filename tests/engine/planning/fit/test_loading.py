"""While weights are read, the report counts the weight planes and what is read ahead of them."""

from __future__ import annotations

import pytest

from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine
from engine.planning.fit.memory_items import MemoryItem, PartName
from engine.planning.fit.model_table import cell
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus, SessionFacts, requirements_of
from engine.planning.shape.catalog import catalog, entry_of
from engine.planning.shape.read_ahead import most_read_ahead_bytes, read_ahead_numel
from engine.text import GIB, in_gib

CONFIG = TrainConfig.from_dict({"name": "t", "model": {"source": "m"}, "data": {"source": "d"}})
LARGEST_AT_64_GB = (
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-8B",
    "ibm-granite/granite-3.1-8b-base",
)


def test_of_a_dense_model_one_unit_is_read_ahead_and_of_experts_three_times_one():
    assert read_ahead_numel([10, 4, 4, 7], has_experts=False) == 10
    assert read_ahead_numel([10, 4, 4, 7], has_experts=True) == 30
    llama = entry_of("meta-llama/Llama-3.1-8B").shape()
    assert llama.read_ahead_numel == llama.head.parameter_count == (128_256 + 1) * 4096
    mixtral = entry_of("mistralai/Mixtral-8x7B-v0.1").shape()
    assert mixtral.read_ahead_numel == 3 * max(unit.parameter_count for unit in mixtral.units)


def test_what_is_read_ahead_is_small_beside_any_large_model():
    for entry in catalog():
        shape, text = entry.shape(), entry.config.get("text_config", {})
        if text.get("hidden_size_per_layer_input"):
            continue  # a table of inputs for each layer, which is one unit, is a third of it
        if shape is not None and shape.parameter_count > 6e9:
            share = most_read_ahead_bytes(shape.read_ahead_numel) / (4 * shape.parameter_count)
            assert share < 0.2, f"{entry.id}: {share:.2f}"


def test_the_item_is_what_loading_takes_beyond_training():
    """Planes of a model in bf16 take 14 bytes a parameter, those of its weights 4."""
    shape = entry_of("meta-llama/Llama-3.1-8B").shape()
    config = CONFIG.with_values({"engine.states": "host"})
    requirements = requirements_of(config, named_machine("H200", 256), shape)
    items = {item.kind: item for item in requirements.parts[PartName.HOST].items}
    planes = shape.states.plane_bytes()
    ahead = most_read_ahead_bytes(shape.read_ahead_numel)
    item = items[MemoryItem.LOADING_PEAK]
    assert item.bytes == 0
    assert in_gib(planes["weight_high"] + planes["weight_low"] + ahead) in item.note
    assert f"at most {in_gib(ahead)} read ahead" in item.note and ahead < 2 * GIB
    report = estimate(CONFIG, named_machine("H200", 256), shape, SessionFacts())
    assert report.model["read_ahead"] == shape.read_ahead_numel


@pytest.mark.parametrize("model", LARGEST_AT_64_GB)
def test_models_of_8b_train_on_a_desktop_with_64_gb(model):
    shape = entry_of(model).shape()
    found = cell(CONFIG, shape, named_machine("RTX 4090"), timed=False, any_optimizer=True)
    assert found.status != FitStatus.DOES_NOT_FIT and found.optimizer == "adamw_8bit"
