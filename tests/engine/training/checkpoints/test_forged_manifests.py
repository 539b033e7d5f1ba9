"""Checkpoints of strangers: whatever a manifest with a right checksum says, and whatever lies in
place of a file, each use ends with one sentence or with all that was saved, and opens nothing
elsewhere.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat

import pytest
import torch

from engine.errors import CheckpointError, RamstreamError
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.training.checkpoints import staging
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from engine.training.checkpoints.restore import (
    load_checkpoint,
    load_newest_checkpoint,
    newest_checkpoint,
)
from engine.training.checkpoints.saved_on_disk import saved_best, saved_steps
from engine.training.weights.earlier_run import EarlierRun
from engine.training.weights.start_from import load_start
from tests.support.filled_states import content, fill
from tests.support.forged import body_of, forge, forgeries, thought_of
from tests.support.opened import opened_outside

pytestmark = pytest.mark.slow("a plain run has shorter tests of the same")

STATE = {
    "data": "c2540e39",
    "rounding": {
        "micro_batch_size": 2,
        "loss_chunk": 64,
        "main_grad": "vertical",
        "rounds": 1,
        "ranks": 1,
        "replicas": 1,
        "nodes_per_replica": 1,
        "compiled": False,
        "tile_tokens": 0,
    },
    "total_steps": 12,
    "skipped": [3],
    "settings": {
        "train.method": "lora",
        "model.source": "models/m",
        "train.lora_rank": 8,
        "train.lora_alpha": 16.0,
        "train.lora_dropout": 0.0,
        "train.lora_rslora": False,
        "train.lora_targets": ["q_proj"],
        "train.lora_save_modules": [],
        "data.add_tokens": ["<x>"],
        "model.rope_scaling": "none",
    },
    "loss": 1.5,
    "correct": 1,
    "total": 2,
}
PARTS = 32


@pytest.fixture
def at_once():
    """Fails a test that waits, for example for whoever writes into a pipe."""

    def late(*_):
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class Uses:
    """Every use of one checkpoint, whose planes have the contents `saved`."""

    def __init__(self, path, states, into):
        self.path, self.root, self.run = path, path.parent, path.parent.parent
        self.saved = content(states)
        self._into = into

    def all(self) -> list[str]:
        """Uses the checkpoint in every way; returns the sentences, one for each that was refused.
        What was loaded must be all that was saved.
        """
        loads = {
            lambda b: load_checkpoint(self.path, self._into, b): None,
            lambda b: load_newest_checkpoint(self.root, self._into, b): None,
            lambda b: load_checkpoint(self.path, self._into, b, WEIGHT_PLANES): WEIGHT_PLANES,
            lambda b: load_start(self.run, self._into, b): WEIGHT_PLANES,
        }
        reported = []
        for load, planes in loads.items():
            fill(self._into, 2)
            buffers = {"gate": torch.zeros(3)}
            try:
                load(buffers)
            except RamstreamError as error:
                reported.append(str(error))
                continue
            found = content(self._into)
            wanted = {key for key in found if planes is None or key[1] in planes}
            assert all(found[key] == self.saved[key] for key in wanted)
            assert torch.equal(buffers["gate"], torch.ones(3))
        for look in (
            newest_checkpoint,
            lambda _: EarlierRun.read(self.run),
            saved_steps,
            saved_best,
        ):
            try:
                look(self.root)
            except RamstreamError as error:
                reported.append(str(error))
        return reported


@pytest.fixture
def uses(tmp_path, new_states, monkeypatch):
    monkeypatch.setattr(staging, "CHUNK_BYTES", 4096)
    states = new_states(seed=1)
    contents = Contents(states, STATE, {"gate": torch.ones(3)})
    run = tmp_path / "runs" / "r"
    run.mkdir(parents=True)
    info = write_checkpoint(run / "checkpoints", 5, contents, keep=1)
    made = Uses(info.path, states, new_states())
    assert made.all() == [], "an honest one can be used in every way"
    return made


def is_plain(sentence: str) -> bool:
    return "\n" not in sentence and sentence.endswith(".") and len(sentence) < 1200


# ---------------------------------------------------------------------- manifests


@pytest.mark.parametrize("part", range(PARTS))
def test_a_forged_value_is_refused_in_a_sentence_or_changes_nothing(uses, part, at_once):
    body = body_of(uses.path)
    for name, forged in list(forgeries(body))[part::PARTS]:
        forge(uses.path, forged)
        with opened_outside(uses.run) as outside:
            found = uses.all()
        assert not outside, name
        assert all(map(is_plain, found)), (name, found)


def test_what_only_a_person_thinks_of_is_refused(uses, at_once):
    body = body_of(uses.path)
    for name, forged in thought_of(body):
        forge(uses.path, forged)
        found = uses.all()
        assert len(found) >= 4 and all(map(is_plain, found)), (name, found)


def test_a_checkpoint_without_planes_is_named(uses):
    body = body_of(uses.path)
    body["units"][0]["planes"] = {}
    forge(uses.path, body)
    with pytest.raises(CheckpointError, match="damaged: weight_high of unit embed is missing"):
        load_checkpoint(uses.path, uses._into, {}, WEIGHT_PLANES)


def test_one_that_lacks_planes_gives_way_to_the_one_before(two, new_states):
    root, held = two
    body = body_of(root / "step-2")
    del body["units"][1]["planes"]["exp_avg"]
    forge(root / "step-2", body)
    states = new_states()
    info = load_newest_checkpoint(root, states, {})
    assert info.step == 1 and content(states) == held[1]
    assert "exp_avg of unit block.0 is missing" in info.skipped[0]


def test_no_file_outside_is_opened_even_if_it_is_the_right_one(uses):
    body = body_of(uses.path)
    file = uses.path / body["units"][0]["file"]
    outside = uses.root / "outside.planes"
    shutil.copyfile(file, outside)
    for name in ("../outside.planes", str(outside), f"../step-5/{file.name}", f"./{file.name}"):
        body["units"][0]["file"] = name
        forge(uses.path, body)
        with opened_outside(uses.path) as opened:
            assert len(uses.all()) >= 4
        assert str(outside) not in opened


def test_a_manifest_without_end_is_not_read(uses, at_once):
    (uses.path / "manifest.json").write_bytes(b"[" * 100_000)
    assert all("is damaged" in found for found in uses.all())
    with (uses.path / "manifest.json").open("wb") as file:
        file.truncate(1 << 40)
    found = uses.all()
    assert found and all("at most" in each for each in found)


def test_names_that_are_no_steps_are_no_checkpoints(uses):
    for name in ("step-05", "step-٥", "step--1", "step-1e3", "step-" + "9" * 200, "step-5.old"):
        (uses.root / name).mkdir()
    (uses.root / "step-9").write_text("")
    (uses.root / "step-8").symlink_to("step-5")
    assert saved_steps(uses.root).newest == 5 and uses.all() == []


# ---------------------------------------------------------------------- files


def pipe(path, original):
    os.mkfifo(path)


def link(path, original):
    path.symlink_to(original)


def folder(path, original):
    path.mkdir()


def a_socket(path, original):
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{os.open(path.parent, os.O_PATH)}/{path.name}")


def device(path, original):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    except PermissionError:
        pytest.skip("only root makes devices")


@pytest.mark.parametrize("make", [pipe, link, folder, a_socket, device])
def test_what_is_no_file_is_not_opened(uses, make, at_once):
    """A link leads to the very file that was there."""
    for file in sorted(uses.path.iterdir()):
        original = uses.run.parent / file.name
        file.rename(original)
        make(file, original)
        with opened_outside(uses.run) as outside:
            found = uses.all()
        assert len(found) >= 4 and all(file.name in each for each in found), (file, found)
        assert not outside
        shutil.rmtree(file) if make is folder else file.unlink()
        original.rename(file)
    assert uses.all() == []


@pytest.mark.parametrize("what", ["checkpoints", "step-5"])
def test_a_linked_folder_of_checkpoints_is_named_and_not_followed(uses, new_states, what):
    elsewhere = uses.run.parent / "elsewhere"
    place = uses.root if what == "checkpoints" else uses.path
    place.rename(elsewhere)
    place.symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    for look in (newest_checkpoint, lambda root: load_newest_checkpoint(root, new_states(), {})):
        with pytest.raises(CheckpointError, match=f"{what} is a link to .*elsewhere, and a run"):
            look(uses.root)
    if what == "checkpoints":
        with pytest.raises(CheckpointError, match="cannot be written in .*it is a link"):
            write_checkpoint(uses.root, 6, Contents(new_states(), {}), keep=1)
    else:
        write_checkpoint(uses.root, 6, Contents(new_states(), {}), keep=1)
    assert sorted(elsewhere.rglob("*")) == before


def test_leftovers_that_are_links_are_removed_themselves(uses, new_states):
    elsewhere = uses.run.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "kept").write_text("kept")
    for name in (".step-6.partial", ".step-4.deleted", ".step-6.old"):
        (uses.root / name).symlink_to(elsewhere)
    write_checkpoint(uses.root, 6, Contents(new_states(), {}), keep=1)
    assert sorted(path.name for path in uses.root.iterdir()) == ["step-6"]
    assert (elsewhere / "kept").read_text() == "kept"


def test_a_linked_runs_folder_is_the_owners(uses, new_states, tmp_path):
    bigger = tmp_path / "bigger disk"
    uses.run.parent.rename(bigger)
    uses.run.parent.symlink_to(bigger)
    assert uses.all() == []
    write_checkpoint(uses.root, 6, Contents(new_states(), {}), keep=2)
    assert saved_steps(uses.root).newest == 6 and (bigger / "r" / "checkpoints" / "step-6").is_dir()
