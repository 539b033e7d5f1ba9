"""What every item of memory counts as: in predictions, in the sentence of what no longer fits, in
shares, in colors.
"""

from __future__ import annotations

import json

import pytest

from engine.machine.known_machines import named_machine, with_figures
from engine.planning.fit.memory_items import Item, MemoryItem, PartName, items_of, read_item
from engine.planning.fit.pool import Held, held_by
from engine.planning.fit.predictions import predictions
from engine.planning.fit.report import _breaking, estimate
from engine.planning.fit.requirements import TRACKERS_BYTES, Part, SessionFacts
from engine.planning.layout.layout import PLANES, WEIGHT_PLANES
from engine.text import GIB
from engine.training.loop.oom_report import GpuFigures, HostFigures, gpu_shares, host_shares
from tests.support.chosen import big_shape, config

HOST = (
    "Runtime",
    "Libraries",
    "Kernels",
    "Margin",
    "weight_high",
    "weight_low",
    "exp_avg",
    "exp_avg_sq",
    "grad",
    "Gradient ring",
    "Moments in transit",
    "Matrix in an update",
    "Block inputs in RAM",
    "Block inputs in transit",
    "Tokenized data",
    "Loading peak",
    "Checkpoint copies",
    "Trackers",
)
DEVICE = (
    "Block slots",
    "Embed and head slots",
    "Resident blocks",
    "Units that live on the GPU",
    "Gradient accumulators",
    "Gradient staging",
    "Gradients kept on the GPU",
    "Optimizer states",
    "Block input rings",
    "Block inputs",
    "Hidden states",
    "Rotary embeddings",
    "Kept activations",
    "Working set",
    "Tokens and masks",
    "CUDA context",
    "Allocator slack",
    "Exchange buffers",
)
DISK = (
    "Best weights",
    "Checkpoints",
    "Export",
    "Record",
    "Moments on the disk",
    "Block inputs on the disk",
)
NAMES = HOST + DEVICE + DISK
OVERHEAD = (
    "Runtime",
    "Libraries",
    "Kernels",
    "Margin",
    "CUDA context",
    "Allocator slack",
    "Exchange buffers",
)


def item(name: str, size: int) -> Item:
    return read_item({"name": name, "bytes": size, "note": ""})


def of_powers(names: tuple[str, ...]) -> list[dict]:
    """Items whose sizes are powers of two, so that a sum says which of them are in it."""
    return [{"name": name, "bytes": 1 << number, "note": ""} for number, name in enumerate(names)]


def in_sum(total: float, names: tuple[str, ...]) -> set[str]:
    return {name for number, name in enumerate(names) if int(total) >> number & 1}


def test_a_prediction_leaves_out_what_is_set_aside_and_what_is_only_there_while_loading():
    names = HOST + DEVICE
    found = predictions({"host": {"items": of_powers(names)}, "gpu": {"items": of_powers(DEVICE)}})
    assert in_sum(found["host_bytes"], names) == set(names) - {
        "Margin",
        "Loading peak",
        "Trackers",
    }
    assert in_sum(found["gpu_peak_bytes"], DEVICE) == set(DEVICE)
    assert in_sum(found["loading_peak_bytes"], names) == {
        "Runtime",
        "Tokenized data",
        "weight_high",
        "weight_low",
        "exp_avg",
        "exp_avg_sq",
        "grad",
        "Gradient ring",
        "Moments in transit",
        "Matrix in an update",
        "Block inputs in RAM",
        "Block inputs in transit",
        "Loading peak",
    }


@pytest.mark.parametrize("dtype, copy", [("bfloat16", 2), ("float32", 4)])
def test_loading_that_takes_no_more_than_training_is_the_weights_and_what_is_read(dtype, copy):
    items, model = (
        of_powers(HOST[: HOST.index("Loading peak")]),
        {"parameters": 1 << 20, "dtype": dtype},
    )
    drawn = predictions({"host": {"items": items}, "model": model})["loading_peak_bytes"]
    assert in_sum(drawn, HOST) == {"Runtime", "Tokenized data", "weight_high", "weight_low"}
    read = [*items, {"name": "Loading peak", "bytes": 0, "note": ""}]
    found = predictions({"host": {"items": read}, "model": model | {"read_ahead": 1 << 16}})
    assert found["loading_peak_bytes"] == drawn + (copy << 16)


def test_shares_of_the_host_are_of_planes_block_inputs_data_and_the_rest():
    names = HOST + DEVICE
    found = {
        share.name: share.planned
        for share in host_shares({"host": {"items": of_powers(names)}}, HostFigures({}, 0, 0, 0))
    }
    planes = {"weight_high", "weight_low", "exp_avg", "exp_avg_sq", "grad"}
    assert in_sum(found["planes"], names) == planes
    assert in_sum(found["data"], names) == {"Tokenized data"}
    assert in_sum(found["block inputs"], names) == {
        "Block inputs in RAM",
        "Block inputs in transit",
    }
    assert in_sum(found["checkpoint copies"], names) == {"Checkpoint copies"}
    assert in_sum(found["the rest of it"], names) == set(names) - planes - {
        "Tokenized data",
        "Block inputs in RAM",
        "Block inputs in transit",
        "Checkpoint copies",
        "Margin",
        "Loading peak",
        "Trackers",
    }


