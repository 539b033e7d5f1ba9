"""A snapshot is one step's state, however its chunks are written, copied and waited for."""

from __future__ import annotations

import threading
import time

import pytest

from engine.errors import CheckpointError
from engine.training.checkpoints import chunk_files, staging
from engine.training.checkpoints.async_writer import AsyncCheckpoint
from engine.training.checkpoints.checkpoint import Contents, write_checkpoint
from engine.training.checkpoints.plane_snapshot import Chunk, Ended, Snapshot
from engine.training.checkpoints.restore import load_checkpoint, newest_checkpoint
from engine.training.checkpoints.staging import StagingBuffers
from tests.support.filled_states import content, names, planes_of
from tests.support.routes import wait_for

pytestmark = pytest.mark.usefixtures("small_chunks")

PATIENCE = 60


@pytest.fixture
def slow_disk(monkeypatch):
    """Every write takes twelve milliseconds, so that updates overtake the disk."""
    write = chunk_files.ChunkFile.write

    def slowly(self, chunk, offset):
        time.sleep(0.012)
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", slowly)


def hold_writing(snapshot, until) -> None:
    """A chunk that a thread has taken to write it is held back until `until(chunk)`. No chunk is
    copied ahead before one is taken: otherwise all may be, and no update would wait.
    """
    take, copy, is_taken = snapshot.next_to_write, snapshot.copy_ahead, threading.Event()

    def copy_then():
        assert is_taken.wait(PATIENCE)
        copy()

    snapshot.copy_ahead = copy_then

    def held():
        try:
            chunk = take()
        finally:
            is_taken.set()
        if chunk is not None:
            wait_for(lambda: until(chunk), PATIENCE)
        return chunk

    snapshot.next_to_write = held


def begin(root, states, snapshot, step: int = 1, told=lambda info: None) -> AsyncCheckpoint:
    contents = Contents(states, {"step": step}, snapshot=snapshot)
    return AsyncCheckpoint(root, step, contents, 2, lambda info, _: told(info))


def update_all(states, snapshot, other) -> None:
    """Changes all planes of one unit after the other, as a step does, to those of `other`."""
    for unit in states.layouts:
        snapshot.protect(unit)
        for plane in planes_of(states):
            states.array(unit, plane)[:] = other.array(unit, plane)


@pytest.mark.parametrize("room", [0, 40_000, 1 << 20], ids=["waits", "both", "copies"])
def test_updates_go_on_and_the_file_is_of_one_step(tmp_path, new_states, slow_disk, room):
    states, memory = new_states(seed=1), StagingBuffers(room)
    held, rooms = content(states), len(memory._free)
    snapshot = Snapshot(states, planes_of(states), memory)
    total = sum(
        states.nbytes(unit, plane) for unit in states.layouts for plane in planes_of(states)
    )
    has_all = room == 1 << 20
    # An update begins before the disk is done. Where all is copied, it waits for no other chunk.
    hold_writing(
        snapshot, lambda _: snapshot.waited_seconds > 0 and not (has_all and snapshot._pending)
    )
    writing = begin(tmp_path, states, snapshot)
    snapshot.arm()
    for seed in (2, 3, 4):
        update_all(states, snapshot, new_states(seed=seed))
    assert writing.wait(PATIENCE)
    path = writing.result().path
    changed = content(states)
    other = new_states(seed=9)
    load_checkpoint(path, other, {})
    assert content(other) == held != changed
    assert (snapshot.copied_bytes > 0) == (room > 0)
    assert snapshot.waited_seconds > 0
    if has_all:
        in_hand = chunk_files.THREADS * staging.CHUNK_BYTES
        assert total - in_hand <= snapshot.copied_bytes <= total
    assert len(memory._free) == rooms, "the room of every copy was given back"
    memory.close()


