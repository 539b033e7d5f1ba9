"""Checkpoints of a run share the weights that are not trained: each is whole by itself, whatever
becomes of the others, and whatever links the file system has.
"""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from engine import safe_files
from engine.config.adapters import Adapters
from engine.errors import CheckpointError
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.schedule.choices import PlanChoices
from engine.runs.record.run_folder import BEST_FOLDER
from engine.training.checkpoints import checkpoint, frozen_files
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from engine.training.checkpoints.frozen_files import FrozenFiles
from engine.training.checkpoints.restore import load_checkpoint, verified_manifest
from tests.support.tiny import Streamed, plain_model, streamed, tiny_config

pytestmark = pytest.mark.computing


def a_run(dtype: str = "bfloat16", gpu_resident: int = 0) -> Streamed:
    choices = PlanChoices().changed(gpu_resident_units=gpu_resident)
    adapters = Adapters(rank=4, save_modules=("norm",))
    return streamed(plain_model(tiny_config("llama")), choices, dtype=dtype, parts=adapters)


def masters(run: Streamed) -> dict:
    return {
        spec.full_name: run.host_states.parameters.master(unit.name, spec.name)
        for unit in run.model.units
        for spec in unit.layout.parameters
    }


def write(run: Streamed, root, step: int, holds="full"):
    return write_checkpoint(root, step, Contents(run.host_states, {}, holds=holds), keep=9)


def frozen_of(path) -> dict[str, os.stat_result]:
    return {file.name: file.stat() for file in sorted(path.glob("*.frozen"))}


def inodes(files: dict[str, os.stat_result]) -> list[int]:
    return [file.st_ino for file in files.values()]


