"""A checkpoint of weights alone is a full one without the moments, and says what it holds."""

from __future__ import annotations

import json

import pytest
import torch

from engine.errors import CheckpointError
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.training.checkpoints.checkpoint import Contents, checkpoint_bytes, write_checkpoint
from engine.training.checkpoints.restore import (
    load_checkpoint,
    load_newest_checkpoint,
    newest_checkpoint,
)
from engine.training.checkpoints.saved_on_disk import NOTHING_SAVED, SavedSteps, saved_steps
from tests.support.filled_states import content, fill

BIAS = {"gate.bias": torch.tensor([1.0, -2.0, 0.5])}


def weights_of(states) -> dict[tuple[str, str], bytes]:
    planes = [plane for plane in states.planes if plane in WEIGHT_PLANES]
    return {
        (unit, plane): states.array(unit, plane).tobytes()
        for unit in states.layouts
        for plane in planes
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_weights_alone_are_those_of_the_full_checkpoint(tmp_path, new_states, small_chunks, dtype):
    states = new_states(dtype, seed=1)
    full = write_checkpoint(tmp_path / "full", 3, Contents(states, {"a": 1}, BIAS), keep=1)
    alone = Contents(states, {"a": 1}, BIAS, holds="weights")
    info = write_checkpoint(tmp_path / "alone", 3, alone, keep=1)
    planes = checkpoint_bytes(states, "weights")
    assert planes == alone.plane_bytes == checkpoint_bytes(states) // 3
    assert planes < info.bytes < full.bytes
    assert alone.needed_bytes(tmp_path / "alone") < 2 * info.bytes + (1 << 20)
    entries = [
        json.loads((path / "manifest.json").read_text())["units"] for path in (full.path, info.path)
    ]
    for whole, unit in zip(*entries):
        assert set(unit["planes"]) == set(WEIGHT_PLANES) & set(whole["planes"])
        for plane, entry in unit["planes"].items():
            assert entry["checksums"] == whole["planes"][plane]["checksums"]
    for root in (tmp_path / "full", tmp_path / "alone"):
        read = new_states(dtype, weights_only=True)
        buffers = {"gate.bias": torch.zeros(3)}
        assert load_newest_checkpoint(root, read, buffers, WEIGHT_PLANES).step == 3
        assert weights_of(read) == weights_of(states)
        assert torch.equal(buffers["gate.bias"], BIAS["gate.bias"])


def test_a_resume_takes_the_newest_full_checkpoint_and_says_why(tmp_path, new_states, two):
    root, held = two
    states = new_states(seed=3)
    write_checkpoint(root, 3, Contents(states, {}, holds="weights"), keep=5)
    assert saved_steps(root) == SavedSteps(3, 2) and not saved_steps(root).is_weights_alone
    assert newest_checkpoint(root).step == 3
    found = newest_checkpoint(root, to_resume=True)
    assert found.step == 2 and "step-3 holds weights alone" in found.skipped[0]
    read = new_states()
    found = load_newest_checkpoint(root, read, {})
    assert found.step == 2 and content(read) == held[2]
    assert "holds weights alone" in found.skipped[0]


def test_what_has_no_moments_is_refused_where_they_are_needed(tmp_path, new_states):
    states = new_states(seed=1)
    info = write_checkpoint(tmp_path, 3, Contents(states, {}, holds="weights"), keep=1)
    assert saved_steps(tmp_path) == SavedSteps(3, None) and saved_steps(tmp_path).is_weights_alone
    other = new_states(seed=2)
    before = content(other)
    for refused in (
        lambda: load_checkpoint(info.path, other, {}),
        lambda: load_newest_checkpoint(tmp_path, other, {}),
        lambda: newest_checkpoint(tmp_path, to_resume=True),
    ):
        with pytest.raises(CheckpointError, match="holds weights alone, which can be trained on"):
            refused()
    assert content(other) == before, "nothing was written to the planes"


@pytest.mark.parametrize("damage", ["shorter", "one byte"])
def test_damaged_weights_are_refused(tmp_path, new_states, damage):
    states = new_states(seed=1)
    info = write_checkpoint(tmp_path, 3, Contents(states, {}, holds="weights"), keep=1)
    file = max(info.path.glob("*.planes"), key=lambda path: path.stat().st_size)
    bytes_ = bytearray(file.read_bytes())
    bytes_[100] ^= 1
    file.write_bytes(bytes_[:-1] if damage == "shorter" else bytes_)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_newest_checkpoint(tmp_path, new_states(weights_only=True), {}, WEIGHT_PLANES)


def test_no_folder_and_no_manifest_are_nothing_and_full(tmp_path, new_states):
    assert saved_steps(tmp_path / "none") == saved_steps(tmp_path) == NOTHING_SAVED
    states = new_states(seed=1)
    for step, holds in ((1, "full"), (2, "weights"), (4, "weights")):
        fill(states, step)
        write_checkpoint(tmp_path, step, Contents(states, {}, holds=holds), keep=5)
    assert saved_steps(tmp_path) == SavedSteps(4, 1)
    (tmp_path / "step-2" / "manifest.json").unlink()
    assert saved_steps(tmp_path) == SavedSteps(4, 2), "whoever resumes is told what is wrong"
