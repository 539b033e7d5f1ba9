"""Figures in the documents are those of the program: limits and defaults are read from the code,
and predictions are those that `launch.py check` makes now.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import launch
from app.session.run_list import ORDERS
from app.verdict import divergence, learning, memory_rules, speed
from engine.config.optimizers import BLOCK, SMALL
from engine.machine import disk_rates
from engine.machine.known_machines import machines
from engine.paths import PROGRAM_ROOT
from engine.planning.fit import checkpoint_sizes, choose, device_memory, fastest
from engine.planning.fit.requirements import TRACKERS_BYTES
from engine.planning.layout.disk_chunks import DISK_CHUNK_NUMEL
from engine.planning.layout.optimizer_states import MAXIMUM_BYTES
from engine.planning.schedule.offloaded_activations import DISK_RINGS
from engine.planning.schedule.offloaded_updates import STATE_RINGS
from engine.planning.shape.catalog import catalog
from engine.planning.shape.sequence_tiling import LONG_ROW, SEQUENCE_CHUNKS
from engine.runs.record import evaluations
from engine.runs.record.event_tables import ROWS
from engine.runs.record.validation import NEWEST_ROWS
from engine.runs.trackers import attached, feed
from engine.runtime.device.block_graphs import MOST_SHAPES
from engine.runtime.optimizer.host_threads import SHARE
from engine.runtime.step.inference_passes import SWEEP_TOKENS
from engine.text import GIB, MIB
from engine.tools.bench import disk_bench
from engine.training.export.export import FILE_BYTES
from engine.training.export.serve_commands import _RANKS, _USUAL_RANK
from engine.training.loop import evaluation, oom_recovery, step_loop

FAMILIES = (PROGRAM_ROOT / "docs" / "families.md").read_text(encoding="utf-8")
TRAINED, REFUSED = (
    float(re.findall(expression, FAMILIES)[0])
    for expression in (r"\*\*(\d+) families train", r"\*\*(\d+) are refused by name")
)
WORDS = {"a": 1, "three": 3, "four": 4, "eight": 8, "ten": 10, "eleven": 11, "thirteen": 13}
BOTH_MOMENTS_BYTES = 8  # of an element, in fp32
DISK_BYTES = disk_rates.DRAINED_BYTES * (1 + disk_bench._ALONE)

STATED: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("README.md", r"tells of (\d+) models and (\d+) machines", (len(catalog()), len(machines()))),
    ("README.md", r"\[(\d+) families\].* train, and (\d+) are refused", (TRAINED, REFUSED)),
    ("precision.md", r"checkpoint of \d+ of the (\d+) families that train", (TRAINED,)),
    ("disk.md", r"keeps; writes (\d+) GB", (round(DISK_BYTES / 1e9),)),
    ("disk.md", r"the bench writes (\d+) GB", (disk_rates.DRAINED_BYTES / 1e9,)),
    ("disk.md", r"assumes (\d+) GB/s each way", (disk_rates.ASSUMED_RATE / 1e9,)),
    ("disk.md", r"drive rated for (\d+) TB", (disk_rates.RATED_BYTES / 1e12,)),
    (
        "disk.md",
        r"chunks of ([\d,]+) elements: (\d+) MiB with fp32",
        (DISK_CHUNK_NUMEL, DISK_CHUNK_NUMEL * BOTH_MOMENTS_BYTES / MIB),
    ),
    ("disk.md", r"in one of (\w+) ring\s+buffers in RAM", (STATE_RINGS,)),
    ("disk.md", r"one of (\w+) ring buffers in RAM, and WRITE", (DISK_RINGS,)),
    ("export.md", r"in files of (\d+) GB", (FILE_BYTES / 1e9,)),
    ("evaluate.md", r"scores up to ([\d,]+) tokens", (SWEEP_TOKENS,)),
    ("export.md", r"rank of (\d+) unasked and of (\d+) at most", (_USUAL_RANK, _RANKS[-1])),
    ("longer.md", r"rows of more than ([\d,]+) tokens", (LONG_ROW,)),
    ("longer.md", r"\*blocks in sequence chunks of ([\d,]+) tokens", SEQUENCE_CHUNKS[:1]),
    ("planes.md", r"chunks of\s+([\d,]+) parameters", (SHARE,)),
    ("planes.md", r"Up to (\d+) such shapes", (MOST_SHAPES,)),
    ("planes.md", r"fewer than ([\d,]+) elements", (SMALL,)),
    (
        "planes.md",
        r"is (\d+) elements of one parameter.*?each element: (\d+) bytes",
        (BLOCK, BLOCK + MAXIMUM_BYTES),
    ),
    (
        "planner.md",
        r"may be (\d+) % slower for more of them, and (\d+) % for the whole",
        ((fastest.GPU_RESIDENT_COST - 1) * 100, (fastest.ALL_GPU_RESIDENT_GAIN - 1) * 100),
    ),
    ("planner.md", r"shorter by (\d+) %", ((1 - choose.KEPT_GRADIENTS_GAIN) * 100,)),
    (
        "planner.md",
        r"more than ([\d,]+) tokens, parts .*? of ([\d,]+) tokens,\s+or else of ([\d,]+)",
        (LONG_ROW, *SEQUENCE_CHUNKS),
    ),
    ("planner.md", r"and ([\d.]+) GiB for NCCL", (device_memory.COLLECTIVE_BYTES / GIB,)),
    ("record.md", r"fills RAM to (\d+) %", (checkpoint_sizes.FILLED_SHARE * 100,)),
    ("record.md", r"of less than (\d+) MiB, the last", (checkpoint_sizes.SMALL_BYTES / MIB,)),
    ("record.md", r"in pieces of (\d+) MiB", (checkpoint_sizes.STAGING_CHUNK_BYTES / MIB,)),
    ("record.md", r"Of more than (\d+), consecutive", (evaluation.MOST_ROW_LOSSES,)),
    ("record.md", r"rows of the newest (\w+)\s", (NEWEST_ROWS,)),
    (
        "record.md",
        r"at most (\d+) in a\s+row and (\d+) in a run",
        (step_loop.MOST_IN_A_ROW, step_loop.MOST_SKIPPED),
    ),
    ("record.md", r"planned anew with less, at most (\w+) times", (oom_recovery.MOST_ATTEMPTS,)),
    ("architecture.md", r"one of fewer than (\w+) steps, begins", (step_loop.LEAST_STEPS,)),
    ("runs.md", r"sorted by (\w+) columns", (len(ORDERS),)),
    ("trackers.md", r"takes up to (\d+) MiB of RAM", (TRACKERS_BYTES / MIB,)),
    ("trackers.md", r"trackers have (\d+) seconds", (attached.FINISH_SECONDS,)),
    ("trackers.md", r"does not answer for (a) minute", (feed.HANGS_SECONDS / 60,)),
    ("verdict.md", r"a snapshot keeps ([\d,]+) rows", (ROWS,)),
    (
        "verdict.md",
        r"median of the last (\d+) steps is above the best median of (\d+) steps by more than "
        r"(\d+) %, ([\d.]+), (\d+) s,",
        (
            divergence.LAST_STEPS,
            divergence.BASE_STEPS,
            divergence.RISE_SHARE * 100,
            divergence.RISE,
            divergence.RISE_NOISES,
        ),
    ),
    (
        "verdict.md",
        r"above the best one by more than (\d+) %, ([\d.]+), (\d+) standard errors",
        (evaluations.RISE_SHARE * 100, evaluations.RISE, evaluations.ERRORS),
    ),
    ("verdict.md", r"\| (\d+) steps, twice the warm-up", (learning.FEWEST_STEPS,)),
    (
        "verdict.md",
        r"(\d+) separate spikes of more than (\d+) s in (\d+) steps, each of at least (\d+)",
        (
            divergence.SPIKES,
            divergence.SPIKE_NOISES,
            divergence.SPIKE_STEPS,
            divergence.SPIKE_LASTS,
        ),
    ),
    ("verdict.md", r"would fill it within (\w+) minutes", (memory_rules.SOON_SECONDS / 60,)),
    (
        "verdict.md",
        r"Waits take (\d+) % of the time, or the median step takes (\d+) % longer",
        (speed.WAITING_SHARE * 100, speed.SLOWER * 100),
    ),
    (
        "verdict.md",
        r"\| (\d+) clean steps of the latest (\d+)",
        (speed.FEWEST_STEPS, speed.LATEST_STEPS),
    ),
)
"""Each has a page, an expression that meets it once, and the numbers of its groups."""


def text_of(page: str) -> str:
    folder = PROGRAM_ROOT if page == "README.md" else PROGRAM_ROOT / "docs"
    return (folder / page).read_text(encoding="utf-8")


def number(text: str) -> float:
    """Returns the number that a page writes in digits or as a word."""
    return WORDS.get(text) or float(text.replace(",", ""))


def test_limits_and_defaults_are_those_of_the_code():
    wrong = []
    for page, expression, numbers in STATED:
        found = re.findall(expression, text_of(page), re.DOTALL)
        groups = [match if isinstance(match, tuple) else (match,) for match in found]
        shown = [tuple(number(group) for group in match) for match in groups]
        if shown != [pytest.approx(numbers)]:
            wrong.append((page, expression, shown, numbers))
    assert wrong == []


def table(page: str, mark: str) -> list[list[str]]:
    """Returns the cells of the rows of a table between the marks of `mark`."""
    text = text_of(page).split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


@dataclass(frozen=True)
class Prediction:
    """What a page says that `check` predicts for a job."""

    arguments: tuple[str, ...]
    said: tuple[str, ...]
    figures: tuple[str, ...]
    """Names of the functions below that write `said`, in order."""


def tokens(report: dict[str, Any]) -> str:
    three_digits = f"{report['time']['tokens_per_second']:.3g}"
    return f"{float(three_digits):,.0f}"


def seconds(report: dict[str, Any]) -> str:
    return f"{report['time']['step_seconds']:.0f} s"


def disk_offloaded_block_inputs(report: dict[str, Any]) -> str:
    return str(report["choices"]["disk_offloaded_block_inputs"])


def gpu(report: dict[str, Any]) -> str:
    return f"{report['gpu']['total'] / GIB:.0f} GiB"


def ram_without_copies(report: dict[str, Any]) -> str:
    host = report["host"]
    copies = sum(item["bytes"] for item in host["items"] if item["name"] == "Checkpoint copies")
    return f"{(host['total'] - copies) / GIB:.0f} GiB"


def planes_bytes(report: dict[str, Any]) -> float:
    items = report["host"]["items"]
    return sum(item["bytes"] for item in items if item["name"] in PLANES)


def planes(report: dict[str, Any]) -> str:
    return f"{planes_bytes(report) / GIB:.1f}"


def bytes_a_parameter(report: dict[str, Any]) -> str:
    return f"{planes_bytes(report) / report['model']['parameters']:.2f}"


def parameters(report: dict[str, Any]) -> str:
    return f"{report['model']['parameters'] / 1e9:.1f}"


def trained(report: dict[str, Any]) -> str:
    return f"{report['model']['trained_parameters'] / 1e9:.2f}"


PLANES = {"weight_high", "weight_low", "exp_avg", "exp_avg_sq", "grad"}
FIGURES = {
    each.__name__: each
    for each in (
        *(tokens, seconds, disk_offloaded_block_inputs, gpu, ram_without_copies),
        *(planes, bytes_a_parameter, parameters, trained),
    )
}
ALL_IN_RAM = ("--set", "engine.states=host")
IN_TEXT = (
    (
        "lora.md",
        r"([\d.]+) of ([\d.]+) billion parameters in Qwen2.5 32B, whose planes take ([\d.]+) GiB",
        ("--model", "Qwen/Qwen2.5-32B", "--method", "lora"),
        ("trained", "parameters", "planes"),
    ),
    (
        "lora.md",
        r"([\d.]+) of ([\d.]+) billion in Llama 3 70B",
        ("--model", "meta-llama/Llama-3.3-70B-Instruct", "--method", "lora"),
        ("trained", "parameters"),
    ),
    (
        "planes.md",
        r"Llama 3.1 8B takes ([\d.]+) bytes a parameter",
        ("--model", "meta-llama/Llama-3.1-8B", "--optimizer", "adamw_8bit", *ALL_IN_RAM),
        ("bytes_a_parameter",),
    ),
    (
        "planes.md",
        r"Qwen2.5 0.5B, which is a third\s+embedding, ([\d.]+)\.",
        ("--model", "Qwen/Qwen2.5-0.5B", "--optimizer", "adamw_8bit", *ALL_IN_RAM),
        ("bytes_a_parameter",),
    ),
)
"""Each has a page, an expression that meets it once, the arguments of `check` for an RTX 4090 with
much RAM, and the figures of its groups.
"""
DISK = "a folder on a disk"
LONG = {
    "131,072 tokens, `engine.gpu_memory_gib=23`": (131_072, "engine.gpu_memory_gib=23"),
    "262,144 tokens, an H200": (262_144,),
    "524,288 tokens, an H200": (524_288,),
    "the same with `train.optimizer=adamw_8bit`": (524_288, "train.optimizer=adamw_8bit"),
    "1,048,576 tokens, an H200, `train.optimizer=adamw_8bit`": (
        1_048_576,
        "train.optimizer=adamw_8bit",
    ),
}


def predictions() -> dict[str, Prediction]:
    """Returns by a name what pages say that `check` predicts."""
    found = {}
    desktop = ("presets/qwen2.5-7b-desktop.yaml",)
    for card, *cells in table("performance.md", "desktops"):
        name = card.partition(" (")[0]
        on_it = ("--machine", name, *(() if name == "GB10" else ("--ram-gib", "64")))
        models = ((), ("--model", "meta-llama/Llama-3.1-8B"))
        for place, shown in enumerate(cells[:4]):
            rows = ("--set", f"train.batch_size={(32, 64)[place % 2]}")
            job = (*desktop, *models[place // 2], *on_it, *rows)
            found[f"desktops, {name}, {place}"] = Prediction(job, (shown,), ("tokens",))
    for ram, on_disk, step in table("disk.md", "block inputs"):
        job = (*desktop, "--machine", "RTX 4090", "--ram-gib", ram.removesuffix(" GiB"))
        job = (*job, "--set", "train.batch_size=512", "--set", f"engine.disk={DISK}")
        found[f"block inputs, {ram}"] = Prediction(
            job, (on_disk, step), ("disk_offloaded_block_inputs", "seconds")
        )
    for words, device, ram, _ in table("longer.md", "long-rows"):
        length, *settings = LONG[words]
        job = ("presets/qwen2.5-7b.yaml", "--machine", "H200", "--ram-gib", "256")
        for setting in (
            "data.packing=false",
            "train.batch_size=1",
            f"data.max_seq_len={length}",
            *settings,
        ):
            job = (*job, "--set", setting)
        found[f"long rows, {words}"] = Prediction(job, (device, ram), ("gpu", "ram_without_copies"))
    for page, expression, job, figures in IN_TEXT:
        (shown,) = re.finditer(expression, text_of(page))
        machine = ("--machine", "RTX 4090", "--ram-gib", "2048", "--disk-gib", "9000")
        found[f"{page}, {job[1]}"] = Prediction((*job, *machine), shown.groups(), figures)
    return found


@pytest.mark.slow("it plans a job, for a second; a prediction of a page is one case")
@pytest.mark.parametrize("name", predictions())
def test_a_prediction_is_what_check_says(capsys, monkeypatch, tmp_path, name):
    asked = predictions()[name]
    # A folder of tests may be in RAM, where no disk is planned with.
    monkeypatch.setattr("engine.machine.offload_folder.mount_of", lambda _folder: None)
    arguments = [each.replace(DISK, str(tmp_path)) for each in asked.arguments]
    launch.main(["check", *arguments, "--json", "--runs-dir", str(Path(tmp_path) / "runs")])
    report = json.loads(capsys.readouterr().out)
    assert tuple(FIGURES[each](report) for each in asked.figures) == asked.said