def test_updates_wait_only_for_what_cannot_be_copied(tmp_path, new_states, slow_disk):
    states, memory = new_states(seed=1), StagingBuffers(60_000)
    rooms, written = len(memory._free), []
    snapshot = Snapshot(states, planes_of(states), memory)
    chunks = len(snapshot._pending)
    tell = snapshot.written
    snapshot.written = lambda chunk: (tell(chunk), written.append(chunk))
    is_full, over = threading.Event(), threading.Event()

    def may_be_written(chunk) -> bool:
        """Copies go to the disk after all updates, and all else once there is no more room."""
        if not memory._free:
            is_full.set()
        return over.is_set() if chunk.room is not None else is_full.is_set()

    hold_writing(snapshot, may_be_written)
    writing = begin(tmp_path, states, snapshot)
    snapshot.arm()
    update_all(states, snapshot, new_states(seed=2))
    on_disk = len(written)
    over.set()
    writing.wait()
    assert 0 < rooms < chunks and on_disk <= chunks - rooms
    memory.close()


def test_the_checksums_are_those_of_a_checkpoint_written_standing_still(tmp_path, new_states):
    states, staging = new_states(seed=1), StagingBuffers(30_000)
    still = write_checkpoint(tmp_path / "still", 1, Contents(states, {"step": 1}), keep=1)
    snapshot = Snapshot(states, planes_of(states), staging)
    writing = begin(tmp_path / "beside", states, snapshot)
    snapshot.arm()
    update_all(states, snapshot, new_states(seed=2))
    writing.wait()
    beside = writing.result()
    for path in still.path.iterdir():
        assert (beside.path / path.name).read_bytes() == path.read_bytes(), path.name


def test_an_update_waits_until_the_step_before_is_applied(new_states):
    states = new_states(seed=1)
    snapshot, done = Snapshot(states, planes_of(states), StagingBuffers(1 << 20)), []
    thread = threading.Thread(target=lambda: done.append(snapshot.protect("embed")))
    thread.start()
    time.sleep(0.05)
    assert not done
    snapshot.arm()
    thread.join(PATIENCE)
    assert done and snapshot.copied_bytes == 12 * states.layouts["embed"].numel


