"""`launch.py check --nodes` says what each of several nodes takes, and what passes between them."""

from __future__ import annotations

import json
import re
import shlex

import pytest

import launch
from engine.paths import PROGRAM_ROOT
from engine.text import GIB
from tests.support.bad_commands import bad

ASKED = ("check", "--model", "Qwen/Qwen2.5-7B", "--set", "data.max_seq_len=1024")
ROWS = ("--set", "train.batch_size=128", "--machine", "2 x RTX 4090", "--gpus", "2")


def test_check_takes_nodes_and_their_network(capsys):
    for way, words in (("replicate", "copies"), ("shard", "shares")):
        asked = (*ASKED, *ROWS, "--nodes", "2", "--set", f"engine.across_nodes={way}")
        assert launch.main([*asked, "--network-gbits", "200", "--ram-gib", "256"]) == 0
        text = capsys.readouterr().out
        assert "Each of 2 nodes takes so much; the disk is that of the first." in text
        assert f"\n  2 nodes, with {words} of weights and moments, of 2 GPUs, and on each" in text
        assert " over the network, at 200 Gbit/s\n" in text
        assert ("divided among 2 nodes" in text) == (way == "shard")


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_what_one_node_cannot_hold_is_divided_among_two(capsys):
    small = (*ASKED, *ROWS, "--ram-gib", "64", "--json")
    found = []
    for more in ((), ("--nodes", "2")):
        code = launch.main([*small, *more, "--set", "engine.states=host"])
        found.append((code, json.loads(capsys.readouterr().out)))
    (alone, one), (together, two) = found
    assert (alone, one["verdict"]) == (1, "does_not_fit")
    assert together == 0 and two["choices"]["nodes_per_replica"] == two["nodes"] == 2
    # In a step the two nodes exchange what they lack of weights and sums; 7.6 billion parameters.
    assert 7.6e9 * 4 / 2 < two["between"]["received_by_node"] < 7.7e9 * 8


def test_nodes_that_are_none_and_a_network_of_one_are_refused(capsys):
    assert "'0' is no number of nodes; give 1 or more" in bad(capsys, *ASKED, "--nodes=0")
    found = bad(capsys, *ASKED, "--nodes=2", "--network-gbits=fast")
    assert "'fast' is no rate in Gbit/s; give a number above 0" in found
    found = bad(capsys, *ASKED, "--network-gbits=100")
    assert "--network-gbits: one node has no network; add --nodes." in found
    for more in ((), ("--table",)):
        found = bad(capsys, "check", "--nodes=2", *more)
        assert "--nodes: a report of one job has several nodes; name a preset" in found


def test_the_page_has_the_figures_of_its_command(capsys):
    page = (PROGRAM_ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python launch.py (check .* --nodes .*)$", page, re.MULTILINE)
    assert launch.main([*shlex.split(command), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = re.findall(r"^\| 8 \| 400 \| 8 \|(.*)\|$", page, re.MULTILINE)
    figures = [float(re.sub(r"[^\d.]", "", cell)) for cell in row.split("|")]
    time, between = found["time"], found["between"]
    tflops = time["flops_per_step"] / time["step_seconds"] / 64 / 1e12
    computed = [
        *(found["host"]["total"] / GIB, found["gpu"]["total"] / GIB),
        *(between["received_by_node"] / 1e9, between["collective_seconds"], time["step_seconds"]),
        *(time["tokens_per_second"], tflops, between["compute_waits"]),
    ]
    assert figures == pytest.approx(computed, rel=0.01, abs=0.05)
