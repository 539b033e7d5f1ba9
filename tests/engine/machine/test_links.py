"""Machines with several GPUs are known or thought of, with the link between their cards."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine import rates as kept
from engine.machine.device import gpu_count, rates_of, with_link
from engine.machine.known_machines import FILE, known_rates, named_machine
from engine.machine.link_rates import ASSUMED_LINK
from engine.machine.rates import Rates
from engine.machine.several_gpus import (
    PEER_LINK,
    link_of,
    machines_with_several,
    named_with_several,
    rates_with_link,
)
from engine.text import GIB

CONFIG = TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})


def test_the_machines_of_the_file_have_their_own_hosts():
    names = [several.name for several in machines_with_several()]
    assert names == ["4 x RTX 3090", "2 x RTX 4090", "8 x H100 SXM", "8 x H200"]
    hosts = json.loads(FILE.read_text(encoding="utf-8"))["hosts"]
    words = {host["words"]: host["memory_bandwidth"] for host in hosts.values()}
    for several in machines_with_several():
        machine = named_with_several(several.name)
        assert len(machine.gpus) == several.gpus and not machine.here
        assert machine.ram_total == several.card.ram_gib * GIB
        assert machine.cpu_cores == several.card.cpu_cores
        assert words[several.card.host] == several.card.host_bandwidth
        assert any(several.card.host in note for note in machine.notes)
        assert machine.notes[-1].startswith(f"Each of the {several.gpus} GPUs is assumed to")
        assert rates_with_link(machine).link == link_of(several.card).bandwidth


@pytest.mark.parametrize(
    "name, gpus, link",
    [
        ("2 x RTX 4090", 2, ASSUMED_LINK),
        ("2x4090", 2, ASSUMED_LINK),
        ("3 × A6000", 3, PEER_LINK),
        ("8 x h200", 8, 269e9),
        ("2 x A100 80GB", 2, 179e9),
        ("1 x RTX 4090", 1, 0.0),
        ("RTX 4090", 1, 0.0),
    ],
)
def test_names_say_how_many_cards_a_machine_has(name, gpus, link):
    machine = named_with_several(name, 200)
    assert len(machine.gpus) == gpus and machine.ram_total == 200 * GIB
    assert rates_of(CONFIG, machine).link == pytest.approx(link, rel=0.01)


@pytest.mark.parametrize(
    "name, says", [("0 x 4090", "0 GPUs are not 1 to 64"), ("2 x 9999", "is not a known machine")]
)
def test_names_of_no_machine_are_refused(name, says):
    with pytest.raises(ConfigError, match=f"^--machine: .*{says}"):
        named_with_several(name)


def test_several_cards_share_the_host_that_is_typical_for_them():
    one, eight = named_machine("H200"), named_with_several("8 x H200")
    found = rates_with_link(eight)
    assert found.adamw > 1.5 * known_rates(one).adamw  # two sockets
    assert replace(found, link=0.0).matmul == known_rates(one).matmul
    # No typical host is known for three of them.
    assert replace(rates_with_link(named_with_several("3 x H200")), link=0.0) == known_rates(one)
    assert rates_with_link(one) == known_rates(one)


def test_a_link_that_was_measured_counts():
    two = named_with_several("2 x H200")
    rates = known_rates(two)
    assert with_link(rates, two).link == link_of(machines_with_several()[-1].card).bandwidth
    measured = replace(rates, link=123e9)
    assert with_link(measured, two) == measured
    assert with_link(rates, named_machine("H200")) == rates
    unknown = replace(two, gpus=(replace(two.gpus[0], name="Some card"),) * 2)
    assert with_link(rates, unknown).link == ASSUMED_LINK


def test_rates_that_were_stored_before_there_were_links_are_read(monkeypatch, tmp_path):
    monkeypatch.setattr(kept, "rates_file", lambda: tmp_path / "rates.json")
    rates = known_rates(named_machine("H200"))
    kept.store_rates("a card", rates)
    assert kept.stored_rates("a card") == rates
    tree = json.loads((tmp_path / "rates.json").read_text(encoding="utf-8"))
    (values,) = tree.values()
    del values["link"]
    (tmp_path / "rates.json").write_text(json.dumps(tree), encoding="utf-8")
    assert kept.stored_rates("a card") == rates
    assert Rates.from_dict(rates.to_dict() | {"link": 5.0}).link == 5.0


def test_a_run_on_the_cpu_has_no_gpus():
    two = named_with_several("2 x RTX 4090")
    assert gpu_count(CONFIG, two) == 2
    assert gpu_count(CONFIG.with_values({"engine.device": "cpu"}), two) == 0