def test_shares_of_the_host_while_weights_are_read():
    found = {
        share.name: share.planned
        for share in host_shares(
            {"host": {"items": of_powers(HOST)}}, HostFigures({}, 0, 0, 0, True)
        )
    }
    assert in_sum(found["planes"], HOST) == {"weight_high", "weight_low"}
    assert "block inputs" not in found
    assert in_sum(found["the rest of it"], HOST) == {
        "Runtime",
        "exp_avg",
        "exp_avg_sq",
        "grad",
        "Gradient ring",
        "Moments in transit",
        "Matrix in an update",
        "Block inputs in RAM",
        "Block inputs in transit",
        "Loading peak",
    }


def test_shares_of_the_gpu_are_of_activations_buffers_and_gaps():
    items = [item(one["name"], one["bytes"]) for one in of_powers(DEVICE)]
    activations, buffers, gaps, _ = gpu_shares(items, GpuFigures(0, 0, 0, 0, 0, 0), 0)
    assert in_sum(activations.planned, DEVICE) == {
        "Block inputs",
        "Hidden states",
        "Rotary embeddings",
        "Kept activations",
        "Working set",
        "Tokens and masks",
    }
    assert in_sum(gaps.planned, DEVICE) == {"Allocator slack"}
    assert in_sum(buffers.planned, DEVICE) == set(DEVICE[:9])


@pytest.mark.parametrize("name", OVERHEAD)
def test_what_every_run_needs_is_never_what_no_longer_fits(name):
    assert (
        _breaking(Part((item("grad", GIB), item(name, 5 * GIB)), 4 * GIB))
        == "the program alone takes more"
    )
    assert (
        _breaking(Part((item("grad", 2 * GIB), item(name, 3 * GIB)), 4 * GIB))
        == "what no longer fits: Gradients (2.0 GiB)"
    )


@pytest.mark.parametrize(
    "name",
    [name for name in NAMES if name not in OVERHEAD],
)
def test_the_item_that_crosses_the_limit_is_named(name):
    large = item(name, 2 * GIB)
    part = Part((item("Runtime", GIB), large, item("Export", 3 * GIB)), 2 * GIB)
    assert _breaking(part) == f"what no longer fits: {large.words} (2.0 GiB)"


def test_a_part_as_plain_data_names_its_items_in_text():
    found = Part((item("Runtime", 3), Item(MemoryItem.WEIGHT_HIGH, 4, "a note")), 10).to_dict()
    assert found == {
        "items": [
            {"name": "Runtime", "bytes": 3, "note": ""},
            {"name": "weight_high", "bytes": 4, "note": "a note"},
        ],
        "total": 7,
        "limit": 10,
        "least": None,
    }
    assert all(type(one["name"]) is str for one in found["items"])


# ---------------------------------------------------------------------- read back


def test_the_names_are_those_that_records_have():
    assert tuple(kind.value for kind in MemoryItem) == (*NAMES, "")
    assert {kind.value for kind in MemoryItem if kind.is_plane} == PLANES
    assert tuple(kind.value for kind in MemoryItem if kind.is_weights) == WEIGHT_PLANES


@pytest.mark.parametrize("name", NAMES)
def test_an_item_is_read_back_from_a_record(name):
    made = Item(MemoryItem(name), 7, "a note")
    assert made.name == name and read_item(json.loads(json.dumps(made.to_dict()))) == made


def test_an_item_of_another_version_is_ordinary_and_keeps_its_name():
    reported = {"name": "Loading margin, runtime data", "bytes": GIB, "note": ""}
    (unknown,) = items_of({"gpu": {"items": [reported | {"share": 0.5}]}}, PartName.GPU)
    assert unknown.kind is MemoryItem.UNKNOWN and unknown.to_dict() == reported
    assert held_by(unknown.kind) == Held.PROGRAM
    found = predictions({"host": {"items": [reported]}, "gpu": {"items": [reported]}})
    assert found == {"loading_peak_bytes": 0, "host_bytes": GIB, "gpu_peak_bytes": GIB}
    (share,) = host_shares({"host": {"items": [reported]}}, HostFigures({}, 0, 0, 0))
    assert (share.name, share.planned) == ("the rest of it", GIB)
    assert [share.planned for share in gpu_shares([unknown], GpuFigures(0, 0, 0, 0, 0, 0), 0)] == [
        0,
        GIB,
        0,
        0,
    ]
    assert (
        _breaking(Part((item("Runtime", GIB), unknown), GIB))
        == f"what no longer fits: {unknown.name} (1.0 GiB)"
    )


def test_planes_that_optimizers_share_are_called_as_with_adamw():
    assert Item(MemoryItem("exp_avg"), 1).words == "AdamW's first moments"
    assert Item(MemoryItem("exp_avg_sq"), 1).words == "AdamW's second moments"


@pytest.mark.parametrize("report", [{}, {"gpu": None}, {"gpu": {}}, {"gpu": {"items": None}}])
def test_a_report_without_a_part_has_no_items_of_it(report):
    assert items_of(report, PartName.GPU) == ()


def test_the_process_of_trackers_has_its_room_only_where_there_are_trackers():
    machine = with_figures(named_machine("H200", 512), disk_gib=4096)
    plain, tracked = (
        estimate(config(output__trackers=trackers), machine, big_shape(), SessionFacts())
        for trackers in ([], ["tensorboard", "wandb"])
    )
    added = [item for item in tracked.host.items if item not in plain.host.items]
    assert [item.kind for item in added] == [MemoryItem.TRACKERS]
    assert tracked.host.total - plain.host.total == TRACKERS_BYTES
