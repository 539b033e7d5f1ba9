"""Checkpoints: what comes back is what was written, bit for bit; whatever breaks one leaves the one
before it whole.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from engine.errors import CheckpointError
from engine.files import body_checksum
from engine.paths import PROGRAM_ROOT
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.progress import no_progress
from engine.runtime.host.host_states import HostStates
from engine.training.checkpoints import checkpoint, chunk_files, staging
from engine.training.checkpoints.checkpoint import Contents, checkpoint_bytes, write_checkpoint
from engine.training.checkpoints.chunk_files import PAGE
from engine.training.checkpoints.restore import (
    load_checkpoint,
    load_newest_checkpoint,
    newest_checkpoint,
)
from tests.support.filled_states import content, names

pytestmark = pytest.mark.usefixtures("small_chunks")

STATE = {
    "schedule": {"step": 10},
    "rows": {"row": 320},
    "random": {"torch": "AAEC/w==", "numpy": [1, 2**63, 0.1, None]},
}


# ---------------------------------------------------------------------- round trip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_bit_comes_back(tmp_path, new_states, dtype):
    states, root, reported = new_states(dtype, seed=1), tmp_path / "checkpoints", []
    info = write_checkpoint(
        root,
        10,
        Contents(states, STATE),
        keep=2,
        progress=lambda done, total: reported.append((done, total)),
    )
    written = sum(path.stat().st_size for path in info.path.iterdir())
    planes = checkpoint_bytes(states)
    assert (info.path, info.step, info.bytes) == (root / "step-10", 10, written)
    assert planes == sum(map(len, content(states).values()))
    # A chunk has a checksum of 32 digits, and a plane begins at a whole page.
    checksums = 40 * sum(
        -(-len(plane) // staging.CHUNK_BYTES) for plane in content(states).values()
    )
    assert planes < written < planes + 10_000 + checksums + PAGE * len(content(states))
    assert reported == sorted(reported)
    assert reported[-1] == (planes, planes)
    assert len(reported) > 40
    assert names(root) == ["step-10"]

    other, reported = new_states(dtype, seed=2), []
    gradients = other.array("embed", "grad").tobytes()
    loaded = load_checkpoint(
        info.path, other, {}, progress=lambda done, total: reported.append((done, total))
    )
    assert content(other) == content(states) and loaded.state == STATE
    assert other.array("embed", "grad").tobytes() == gradients
    assert reported[-1] == (planes, planes)
    found = newest_checkpoint(root)
    assert (found.path, found.step, found.bytes, found.skipped) == (info.path, 10, written, ())
    assert found.state == info.state == STATE


def test_weights_alone_need_no_moments(tmp_path, new_states):
    states = new_states(seed=1)
    info = write_checkpoint(tmp_path, 3, Contents(states, {}), keep=1)
    other = new_states(weights_only=True)
    assert load_checkpoint(info.path, other, {}, WEIGHT_PLANES).step == 3
    for unit in states.layouts:
        for plane in ("weight_high", "weight_low"):
            assert other.array(unit, plane).tobytes() == states.array(unit, plane).tobytes()


def test_buffers_come_back_and_are_checked(tmp_path, new_states):
    states, bias = new_states(seed=1), torch.tensor([0.5, -1.25, 3.0])
    info = write_checkpoint(tmp_path, 3, Contents(states, {}, {"gate.bias": bias}), keep=2)
    assert info.bytes == sum(path.stat().st_size for path in info.path.iterdir())
    assert newest_checkpoint(tmp_path).bytes == info.bytes
    for load in (
        lambda b: load_checkpoint(info.path, states, b, WEIGHT_PLANES),
        lambda b: load_newest_checkpoint(tmp_path, states, b),
    ):
        into = {"gate.bias": torch.zeros(3)}
        assert load(into).step == 3 and torch.equal(into["gate.bias"], bias)
    with pytest.raises(
        CheckpointError,
        match="of another model: it has the buffers .'gate.bias'.* and this model none",
    ):
        load_checkpoint(info.path, states, {})
    write_checkpoint(tmp_path, 4, Contents(states, {}, {"gate.bias": bias}), keep=2)
    file = tmp_path / "step-4" / "buffers.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = load_newest_checkpoint(tmp_path, states, {"gate.bias": torch.zeros(3)})
    assert found.step == 3 and "buffers.safetensors does not match its checksum" in found.skipped[0]


def test_there_may_be_none(tmp_path, new_states):
    for root in (tmp_path, tmp_path / "none"):
        assert newest_checkpoint(root) is None
        assert load_newest_checkpoint(root, new_states(), {}) is None
    with pytest.raises(CheckpointError, match="step-4 has no manifest.json"):
        load_checkpoint(tmp_path / "step-4", new_states(), {})


@pytest.mark.parametrize("holds", ["full", "weights"])
def test_the_room_that_is_asked_for_holds_the_checksums(tmp_path, new_states, monkeypatch, holds):
    """A model of 70B has 100,000 chunks, whose checksums take 4 MB."""
    monkeypatch.setattr(staging, "CHUNK_BYTES", 16)
    monkeypatch.setattr(checkpoint, "_SPARE_BYTES", 10_000)
    contents = Contents(new_states(seed=1), {"a": 1}, holds=holds)
    info = write_checkpoint(tmp_path, 1, contents, keep=1)
    manifest = (info.path / "manifest.json").stat().st_size
    assert manifest > 50_000
    assert info.bytes <= contents.needed_bytes(tmp_path) < 1.5 * info.bytes


def test_state_must_be_json(tmp_path, new_states):
    for state, error in (({"a": {1, 2}}, TypeError), ({"a": float("nan")}, ValueError)):
        with pytest.raises(error):
            write_checkpoint(tmp_path / "c", 1, Contents(new_states(), state), keep=1)
    assert not (tmp_path / "c").exists()


def falls_back(root, held, states, says: str) -> None:
    info = load_newest_checkpoint(root, states, {})
    assert info.step == 1
    assert info.state == {"step": 1}
    assert content(states) == held[1]
    assert len(info.skipped) == 1
    assert "step-2" in info.skipped[0]
    assert says in info.skipped[0]
    with pytest.raises(CheckpointError, match="step-2"):
        load_checkpoint(root / "step-2", states, {})


def ends_of_planes(units: list[dict], file: str) -> list[int]:
    """Returns where each plane of a file begins and ends; between planes there may be gaps."""
    planes = [plane for unit in units if unit["file"] == file for plane in unit["planes"].values()]
    begins = [plane["offset"] for plane in planes]
    return begins + [plane["offset"] + plane["bytes"] - 1 for plane in planes]


def test_a_flipped_bit_in_any_file_is_found(two, new_states):
    root, held = two
    states = new_states()
    units = json.loads((root / "step-2" / "manifest.json").read_text())["units"]
    for path in sorted((root / "step-2").iterdir()):
        good = path.read_bytes()
        for place in (0, *ends_of_planes(units, path.name), len(good) - 1):
            bad = bytearray(good)
            bad[place] ^= 4
            path.write_bytes(bad)
            falls_back(
                root, held, states, "manifest.json" if path.name == "manifest.json" else path.name
            )
        path.write_bytes(good)
    assert load_newest_checkpoint(root, states, {}).step == 2 and content(states) == held[2]


def test_a_flipped_bit_anywhere_in_the_manifest_is_found(two):
    root, _ = two
    path = root / "step-2" / "manifest.json"
    good = path.read_bytes()
    for place in range(0, len(good), 7):
        bad = bytearray(good)
        bad[place] ^= 1
        path.write_bytes(bad)
        assert newest_checkpoint(root).step == 1, bad[max(0, place - 20) : place + 20]


def test_a_cut_or_missing_or_longer_file_is_found(two, new_states):
    root, held = two
    states = new_states()
    for path in sorted((root / "step-2").iterdir()):
        good = path.read_bytes()
        for bad in (good[:-1], good[: len(good) // 2], b"", good + b"\0", None):
            path.unlink()
            if bad is not None:
                path.write_bytes(bad)
            assert newest_checkpoint(root).step == 1 and len(newest_checkpoint(root).skipped) == 1
        falls_back(root, held, states, path.name)
        path.write_bytes(good)


def test_when_none_is_left_the_reasons_are_given(two, new_states):
    root, _ = two
    (root / "step-2" / "manifest.json").unlink()
    (root / "step-1" / "manifest.json").write_text("{}")
    for find in (newest_checkpoint, lambda root: load_newest_checkpoint(root, new_states(), {})):
        with pytest.raises(
            CheckpointError,
            match="No checkpoint in .* can be used.*step-2 has no .*step-1 is damaged",
        ):
            find(root)


@pytest.mark.parametrize("form", [1, 5, 7])
def test_another_format_is_named_and_not_passed_over(two, new_states, form):
    """Going on from a checkpoint before it would delete what another version wrote."""
    root, _ = two
    path = root / "step-2" / "manifest.json"
    whole = json.loads(path.read_text())
    body = {name: value for name, value in whole.items() if name != "checksum"} | {"format": form}
    path.write_text(json.dumps(body | {"checksum": body_checksum(body)}))
    for find in (newest_checkpoint, lambda root: load_newest_checkpoint(root, new_states(), {})):
        with pytest.raises(CheckpointError, match=f"format {form}, which this version cannot read"):
            find(root)
    path.write_text(json.dumps(whole | {"format": form}))  # a flipped bit, not another version
    assert newest_checkpoint(root).step == 1 and "damaged" in newest_checkpoint(root).skipped[0]


# ---------------------------------------------------------------------- other models


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        (
            {"dtype": "float32"},
            "holds bfloat16 planes and this run computes in float32; set model.dtype to bfloat16",
        ),
        ({"blocks": 4}, "it has 5 units and this model 6; the first difference is block.3"),
        ({"blocks": 2}, "it has 5 units and this model 4; the first difference is block.2"),
        (
            {"width": 32},
            r"in unit embed, the shape of model.embed.weight is \[50, 24\] there "
            r"and \[50, 32\] here",
        ),
        (
            {"prefix": "other"},
            "in unit embed, it has model.embed.weight where this model has other.embed.weight",
        ),
    ],
)
def test_another_model_is_refused_before_anything_is_loaded(tmp_path, new_states, shape, says):
    info = write_checkpoint(tmp_path, 1, Contents(new_states(seed=1), {}), keep=1)
    other = new_states(seed=2, **shape)
    before = content(other)
    for load in (
        lambda: load_checkpoint(info.path, other, {}),
        lambda: load_checkpoint(info.path, other, {}, WEIGHT_PLANES),
        lambda: load_newest_checkpoint(tmp_path, other, {}),
    ):
        with pytest.raises(CheckpointError, match=says):
            load()
    assert content(other) == before


# ---------------------------------------------------------------------- interruption


def test_an_error_half_way_leaves_the_old_one(two, new_states, monkeypatch):
    root, held = two
    states, read, calls = new_states(seed=3), HostStates.content, []

    class Killed(BaseException):
        pass

    full = OSError(errno.ENOSPC, "No space left on device")
    for failure, raised, says in (
        (Killed(), Killed, None),
        (full, CheckpointError, "step 3 cannot be written in .* .No space left"),
    ):

        def fail(self, unit, *place):
            calls.append(unit)
            if unit == "block.2":
                raise failure
            return read(self, unit, *place)

        monkeypatch.setattr(HostStates, "content", fail)
        with pytest.raises(raised, match=says):
            write_checkpoint(root, 3, Contents(states, {}), keep=1)
        monkeypatch.setattr(HostStates, "content", read)
        assert names(root) == ["step-1", "step-2"]
    assert load_newest_checkpoint(root, states, {}).step == 2 and content(states) == held[2]


def test_cancelling_from_the_progress_callback(two, new_states):
    root, _ = two

    def cancel(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(root, 3, Contents(new_states(), {}), keep=1, progress=cancel)
    assert names(root) == ["step-1", "step-2"]


def test_one_failing_thread_stops_the_others():
    meter, reached = chunk_files.Meter(10**6, no_progress), []

    def long() -> None:
        for count in range(10**6):
            meter.add(1)
            reached.append(count)

    def failing() -> None:
        while not reached:
            pass
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        chunk_files.in_threads([long, failing], meter)
    assert len(reached) < 10**6


KILLED = """
import os, sys
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from engine.runtime.host.host_states import HostStates
from tests.support.filled_states import fill, layouts
states = HostStates(layouts(), "bfloat16", threads=1)
states.allocate_weights()
states.allocate_states()
fill(states, 7)

