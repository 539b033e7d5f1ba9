"""The memory for a data set does not grow with its tokens: they stay on disk, whether new or found
in the cache.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from engine.machine.read_machine import Machine
from engine.model.build.find_shape import shape_from_source
from engine.planning.fit.report import estimate
from tests.support.folders import make_config

PREPARE = """
import json, sys
from pathlib import Path
from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.rows import batches
from engine.data.tokens.tokenize import Execution
from tests.support import data_tokenizers as made

config = DataConfig(sys.argv[1], max_seq_len=512)
tokenizer = made.byte_level_tokenizer(made.CHATML)
data = prepare_data(config, tokenizer, 1, execution=Execution(processes=int(sys.argv[2])))
for step in range(1, 20):
    batches(data.train, 8, 8, step)
# `ru_maxrss` would also count what the process of the tests had when it started this one.
(peak,) = [line.split()[1] for line in Path("/proc/self/status").read_text().splitlines()
           if line.startswith("VmHWM:")]
peak = int(peak) << 10
print(json.dumps({"peak": peak, "cached": data.summary["cached"], "tokens": data.train.tokens,
                  "print": data.fingerprint, "rows": len(data.train)}))
"""


def prepared(path, processes=0) -> dict:
    out = subprocess.run(
        [sys.executable, "-c", PREPARE, str(path), str(processes)],
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(out.stdout)


def texts(path, megabytes):
    """Writes a text longer than a row again and again: some hundred thousand characters per
    batch.
    """
    with path.open("w") as file:
        for i in range(megabytes * 50):
            file.write(
                json.dumps({"text": f"{i} hello an one two " + "three four, five. " * 1100}) + "\n"
            )
    return path


@pytest.fixture(scope="module")
def small_and_large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return texts(folder / "small.jsonl", 6), texts(folder / "large.jsonl", 17)


@pytest.mark.slow("it tokenizes 23 MB, for 15 seconds")
def test_memory_does_not_grow_with_the_tokens(small_and_large):
    small, large = small_and_large
    few, many = prepared(small), prepared(large)
    grown = 5 * (many["tokens"] - few["tokens"])
    assert grown > 50e6 and not many["cached"]
    assert many["peak"] - few["peak"] < grown / 4
    again = prepared(large)
    assert again["cached"]
    assert again["print"] == many["print"]
    assert again["peak"] - few["peak"] < grown / 4


@pytest.mark.slow("it tokenizes 23 MB, for 15 seconds")
def test_memory_does_not_grow_where_other_processes_tokenize(small_and_large):
    small, large = small_and_large
    few, many = prepared(small, 2), prepared(large, 2)
    assert many["peak"] - few["peak"] < 5 * (many["tokens"] - few["tokens"]) / 4


def test_a_data_set_larger_than_memory_fits(tmp_path):
    config = make_config(tmp_path, **{"data.source": str(tmp_path / "large.jsonl")})
    with open(tmp_path / "large.jsonl", "wb") as file:
        file.truncate(50 << 30)
    machine = Machine(
        cpu_name="",
        cpu_cores=2,
        ram_total=8 << 30,
        ram_limit=8 << 30,
        ram_available=8 << 30,
        disk_free=1 << 40,
    )
    report = estimate(config, machine, shape_from_source(config.model))
    assert report.status == "fits"
    (data,) = [item for item in report.host.items if item.name == "Tokenized data"]
    assert data.bytes < (50 << 30) / 10