def test_an_update_waits_for_a_copy_that_another_thread_makes(new_states, monkeypatch):
    """A chunk is safe once it is copied, not once somebody has begun to copy it."""
    states, begun, continues, done = new_states(seed=1), threading.Event(), threading.Event(), []
    copy_to = Chunk.copy_to

    def held_up(self, room):
        begun.set()
        assert continues.wait(PATIENCE)
        return copy_to(self, room)

    monkeypatch.setattr(Chunk, "copy_to", held_up)
    snapshot = Snapshot(states, ["exp_avg"], StagingBuffers(staging.CHUNK_BYTES))
    snapshot.arm()
    copying = threading.Thread(target=snapshot.copy_ahead)
    copying.start()
    assert begun.wait(PATIENCE)
    chunks = -(-4 * states.layouts["embed"].numel // staging.CHUNK_BYTES)
    for _ in range(chunks - 1):  # the rest of the unit is in its file already
        snapshot.written(snapshot.next_to_write())
    update = threading.Thread(target=lambda: done.append(snapshot.protect("embed")))
    update.start()
    time.sleep(0.05)
    assert not done
    continues.set()
    for thread in (update, copying):
        thread.join(PATIENCE)
    assert done


def test_a_snapshot_that_is_ended_holds_back_nothing_and_leaves_no_checkpoint(two, new_states):
    root, _ = two
    states = new_states(seed=3)
    snapshot, begun = Snapshot(states, planes_of(states)), threading.Event()
    hold_writing(snapshot, lambda _: begun.set() or snapshot._ended)
    writing = begin(root, states, snapshot, step=3)
    snapshot.arm()
    assert begun.wait(PATIENCE)
    writing.cancel()
    with pytest.raises(Ended):
        writing.result()
    snapshot.protect("head")
    assert names(root) == ["step-1", "step-2"] and newest_checkpoint(root).step == 2


def test_a_disk_that_fails_lets_updates_go_on_and_is_told(two, new_states, monkeypatch):
    root, _ = two
    states = new_states(seed=3)
    write, count = chunk_files.ChunkFile.write, [0]

    def failing(self, chunk, offset):
        count[0] += 1
        if count[0] > 20:
            raise OSError(5, "Input/output error")
        write(self, chunk, offset)

    monkeypatch.setattr(chunk_files.ChunkFile, "write", failing)
    snapshot = Snapshot(states, planes_of(states))
    writing = begin(root, states, snapshot, step=3)
    snapshot.arm()
    update_all(states, snapshot, new_states(seed=4))
    writing.wait()
    with pytest.raises(CheckpointError, match="step 3 cannot be written in .*Input/output"):
        writing.result()
    assert names(root) == ["step-1", "step-2"]


def test_units_are_written_in_the_order_of_updates_and_copies_last(new_states):
    states = new_states(seed=1)
    snapshot = Snapshot(states, planes_of(states), StagingBuffers(1 << 20))
    snapshot.arm()
    first = snapshot.next_to_write()
    assert first.unit == "embed"
    copied = "block.0"
    assert copied in states.layouts
    snapshot.protect(copied)  # copied, so it is no longer urgent
    units = []
    while (chunk := snapshot.next_to_write()) is not None:
        units.append(chunk.unit)
    count = units.count(copied)
    assert count > 1 and units[-count:] == [copied] * count
    in_order = [unit for unit in states.layouts if unit != copied]
    assert units[:-count] == sorted(units[:-count], key=in_order.index)
    assert set(units[:-count]) == set(in_order)
    assert chunk_files.THREADS > 1  # chunks are taken by several chunk_files, in this order


def test_a_chunk_that_cannot_be_copied_is_written_and_keeps_no_room(new_states, monkeypatch):
    states, memory = new_states(seed=1), StagingBuffers(1 << 20)
    rooms, copy_to, fails = len(memory._free), Chunk.copy_to, [True]

    def failing(self, room):
        if fails:
            fails.clear()
            raise MemoryError
        return copy_to(self, room)

    monkeypatch.setattr(Chunk, "copy_to", failing)
    snapshot = Snapshot(states, planes_of(states), memory)
    chunks = len(snapshot._pending)
    snapshot.arm()
    with pytest.raises(MemoryError):
        snapshot.copy_ahead()
    taken = []

    def write():
        while (chunk := snapshot.next_to_write()) is not None:
            taken.append((chunk.unit, chunk.plane, chunk.begin))
            snapshot.written(chunk)
        snapshot.release()

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    writing.join(PATIENCE)
    assert not writing.is_alive() and len(set(taken)) == len(taken) == chunks
    assert len(memory._free) == rooms
    memory.close()


@pytest.mark.parametrize("refused", [1, 2])
def test_a_system_that_refuses_a_thread_holds_back_no_update(two, new_states, monkeypatch, refused):
    """The error is told to the training loop, and the checkpoints before stay."""
    root, _ = two
    states, memory = new_states(seed=3), StagingBuffers(30_000)
    start, started = threading.Thread.start, []

    def refusing(self):
        if self.name == "copy-planes":
            started.append(self)
            if len(started) == refused:
                raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    monkeypatch.setattr("engine.training.checkpoints.async_writer.default_threads", lambda: 8)
    snapshot = Snapshot(states, planes_of(states), memory)
    writing = begin(root, states, snapshot, step=3)
    assert writing.wait(PATIENCE) and len(started) == refused
    with pytest.raises(RuntimeError, match="can't start new thread"):
        writing.result()
    update = threading.Thread(target=lambda: snapshot.protect("embed"), daemon=True)
    update.start()
    update.join(PATIENCE)
    assert not update.is_alive() and names(root) == ["step-1", "step-2"]
    memory.close()
