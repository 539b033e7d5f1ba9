"""RAM does not grow with the number of lengths that rows have, in bf16 on the CPU, where each
length needs kernels of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from engine.machine.primitive_cache import KEPT_BYTES, KEPT_KERNELS, bound_kept_kernels
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import ForecastChecked, MemorySampled
from engine.runs.record.following import replay
from tests.support.folders import WORDS, make_config, make_model

CAPACITIES = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "DNNL_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
)
STEPS = 120
WARM = 20
PROGRAM = "import sys, launch; sys.exit(launch.main(sys.argv[1:]))"


def clear(monkeypatch) -> None:
    for name in CAPACITIES:
        monkeypatch.delenv(name, raising=False)


def test_the_caches_are_bounded(monkeypatch):
    clear(monkeypatch)
    bound_kept_kernels()
    assert [os.environ.get(name) for name in CAPACITIES] == [
        str(KEPT_KERNELS),
        None,
        str(KEPT_KERNELS),
    ]


@pytest.mark.parametrize("name", CAPACITIES)
def test_what_the_user_has_set_is_kept(monkeypatch, name):
    clear(monkeypatch)
    monkeypatch.setenv(name, "7")
    bound_kept_kernels()
    assert os.environ[name] == "7"
    of_onednn = [os.environ[each] for each in CAPACITIES[:2] if each in os.environ]
    assert len(of_onednn) == 1, "oneDNN would take the first of two names"


def rows_of_many_lengths(path: Path) -> None:
    """Each of the rows has another length, in no order."""
    lengths = [*range(16, 16 + STEPS)]
    random.Random(0).shuffle(lengths)
    texts = [" ".join(WORDS[place % len(WORDS)] for place in range(size)) for size in lengths]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.mark.slow("a process trains 120 steps, for ten seconds")
def test_rows_of_many_lengths_take_no_more_ram(tmp_path, monkeypatch):
    if "avx512" not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip("oneDNN has no kernels for bf16 here")
    clear(monkeypatch)
    make_model(
        tmp_path / "model",
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        max_position_embeddings=256,
    )
    rows_of_many_lengths(tmp_path / "data.jsonl")
    changes = {
        "model.dtype": "bfloat16",
        "data.max_seq_len": 160,
        "data.eval_fraction": 0.0,
        "train.steps": STEPS,
        "train.batch_size": 1,
        "train.micro_batch_size": 1,
        "output.checkpoint": "none",
    }
    preset = tmp_path / "preset.yaml"
    make_config(tmp_path, **changes).save(preset)
    arguments = ["train", str(preset), "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=PROGRAM_ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    events = [record.event for record in replay(folder / "events.jsonl")]
    samples = [event for event in events if isinstance(event, MemorySampled)]
    warm = [event.host_rss for event in samples if event.step >= WARM]
    assert len(warm) > 1 and samples[-1].step > STEPS // 2
    grown = max(warm) - warm[0]
    # Kernels of 100 lengths would take more than 500 MiB.
    assert grown < KEPT_BYTES, f"{grown >> 20} MiB"
    last = [event for event in events if isinstance(event, ForecastChecked)][-1]
    host = last.quantities["host_bytes"]
    assert abs(host["error"]) < 0.05, host
