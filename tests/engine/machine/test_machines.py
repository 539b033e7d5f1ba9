"""Known machines: their figures and sources, the names by which they are found, and the rates
estimated for them.
"""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace

import pytest

from engine.config.optimizers import ADAMW, OPTIMIZERS
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.machine import known_machines as known
from engine.machine.gpus import GpuInfo
from engine.machine.known_machines import (
    known_machine,
    known_rates,
    machines,
    named_machine,
    with_figures,
)
from engine.machine.read_machine import Machine
from engine.paths import PROGRAM_ROOT
from engine.planning.fit import choose as choosing
from engine.planning.fit.choose import choose
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.fit.job import Job, Target
from engine.planning.fit.simulate_step import predicted_seconds
from engine.runtime.optimizer import host_threads
from engine.text import GIB, MIB
from tests.support.chosen import big_shape

BY_NAME = {entry.name: entry for entry in machines()}


def driven(driver: str, gib: float, cores: int = 16, **gpu) -> Machine:
    """A real machine, as the driver would describe its card."""
    total = round(gib * GIB)
    return Machine(
        cpu_name="Some CPU",
        cpu_cores=cores,
        ram_total=64 * GIB,
        ram_limit=64 * GIB,
        ram_available=60 * GIB,
        gpus=(GpuInfo(driver, total, total, **gpu),),
        disk_path="runs",
    )


# ---------------------------------------------------------------------- the file


def test_every_figure_of_every_machine_has_a_source():
    tree = json.loads(known.FILE.read_text(encoding="utf-8"))
    assert len(machines()) >= 25 and len(BY_NAME) == len(machines())
    for values in tree["machines"]:
        figures = {
            "memory_mib",
            "memory_bandwidth",
            "bf16_flops",
            "link",
            "power_watts",
            "ram_gib",
            "cpu_cores",
        }
        figures |= {"best_bf16_flops"} & set(values)
        assert set(values["sources"]) == figures, values["name"]
        assert set(BY_NAME[values["name"]].sources) == figures | {"host_bandwidth"}
    used = {
        source for entry in machines() for origins in entry.sources.values() for source in origins
    }
    assert used == {*tree["sources"].values(), *(host["source"] for host in tree["hosts"].values())}
    assert all(source.startswith(("https://", "an assumption")) for source in used)


@pytest.mark.parametrize("entry", machines(), ids=lambda entry: entry.name)
def test_figures_are_of_the_right_size(entry):
    assert 8_000 < entry.memory_mib < 300_000 and 50 <= entry.power_watts <= 1200
    assert 200e9 < entry.memory_bandwidth < 10e12 and 20e12 < entry.bf16_flops < 3e15
    assert 10e9 < entry.link_bandwidth < 500e9 and 50e9 < entry.host_bandwidth < 600e9
    assert 32 <= entry.ram_gib <= 512 and 8 <= entry.cpu_cores <= 96
    assert entry.accumulate == ("half" if "GeForce" in entry.drivers[0] else "full")
    assert not entry.note or entry.note.endswith(".")
    if entry.link.startswith("PCIe"):
        generation, width = entry.link.removeprefix("PCIe ").split(".0 x")
        assert entry.link_bandwidth == pytest.approx(
            known._pcie_bandwidth(int(generation), int(width)), rel=1e-6
        )
    rates = entry.rates()
    assert all(
        math.isfinite(value) and value > 0
        for name, value in rates.to_dict().items()
        if name not in ("overhead", "link", "network")
    )
    assert rates.matmul < entry.bf16_flops and rates.attention < rates.matmul
    assert rates.h2d < entry.link_bandwidth
    assert rates.h2d_busy <= rates.h2d
    assert rates.d2h_busy <= rates.d2h
    assert rates.adamw_busy <= rates.adamw
    of_update = OPTIMIZERS[ADAMW].update_bytes
    assert of_update * rates.adamw < entry.host_bandwidth
    touches = 2 if entry.unified else 1
    at_once = of_update * rates.adamw_busy + touches * (rates.h2d_busy + rates.d2h_busy)
    assert at_once < entry.host_bandwidth


# ---------------------------------------------------------------------- names


