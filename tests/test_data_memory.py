"""Memory for a data set does not grow with its tokens: these stay on disk when they are made and when they are found."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PREPARE = """
import json, resource, sys
from engine.config import DataConfig
from engine.data import batches, prepare_data
from tests import data_tokenizers as made

data = prepare_data(DataConfig(sys.argv[1], max_seq_len=512), made.byte_level_tokenizer(made.CHATML), 1,
                    processes=int(sys.argv[2]))
for step in range(1, 20):
    batches(data.train, 8, 8, 1, True, step)
print(json.dumps({"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10, "cached": data.summary["cached"],
                  "tokens": data.train.tokens, "print": data.fingerprint, "rows": len(data.train)}))
"""


def prepared(path, processes=0) -> dict:
    out = subprocess.run([sys.executable, "-c", PREPARE, str(path), str(processes)], stdout=subprocess.PIPE, check=True)
    return json.loads(out.stdout)


def texts(path, megabytes):
    """A text longer than a row, again and again: some hundred thousand characters a batch."""
    with path.open("w") as file:
        for i in range(megabytes * 50):
            file.write(json.dumps({"text": f"{i} hello an one two " + "three four, five. " * 1100}) + "\n")
    return path


@pytest.fixture(scope="module")
def small_and_large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    return texts(folder / "small.jsonl", 3), texts(folder / "large.jsonl", 14)


def test_memory_does_not_grow_with_the_tokens(small_and_large):
    small, large = small_and_large
    few, many = prepared(small), prepared(large)
    grown = 5 * (many["tokens"] - few["tokens"])
    assert grown > 50e6 and not many["cached"]
    assert many["peak"] - few["peak"] < grown / 4
    again = prepared(large)
    assert again["cached"] and again["print"] == many["print"] and again["peak"] - few["peak"] < grown / 4


def test_memory_does_not_grow_where_other_processes_tokenise(small_and_large):
    small, large = small_and_large
    few, many = prepared(small, 2), prepared(large, 2)
    assert many["peak"] - few["peak"] < 5 * (many["tokens"] - few["tokens"]) / 4