def die_half_way(done, total):
    if done > total / 2:
        os.kill(os.getpid(), 9)

write_checkpoint(sys.argv[1], 3, Contents(states, {}), 1, progress=die_half_way)
"""


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_killed_process_leaves_the_old_one_and_the_next_write_clears_up(two, new_states):
    root, held = two
    process = subprocess.run([sys.executable, "-c", KILLED, root], cwd=PROGRAM_ROOT)
    assert process.returncode == -signal.SIGKILL
    assert names(root) == [".step-3.partial", "step-1", "step-2"]
    states = new_states()
    assert load_newest_checkpoint(root, states, {}).step == 2 and content(states) == held[2]
    write_checkpoint(root, 4, Contents(states, {}), keep=2)
    assert names(root) == ["step-2", "step-4"]


def test_everything_is_synced_before_the_name_appears(tmp_path, new_states, monkeypatch):
    synced, fsync, rename = set(), os.fsync, type(tmp_path).rename

    def noting(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking(self, target):
        if self.name == ".step-1.partial":
            files = [self, *self.iterdir()]
            assert len(files) == 7 and {path.stat().st_ino for path in files} <= synced
            synced.clear()
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(type(tmp_path), "rename", checking)
    write_checkpoint(tmp_path / "checkpoints", 1, Contents(new_states(), {}), keep=1)
    assert (tmp_path / "checkpoints").stat().st_ino in synced