@pytest.mark.parametrize(
    "name, found",
    [
        ("RTX 4090", "RTX 4090"),
        ("nvidia geforce rtx-4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("3090", "RTX 3090"),
        ("3090ti", "RTX 3090 Ti"),
        ("3060", "RTX 3060 12GB"),
        ("h200", "H200"),
        ("A6000", "RTX A6000"),
        ("l4", "L4"),
        ("A10", "A10"),
        ("H100 80GB", "H100 SXM"),
        ("h100 pcie", "H100 PCIe"),
        ("GH200 480GB", "GH200 96GB"),
        ("pro 6000 blackwell", "RTX PRO 6000 Blackwell"),
        ("GB10", "GB10"),
    ],
)
def test_names_that_people_use(name, found):
    assert named_machine(name, 128).gpus[0].name == BY_NAME[found].drivers[0]


@pytest.mark.parametrize(
    "name", [entry.name for entry in machines()] + [d for e in machines() for d in e.drivers]
)
def test_every_own_name_finds_its_machine(name):
    entry = next(e for e in machines() if name == e.name or name in e.drivers)
    assert known._matches(known._plain(name)) == [entry]


@pytest.mark.parametrize(
    "name, says",
    [
        ("RTX 9999", "'RTX 9999' is not a known machine; known are RTX 3060 12GB, "),
        ("", "'' is not a known machine"),
        ("H100", "'H100' could be H100 PCIe or H100 NVL or H100 SXM; name one of them."),
        ("nvidia", "'nvidia' is not a known machine"),
    ],
)
def test_a_name_that_is_not_that_of_one_card_is_refused(name, says):
    with pytest.raises(ConfigError, match="^--machine: ") as error:
        named_machine(name)
    assert says in str(error.value) and str(error.value).count("\n") == 0


def test_ram_is_what_is_given_or_what_is_typical_and_then_a_note_says_so():
    given, typical = named_machine("RTX 4090", 128), named_machine("RTX 4090")
    assert (given.ram_total, given.ram_available, given.notes) == (128 * GIB, 126 * GIB, ())
    assert typical.ram_total == 64 * GIB and typical.cpu_cores == 16
    assert typical.notes == (
        "RAM was not given: 64 GiB are assumed, as in a desktop with two channels of DDR5-5600; "
        "--ram-gib sets another.",
    )
    assert typical.gpus[0].total == 24564 * MIB and typical.gpus[0].free < typical.gpus[0].total
    assert with_figures(typical, gpu_gib=16).notes == typical.notes
    with pytest.raises(ConfigError, match="--ram-gib: nan is not a size"):
        named_machine("RTX 4090", math.nan)


def test_what_is_not_supported_says_why_and_has_no_rates():
    refused = [entry for entry in machines() if not entry.supported]
    assert {entry.name for entry in refused} == {"MI300X", "V100 32GB"}
    for entry in refused:
        machine = entry.machine(128)
        assert machine.notes == (entry.note,)
        assert "not supported" in entry.note
        assert known_rates(machine) is None


def test_where_host_and_device_share_one_memory_both_fit_into_it():
    machine = with_figures(named_machine("GB10", 100), ram_gib=100)
    assert machine.ram_total + machine.gpus[0].total == 100 * GIB
    assert machine.gpus[0].total == 25 * GIB
    assert any("share one memory" in note for note in machine.notes)
    assert known_machine(machine) is BY_NAME["GB10"]
    assert BY_NAME["GB10"].rates().h2d < BY_NAME["GH200 96GB"].rates().h2d


# ---------------------------------------------------------------------- rates


@pytest.mark.parametrize(
    "driver, gib, found",
    [
        ("NVIDIA GeForce RTX 4090", 23.99, "RTX 4090"),
        ("NVIDIA H100 80GB HBM3", 79.65, "H100 SXM"),
        ("NVIDIA H100 PCIe", 79.65, "H100 PCIe"),
        ("NVIDIA H200", 140.4, "H200"),
        ("NVIDIA A100-SXM4-80GB", 80, "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", 39.6, "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", 79.3, "A100 80GB PCIe"),
        ("NVIDIA RTX 6000 Ada Generation", 44.99, "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 3090", 24, "RTX 3090"),
        ("NVIDIA GeForce RTX 3090 Ti", 23.99, "RTX 3090 Ti"),
        ("NVIDIA L4", 22.5, "L4"),
        ("NVIDIA A10", 22.5, "A10"),
        ("NVIDIA GH200 144G HBM3e", 143.4, "GH200 144GB"),
    ],
)
def test_a_card_is_known_by_what_the_driver_calls_it(driver, gib, found):
    assert known_machine(driven(driver, gib)) is BY_NAME[found]


@pytest.mark.parametrize(
    "driver, gib",
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16),
        ("NVIDIA A10G", 22.5),
        ("NVIDIA GeForce RTX 3060", 8),
        ("NVIDIA L40", 45),
        ("NVIDIA GeForce RTX 3080", 12),
        ("NVIDIA H200 MIG 1g.18gb", 16),
        ("NVIDIA H200", 16),
        ("NVIDIA GPU", 24),
        ("", 24),
    ],
)
def test_other_cards_are_not_taken_for_known_ones(driver, gib):
    assert known_machine(driven(driver, gib)) is None and known_rates(driven(driver, gib)) is None


