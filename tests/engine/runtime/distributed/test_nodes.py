"""Several nodes train together: each has all planes, which stay alike to the bit, or its share of
them. A process that is lost on any of them is told by its rank and node.
"""

from __future__ import annotations

import os
import signal
from mmap import PAGESIZE
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import RankError
from engine.runtime.distributed import build_engine, connection
from engine.runtime.host.shared_memory import OpenedMemory, SharedPlanes
from tests.support.planes_of_nodes import trained_planes
from tests.support.rebuilt import rebuilt
from tests.support.sets import slow_but
from tests.support.tiny import random_batches
from tests.support.worker_groups import (
    forked_workers,  # noqa: F401  a fixture
    started_group,
    wait_for_end,
)

SWEEP = "it starts one to three processes, for five seconds or more"
CASES = [
    (2, 1, {}),
    (2, 2, {"gpu_resident_units": 3}),
    (2, 2, {}),
    (3, 1, {"gpu_resident_units": 2}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("nodes") / "model"


@pytest.fixture
def planes_of_nodes(monkeypatch) -> list[SharedPlanes]:
    """Returns where the planes of each node are."""
    found: list[SharedPlanes] = []
    plain = build_engine._planes_of_nodes

    def kept(*given) -> list[SharedPlanes]:
        found[:] = plain(*given)
        return [*found]

    monkeypatch.setattr(build_engine, "_planes_of_nodes", kept)
    return found


@pytest.mark.parametrize("case", slow_but(CASES, CASES[:1], SWEEP), ids=str)
def test_nodes_train_what_one_node_trains(model, planes_of_nodes, case):
    """Those of one rank each have the bits of one node with as many ranks but for the norm, which
    is added up otherwise, and clips nothing here.
    """
    nodes, ranks, choices = case
    count = 2 * nodes * ranks
    with started_group(model, ranks, count, nodes, **choices) as workers:
        workers.train(1, 2)
        workers.engine.close()  # the other nodes let go of their planes, and get them anew
        rebuilt(workers)
        workers.train(3)
        found = trained_planes(workers)
        loss = workers.engine.evaluate(random_batches(5))
        assert workers.host_states.held.step == 3 and not workers.logged
        assert len(planes_of_nodes) == nodes
        for planes in planes_of_nodes[1:]:
            opened = OpenedMemory(planes)
            in_ram = {
                key for key in found if key[0] not in workers.host_states.placement.gpu_resident
            }
            assert {key for key in planes.files if key[1] != "grad"} == in_ram
            for key in in_ram:
                assert bytes(opened.map(key, len(found[key]))) == found[key], key
    with started_group(model, nodes * ranks, count, **choices) as one:
        one.train(1, 2, 3)
        expected = trained_planes(one)
        assert one.engine.evaluate(random_batches(5)) == pytest.approx(loss, rel=1e-5)
    assert found.keys() == expected.keys()
    for key, held in found.items():
        ours, theirs = (np.frombuffer(each, np.float32) for each in (held, expected[key]))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=str(key))


ON_GPU = {"gradients_on_gpu": True, "device_updated_units": ("block 1",), "update_buffers": 1}
DIVIDED = [(2, 1, {}), (2, 2, {"gpu_resident_units": 2}), (3, 1, ON_GPU)]
ROWS = [[1, 2, 3], [4, 5]]


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("case", slow_but(DIVIDED, DIVIDED[:1], SWEEP), ids=str)
def test_nodes_that_divide_planes_have_the_bits_of_one_node(model, planes_of_nodes, case):
    """RAM of each holds its share, also after rank 0 has read all planes and weights, and all
    ranks have evaluated and sampled.
    """
    nodes, ranks, choices = case
    count = 2 * nodes * ranks
    with started_group(model, ranks, count, nodes, nodes_per_replica=nodes, **choices) as workers:
        workers.train(1, 2)
        workers.engine.close()  # the planes stay where they are
        rebuilt(workers)
        workers.train(3)
        found = trained_planes(workers)
        loss = workers.engine.evaluate(random_batches(5))
        logits = workers.engine.last_logits(ROWS)
        held = [ram_of(planes) for planes in planes_of_nodes]
        assert workers.host_states.ram.nbytes <= held[0] and not workers.logged
    with started_group(model, nodes * ranks, count, **choices) as one:
        one.train(1, 2, 3)
        assert trained_planes(one) == found
        assert one.engine.evaluate(random_batches(5)) == loss
        assert torch.equal(one.engine.last_logits(ROWS), logits)
        whole, files = one.host_states.ram.nbytes, len(one.workers.memory.planes.files)
    # A border between two nodes is within a page of each.
    assert len(held) == nodes and whole <= sum(held) <= whole + 2 * nodes * files * PAGESIZE
    assert max(held) <= whole / nodes + 2 * files * PAGESIZE < 0.9 * whole


def ram_of(planes: SharedPlanes) -> int:
    """Returns the bytes of memory that the files of planes take."""
    return sum(512 * os.stat(planes.path(key)).st_blocks for key in planes.files)


@pytest.mark.slow(SWEEP)
def test_planes_that_were_on_a_node_that_is_lost_are_not_read(model):
    with started_group(model, 1, 2, 2, nodes_per_replica=2) as workers:
        (pid,) = workers.pids
        workers.train(1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError, match="^Rank 1 of 2, on .*, is lost: "):
            for number in range(2, 10_000):
                workers.train(number)
        with pytest.raises(RankError, match="^Rank 1 of 2, on .*, is lost: "):
            trained_planes(workers)


@pytest.mark.parametrize("rank", slow_but([1, 2, 3], [], SWEEP))
def test_a_process_of_any_node_that_is_killed_is_told_and_all_others_end(model, rank):
    with started_group(model, 2, 4, 2) as workers:
        pids = workers.pids
        workers.train(1)
        os.kill(pids[rank - 1], signal.SIGKILL)
        with pytest.raises(RankError) as error:
            for number in range(2, 10_000):
                workers.train(number)
        wait_for_end(*pids)
    found = str(error.value)
    assert found.startswith(f"Rank {rank} of 4, on {os.uname().nodename}, is lost: its process or ")
    assert "\n" not in found


@pytest.mark.slow(SWEEP)
def test_a_process_of_another_node_that_hangs_is_lost_once_it_was_silent(model, monkeypatch):
    """Nobody on this node can end it, and gloo waits for it without an end."""
    monkeypatch.setattr(connection, "SILENT_SECONDS", 3.0)
    with started_group(model, 1, 2, 2) as workers:
        (pid,) = workers.pids
        workers.train(1)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(RankError, match="^Rank 1 of 2, on .*, is lost: it has been silent fo"):
            for number in range(2, 10_000):
                workers.train(number)
        os.kill(pid, signal.SIGKILL)  # its connection ends it, once it goes on
        wait_for_end(pid)
