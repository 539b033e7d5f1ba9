"""Processes on several nodes that cannot compute one run are refused in a sentence that names the
rank, the node and what differs.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from msgspec.structs import replace

from engine.errors import RankError
from engine.runtime.collectives.rank import RankInfo
from engine.runtime.distributed import launched_group
from engine.runtime.distributed.handshake import handshake, program_digest, why_refused
from engine.runtime.distributed.launched_group import LaunchedGroup, connect_to_rank_zero
from engine.runtime.distributed.messages import Beat, Go, Handshake
from engine.runtime.distributed.shared_secret import VARIABLE
from engine.runtime.distributed.torchrun import read_launched
from tests.support.ports import free_port
from tests.support.worker_groups import SECRET, launched_as

RANK_ZERO = Handshake(
    RankInfo(0, 2, 2),
    "first",
    10,
    "digest",
    {"torch": "2.11", "Python": "3.11"},
    {"train.steps": 8, "data.source": "a"},
)
OTHER = replace(RANK_ZERO, place=RankInfo(3, 2, 2), host_name="second", pid=11)
DIFFERENCES = {
    "has torch 2.10, but rank 0 has 2.11; install the same on every node.": dict(
        versions={"torch": "2.10", "Python": "3.11"}
    ),
    "has torch nothing, but rank 0 has 2.11; install the same on every node.": dict(
        versions={"Python": "3.11"}
    ),
    "has another version of Ramstream than rank 0; bring the same sources to every node.": dict(
        program="older"
    ),
    "was started with train.steps at 9, but rank 0 with 8; use the same preset and command line "
    "on every node.": dict(settings={"train.steps": 9, "data.source": "a"}),
    "was started with train.seed at 3, but rank 0 with null; use the same preset and command line "
    "on every node.": dict(settings={"train.steps": 8, "data.source": "a", "train.seed": 3}),
    "is one of 1 on its node, but the node of rank 0 has 2; give torchrun the same "
    "--nproc-per-node on every node.": dict(place=RankInfo(3, 1, 4)),
    "cannot use its command line: tiny.yaml is not there.": dict(problem="tiny.yaml is not there."),
}


@pytest.mark.parametrize("reported", DIFFERENCES)
def test_what_differs_is_told(reported):
    other = replace(OTHER, **DIFFERENCES[reported])
    third = replace(OTHER, place=RankInfo(1, 2, 2))
    sentence = why_refused(RANK_ZERO, [third, other])
    assert sentence == f"Rank 3 of 4, on second, {reported}"


def test_processes_that_are_alike_are_not_refused():
    assert why_refused(RANK_ZERO, [OTHER, replace(OTHER, place=RankInfo(2, 2, 2), pid=9)]) == ""


def test_the_digest_is_that_of_the_sources(monkeypatch, tmp_path):
    (tmp_path / "engine").mkdir()
    file = tmp_path / "engine" / "a.py"
    file.write_text("1", encoding="utf-8")
    monkeypatch.setattr("engine.runtime.distributed.handshake.PROGRAM_ROOT", tmp_path)
    before = program_digest()
    assert program_digest() == before
    file.write_text("2", encoding="utf-8")
    changed = program_digest()
    file.rename(tmp_path / "engine" / "b.py")
    assert len({before, changed, program_digest()}) == 3


# --------------------------------------------------------------------- finding each other


def gather(monkeypatch, settings: list[dict], nodes: bool = True) -> tuple[object, list]:
    """Lets processes find each other, in threads. Returns what rank 0 gets, and what each of
    the others does. nodes: each is on a node of its own.
    """
    monkeypatch.setattr(launched_group, "FIND_SECONDS", 60)
    monkeypatch.setenv(VARIABLE, SECRET)
    place, port = (
        RankInfo(0, 1, len(settings)) if nodes else RankInfo(0, len(settings)),
        free_port(),
    )
    found: list = [None] * len(settings)

    def come(rank: int) -> None:
        own = place.of(rank)
        try:
            found[rank] = connect_to_rank_zero(
                launched_as(own, port), handshake(own, settings[rank])
            )
        except RankError as error:
            found[rank] = error

    others = [threading.Thread(target=come, args=(rank,)) for rank in range(1, len(settings))]
    for thread in others:
        thread.start()
    try:
        group: object = LaunchedGroup(launched_as(place, port), handshake(place, settings[0]))
    except RankError as error:
        group = error
    for thread in others:
        thread.join()
    return group, found[1:]


@pytest.mark.parametrize("nodes", [True, False])
def test_processes_find_each_other_and_end_with_the_code_of_rank_0(monkeypatch, nodes):
    group, others = gather(monkeypatch, [{}, {}, {}], nodes)
    assert [process.place.rank for process in group.processes] == [1, 2]
    for number, connection in enumerate(others):
        group.processes[number]._monitored.send(Go(number))
        assert next(iter(words(connection))) == Go(number)
    ending = threading.Thread(target=group.end, args=(3,))
    ending.start()
    assert [next(iter(words(each))).code for each in others] == [3, 3]
    for connection in others:
        connection.close()
    ending.join()


def words(connection):
    """Yields what comes, but for signs of life."""
    while True:
        message = connection.receive()
        if not isinstance(message, Beat):
            yield message


def test_all_are_refused_where_one_differs(monkeypatch):
    group, others = gather(monkeypatch, [{"a": 1}, {"a": 1}, {"a": 2}])
    assert str(group).startswith("Rank 2 of 3, on ")
    assert "with a at 2, but rank 0 with 1" in str(group)
    assert [str(each) for each in others] == [str(group)] * 2


def test_settings_are_the_same_when_they_have_passed(monkeypatch):
    """A tuple arrives as a list, and a path as its text."""
    settings = {"a": (1, 2), "b": Path("c"), "d": None, "e": 1e-5, "f": [{"g": True}]}
    group, (connection,) = gather(monkeypatch, [settings, settings], nodes=False)
    assert [process.place.rank for process in group.processes] == [1]
    connection.close()
    group.end(0)


def test_a_rank_that_does_not_come_is_told(monkeypatch):
    monkeypatch.setattr(launched_group, "FIND_SECONDS", 1)
    place, port = RankInfo(0, 2), free_port()
    with pytest.raises(RankError, match="^Rank 1 of 2 has not come within 1 s; check that"):
        LaunchedGroup(launched_as(place, port), handshake(place, {}))


# --------------------------------------------------------------------- what torchrun tells

ENVIRONMENT = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "first",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "a run",
}


def test_the_place_is_read_from_the_environment():
    found = read_launched(ENVIRONMENT)
    assert (found.place.node_rank, found.place.local_rank, found.place.world_size) == (1, 1, 8)
    assert (found.address, found.port, found.has_store) == ("first", 29500, True)
    assert not read_launched(ENVIRONMENT | {"TORCHELASTIC_USE_AGENT_STORE": "False"}).has_store


def test_nodes_with_unequal_numbers_are_refused():
    with pytest.raises(RankError, match="^torchrun has started 8 processes on 3 nodes, 4 of them"):
        read_launched(ENVIRONMENT | {"GROUP_WORLD_SIZE": "3"})