def test_without_a_card_there_are_no_rates():
    assert known_rates(replace(driven("NVIDIA H200", 140.4), gpus=())) is None


def test_the_own_bus_and_cores_of_a_machine_count():
    typical = known_rates(driven("NVIDIA GeForce RTX 4090", 24))
    narrow = known_rates(
        driven("NVIDIA GeForce RTX 4090", 24, pcie_generation_max=4, pcie_width_max=8)
    )
    few = known_rates(driven("NVIDIA GeForce RTX 4090", 24, cores=4))
    assert typical == BY_NAME["RTX 4090"].rates()
    assert (narrow.h2d, narrow.matmul) == (pytest.approx(typical.h2d / 2), typical.matmul)
    assert few.adamw < typical.adamw and few.h2d == typical.h2d


def test_faster_cards_have_faster_rates():
    def falling(figure: str, *names: str) -> bool:
        values = [getattr(BY_NAME[name].rates(), figure) for name in names]
        return all(first > second for first, second in itertools.pairwise(values))

    assert falling(
        "matmul",
        "B200",
        "H200",
        "H100 PCIe",
        "A100 80GB",
        "RTX 5090",
        "RTX 4090",
        "RTX 3090",
        "RTX 3060 12GB",
    )
    assert falling(
        "device_memory",
        "B200",
        "H200",
        "H100 SXM",
        "A100 80GB",
        "RTX 5090",
        "RTX 4090",
        "RTX 3090",
        "GB10",
    )
    assert falling("h2d", "GH200 96GB", "H100 SXM", "A100 80GB", "RTX 4060 Ti 16GB")
    assert falling("adamw", "H100 PCIe", "H200", "A100 80GB", "RTX 4090")


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (7, 7), (8, 6), (16, 14), (64, 32)])
def test_threads_are_those_of_the_kernels(cores, threads, monkeypatch):
    monkeypatch.setattr(host_threads, "usable_cores", lambda: cores)
    assert known.threads_of(cores) == host_threads.default_threads() == threads


@pytest.mark.parametrize(
    "threads, measured", [(1, 0.88e9), (2, 1.7e9), (4, 2.9e9), (8, 4.1e9), (14, 4.8e9)]
)
def test_adamw_of_the_h200s_host_is_as_it_was_measured(threads, measured, monkeypatch):
    monkeypatch.setattr(known, "threads_of", lambda cores: threads)
    assert BY_NAME["H200"].rates().adamw == pytest.approx(measured, rel=0.12)


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
@pytest.mark.parametrize("rows, measured", [(148, 11.2), (64, 5.04), (16, 1.77)])
def test_steps_of_the_h200_are_predicted_within_a_tenth(rows, measured, monkeypatch):
    """7.6B, rows of 1,024 tokens, 128 GiB of RAM: seconds of docs/performance.md and its log. The
    plan with which 32 rows were measured had gradients in their accumulators, and is none any more.
    """
    monkeypatch.setattr(choosing, "compiler_problem", lambda: "")
    machine, shape = named_machine("H200", 128), big_shape()
    rates = known_rates(machine)
    config = TrainConfig.from_dict(
        {
            "model": {"source": "m"},
            "data": {"source": "d", "max_seq_len": 1024, "packing": False},
            "train": {"batch_size": rows},
            "engine": {"device": "cuda", "states": "host"},
        }
    )
    target = Target("cuda", machine.gpus[0].free, machine.ram_available, rates)
    chosen = choose(Job(shape, config, 1024), target)
    micro_batch = MicroBatch(chosen.micro_batch_size, 1024)
    seconds = predicted_seconds(shape, chosen.choices, rates, micro_batch, "cuda")
    assert seconds == pytest.approx(measured, rel=0.1)


def test_machines_are_known_without_torch():
    program = (
        "import sys; from engine.machine.known_machines import known_rates, machines, "
        "named_machine\nknown_rates(named_machine('H200')); print(len(machines()), 'torch' in "
        "sys.modules, 'numba' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=PROGRAM_ROOT, capture_output=True, text=True
    )
    assert done.stdout.split() == [str(len(machines())), "False", "False"], done.stderr