def same(found: dict, expected: dict) -> bool:
    return all((found[name] == weight).all() for name, weight in expected.items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gpu_resident", [0, 3])
def test_checkpoints_share_what_is_not_trained(tmp_path, dtype, gpu_resident):
    run = a_run(dtype, gpu_resident)
    root = tmp_path / "checkpoints"
    first, second = write(run, root, 1), write(run, root, 2)
    best = write(run, tmp_path / BEST_FOLDER, 2, "weights")
    files = [frozen_of(info.path) for info in (first, second, best)]
    assert len(files[0]) == len(run.model.units)
    for name, file in files[0].items():
        assert {each[name].st_ino for each in files} == {file.st_ino}
    size = sum(file.st_size for file in files[0].values())
    assert first.bytes - second.bytes == size > 0
    expected = masters(run)
    shutil.rmtree(first.path)
    other = a_run(dtype, gpu_resident)
    for unit in other.model.units:
        other.host_states.tensor(unit.name, "weight_high").zero_()
    load_checkpoint(second.path, other.host_states, {})
    assert same(masters(other), expected)
    run.close()
    other.close()


def test_without_links_they_are_written_again(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    run, found = a_run(), []
    first = write(run, tmp_path, 1)
    needed = Contents(run.host_states, {}).needed_bytes(tmp_path)
    contents = Contents(run.host_states, {})
    second = write_checkpoint(tmp_path, 2, contents, 9, lambda *done: found.append(done[:2]))
    for name, file in frozen_of(first.path).items():
        assert file.st_nlink == 1
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()
    # Space and progress count what is written again.
    assert needed >= contents.most_bytes and second.bytes == first.bytes
    assert {total for _, total in found} == {contents.most_bytes} and found[-1][0] == found[-1][1]
    load_checkpoint(second.path, run.host_states, {})
    run.close()


def test_linked_files_need_no_space(tmp_path):
    run = a_run()
    contents = Contents(run.host_states, {}, holds="weights")
    places = tmp_path / BEST_FOLDER, tmp_path / "checkpoints"
    before = [contents.needed_bytes(place) for place in places]
    info = write(run, places[1], 1)
    size = sum(file.st_size for file in frozen_of(info.path).values())
    assert [contents.needed_bytes(place) for place in places] == [all_ - size for all_ in before]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]  # no trial is left
    run.close()


def test_two_that_are_written_at_once_share_them(tmp_path, monkeypatch):
    """The second is held until the first has its manifest, and finds no earlier checkpoint."""
    run = a_run()
    first_is_done = threading.Event()
    write_new = safe_files.write_new
    units = checkpoint.UnitFiles.write

    def written(files, *arguments):
        entries = units(files, *arguments)
        if threading.current_thread().name == "second":
            assert first_is_done.wait(60)
        return entries

    def manifest(path, content, within):
        if threading.current_thread().name == "first":
            first_is_done.set()
            second.join(60)  # the first has no other name yet
        write_new(path, content, within)

    monkeypatch.setattr(checkpoint.UnitFiles, "write", written)
    monkeypatch.setattr(safe_files, "write_new", manifest)
    found = {}

    def take(place, holds):
        found[place] = write(run, tmp_path / place, 1, holds)

    first = threading.Thread(target=take, args=("checkpoints", "full"), name="first")
    second = threading.Thread(target=take, args=(BEST_FOLDER, "weights"), name="second")
    first.start()
    second.start()
    first.join()
    files = [frozen_of(found[place].path) for place in ("checkpoints", BEST_FOLDER)]
    assert files[0] and inodes(files[0]) == inodes(files[1])
    size = sum(file.st_size for file in files[0].values())
    assert found[BEST_FOLDER].bytes < size < found["checkpoints"].bytes
    load_checkpoint(found[BEST_FOLDER].path, run.host_states, {}, WEIGHT_PLANES)
    third = write(run, tmp_path / BEST_FOLDER, 2, "weights")
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    fourth = write(run, tmp_path / BEST_FOLDER, 3, "weights")
    for info in (third, fourth):
        assert inodes(frozen_of(info.path)) == inodes(files[0])
    run.close()


def test_the_second_waits_while_the_first_writes_them(tmp_path, monkeypatch):
    run, put = a_run(), FrozenFiles._put
    once, waits, seen = threading.Lock(), threading.Event(), set()

    def told(done, _total):
        if done in seen:
            waits.set()  # nothing was written since it was last told
        seen.add(done)

    def take():
        contents = Contents(run.host_states, {}, holds="weights")
        write_checkpoint(tmp_path / BEST_FOLDER, 1, contents, 1, told)

    second = threading.Thread(target=take)

    def putting(files, folder, *arguments):
        if folder.parent.name == "checkpoints" and once.acquire(blocking=False):
            second.start()
            while second.is_alive() and not waits.wait(0.01):
                pass
        return put(files, folder, *arguments)

    monkeypatch.setattr(FrozenFiles, "_put", putting)
    first = write(run, tmp_path / "checkpoints", 1)
    second.join()
    shared = frozen_of(tmp_path / BEST_FOLDER / "step-1")
    assert shared and inodes(shared) == inodes(frozen_of(first.path))
    run.close()


def test_all_look_into_the_checkpoints_first(tmp_path, monkeypatch):
    """Files that were written twice after all are not shared on and on."""
    run = a_run()
    first = write(run, tmp_path / "checkpoints", 1)
    with monkeypatch.context() as without:
        without.setattr(FrozenFiles, "_linked", lambda *_: None)
        own = write(run, tmp_path / BEST_FOLDER, 1, "weights")
    assert not set(inodes(frozen_of(own.path))) & set(inodes(frozen_of(first.path)))
    frozen_files._WRITTEN.clear()  # as in a later session
    later = write(run, tmp_path / BEST_FOLDER, 2, "weights")
    assert inodes(frozen_of(later.path)) == inodes(frozen_of(first.path))
    run.close()


def test_damage_is_found(tmp_path):
    run = a_run()
    info = write(run, tmp_path, 1)
    name = next(iter(frozen_of(info.path)))
    content = bytearray((info.path / name).read_bytes())
    content[7] ^= 1
    (info.path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"that are not trained .{name}. do not match"):
        load_checkpoint(info.path, run.host_states, {})
    (info.path / name).write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match=f"{name} has"):
        verified_manifest(info.path)
    (info.path / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} cannot be read"):
        verified_manifest(info.path)
    run.close()


def test_a_file_of_another_size_is_not_shared(tmp_path):
    run = a_run()
    first = write(run, tmp_path, 1)
    name = next(iter(frozen_of(first.path)))
    (first.path / name).write_bytes(b"short")
    second = write(run, tmp_path, 2)
    assert (second.path / name).stat().st_ino != (first.path / name).stat().st_ino
    load_checkpoint(second.path, run.host_states, {})
    run.close()
