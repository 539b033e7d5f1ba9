"""Models of the catalog that also read images or sound: the language model is counted apart from
the whole checkpoint, and both are what is published.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config.adapters import Adapters
from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine
from engine.planning.fit.memory_items import MemoryItem, PartName, items_of
from engine.planning.fit.model_table import as_csv, as_dicts, as_text, columns, rows_of
from engine.planning.fit.report import estimate
from engine.planning.shape.catalog import catalog, catalog_shape, entry_of
from engine.planning.shape.model_shape import ModelShape

pytestmark = pytest.mark.computing

PUBLISHED = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "Qwen/Qwen3.5-0.8B": 873_438_784,
    "Qwen/Qwen3.5-2B": 2_274_069_824,
    "Qwen/Qwen3.5-4B": 4_659_865_088,
    "Qwen/Qwen3.5-9B": 9_653_104_368,
    "Qwen/Qwen3.5-27B": 27_781_427_952,
    "Qwen/Qwen3.5-35B-A3B": 35_951_822_704,
    "Qwen/Qwen3.5-122B-A10B": 125_086_497_008,
    "Qwen/Qwen3.5-397B-A17B": 403_397_928_944,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
    "google/gemma-4-E2B-it": 5_123_178_051,
    "google/gemma-4-E4B-it": 7_996_156_490,
    "google/gemma-4-26B-A4B-it": 25_805_936_206,
    "google/gemma-4-31B-it": 31_273_088_876,
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": 24_011_361_280,
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": 108_641_793_536,
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": 2_246_784_880,
}
"""The hub counts so many in the safetensors files."""
STANDARDIZED = ("google/gemma-4-26B-A4B-it", "google/gemma-4-31B-it")
"""The vision towers of these have two buffers of 1,152 numbers, which are in the files too."""
TEXT_TWINS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": "Qwen/Qwen2.5-3B",
    "Qwen/Qwen2.5-VL-7B-Instruct": "Qwen/Qwen2.5-7B",
    "Qwen/Qwen2.5-VL-32B-Instruct": "Qwen/Qwen2.5-32B",
    "Qwen/Qwen2.5-VL-72B-Instruct": "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-VL-2B-Instruct": "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-VL-4B-Instruct": "Qwen/Qwen3-4B",
    "Qwen/Qwen3-VL-8B-Instruct": "Qwen/Qwen3-8B",
    "Qwen/Qwen3-VL-32B-Instruct": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-VL-30B-A3B-Instruct": "Qwen/Qwen3-30B-A3B",
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": "mistralai/Mistral-Small-24B-Base-2501",
}
"""Their language models have the shape of these models, which read text alone."""
VISION = "Qwen/Qwen2.5-VL-7B-Instruct"
CONFIG = TrainConfig.from_dict(
    {"name": "t", "model": {"source": VISION}, "data": {"source": "d"}, "train": {"steps": 10}}
)
MACHINE = named_machine("H200", 512)


def whole_count(shape: ModelShape) -> int:
    return shape.parameter_count + shape.untouched_numel


@pytest.mark.parametrize(("model_id", "published"), PUBLISHED.items())
def test_the_whole_checkpoint_has_as_many_parameters_as_the_hub_counts(model_id, published):
    shape = catalog_shape(model_id)
    if "gemma-4" in model_id:  # a number for each layer is a buffer, and in the files
        published -= len(shape.blocks) + (2 * 1152 if model_id in STANDARDIZED else 0)
    assert whole_count(shape) == published > shape.parameter_count


@pytest.mark.parametrize(("model_id", "text"), TEXT_TWINS.items())
def test_the_language_model_is_that_of_the_model_of_text(model_id, text):
    shape, twin = catalog_shape(model_id), catalog_shape(text)
    assert shape.parameter_count == twin.parameter_count
    assert shape.active_parameters == twin.active_parameters and shape.tied == twin.tied
    sizes = [[unit.numel for unit in each.units] for each in (shape, twin)]
    assert sizes[0] == sizes[1] and shape.untouched_numel > twin.untouched_numel == 0
    assert [unit.activations for unit in shape.blocks] == [u.activations for u in twin.blocks]


def test_what_is_not_read_of_a_checkpoint_is_what_its_configuration_says():
    """A draft model is a block of full attention between a projection of two states and a norm."""
    for entry in catalog():
        shape = entry.shape()
        if shape.model_type.startswith("qwen3_5"):
            width = shape.hidden_size
            draft = shape.blocks[-1].parameter_count + 2 * width * width + 3 * width
            assert entry.unread == draft, entry.id
        elif "num_kv_shared_layers" not in entry.config.get("text_config", {}):
            assert not entry.unread, entry.id
    text = entry_of("google/gemma-4-E2B-it").config["text_config"]
    shared = text["layer_types"][-text["num_kv_shared_layers"] :]
    widths = [256 if kind == "sliding_attention" else 512 for kind in shared]
    keys_and_values = sum(2 * text["hidden_size"] * width + width for width in widths)
    assert entry_of("google/gemma-4-E2B-it").unread == keys_and_values


def test_a_length_of_its_own_is_in_the_configuration_of_the_text():
    scout = entry_of("meta-llama/Llama-4-Scout-17B-16E-Instruct")
    base = "meta-llama/Llama-4-Scout-17B-16E"
    assert scout.shape().max_position_embeddings == 10_485_760
    assert catalog_shape(base).max_position_embeddings == 262_144
    assert scout.config_of(base)["text_config"]["max_position_embeddings"] == 262_144
    assert scout.config["text_config"]["max_position_embeddings"] == 10_485_760
    assert "max_position_embeddings" not in scout.config_of(base)


# ---------------------------------------------------------------------- report and table


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_what_is_not_trained_is_on_the_disk_with_each_export_and_never_in_memory():
    shape = catalog_shape(VISION)
    report, alone = (estimate(CONFIG, MACHINE, s) for s in (shape, without_vision(shape)))
    assert items_of(report.to_dict(), PartName.HOST) == items_of(alone.to_dict(), PartName.HOST)
    assert items_of(report.to_dict(), PartName.GPU) == items_of(alone.to_dict(), PartName.GPU)
    assert report.time == alone.time and report.choices == alone.choices
    disk, plain = ({item.kind: item for item in each.disk.items} for each in (report, alone))
    export = disk.pop(MemoryItem.EXPORT)
    assert export.bytes == 2 * 8_292_166_656
    assert export.bytes - plain.pop(MemoryItem.EXPORT).bytes == 2 * 676_550_144
    assert disk == plain
    assert any("its other parts (676,550,144 parameters) stay" in shown for shown in report.reasons)


def without_vision(shape: ModelShape) -> ModelShape:
    return replace(shape, untouched_numel=0)


def test_the_table_tells_both_parts():
    shown = columns([], MACHINE)
    entries = [entry_of(VISION), entry_of("Qwen/Qwen2.5-7B")]
    rows = list(rows_of(CONFIG, shown, entries, timed=False))
    vision, text = rows
    assert (vision.parameters, vision.whole_parameters) == (7_615_616_512, 8_292_166_656)
    assert vision.trained_parameters == text.parameters == text.whole_parameters
    assert vision.cells == text.cells
    head, *lines = as_text(rows, shown).splitlines()
    assert head.split()[:2] == ["model", "parameters"]
    assert "7.62 of 8.29 B" in lines[0] and "  7.62 B" in lines[1]
    names, *values = (line.split(",") for line in as_csv(rows, shown).splitlines())
    found = [dict(zip(names, line))["whole_parameters"] for line in values]
    assert found == ["8292166656", "7615616512"]
    assert [row["whole_parameters"] for row in as_dicts(rows, shown)] == list(map(int, found))


def test_adapters_are_counted_in_neither_part():
    config = CONFIG.with_values({"train.method": "lora", "train.lora_rank": 8})
    shown = columns([], MACHINE)
    (row,) = rows_of(config, shown, [entry_of(VISION)], timed=False)
    assert (row.parameters, row.whole_parameters) == (7_615_616_512, 8_292_166_656)
    shape = catalog_shape(VISION, adapters=Adapters(rank=8))
    assert row.trained_parameters == shape.trained_count < row.parameters / 100
    assert shape.untouched_numel == catalog_shape(VISION).untouched_numel
