"""Reading a checkpoint takes little memory beside the planes, in whatever dtype it is stored."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.model.build.library import no_progress_bars
from engine.model.build.measure_shape import shape_of
from engine.model.build.pretrained_files import load_config
from engine.model.hub.dequantize import QuantizedTensor
from engine.paths import PROGRAM_ROOT
from engine.planning.shape.read_ahead import most_read_ahead_bytes
from engine.text import MIB
from engine.training.weights import mmap_reader
from engine.training.weights.mmap_reader import MmapReader
from engine.training.weights.weights import reading_bytes
from tests.support.folders import make_model
from tests.support.pickled_folders import pickle_weights
from tests.support.quantized_folders import quantize_to_fp8, quantize_to_mxfp4
from tests.support.sets import slow_but
from tests.support.tiny import tiny_config

SHAPES = {
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 20}
    | {"num_experts": 16, "num_experts_per_tok": 2},
    "gpt_oss": {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 20}
    | {"num_local_experts": 16, "num_experts_per_tok": 2},
}
"""Models of some 60 million parameters, in about 20 blocks."""
WIDE = {"hidden_size": 64, "intermediate_size": 96}
MEASURE = """
import json, sys
from pathlib import Path
from engine.training.weights.weights import load_pretrained
from engine.config.settings import ModelConfig
from engine.runtime.host.host_states import HostStates
from engine.machine.cgroups import give_back_free_memory
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config
from engine.training.loop.memory_watch import PeakMemory, _status

def taken(source):
    model = build_model(load_config(source), ModelConfig(source=source))
    states = HostStates(model.layouts, model.dtype, threads=1)
    states.allocate_weights()
    give_back_free_memory()
    before, peak = _status("VmRSS"), PeakMemory()
    load_pretrained(model, source, states)
    found = peak.read() - before
    states.close()
    return found

warm, *sources = sys.argv[1:]
taken(warm)
print(json.dumps([taken(source) for source in sources]))
"""
"""It prints the bytes that reading each checkpoint took, after another one was read: by then, the
library is loaded and kernels are compiled.
"""
STORED = (torch.float16, torch.bfloat16, torch.float32)


def large_model(family: str) -> torch.nn.Module:
    """A model of one of SHAPES."""
    with torch.device("meta"):
        plain = AutoModelForCausalLM.from_config(tiny_config(family, **SHAPES[family]))
    plain = plain.to_empty(device="cpu")
    for parameter in plain.parameters():
        parameter.data.fill_(0.5)
    return plain


def taken_by(folders: list[str]) -> list[int]:
    """The bytes that reading each folder takes beside the planes, but for the first, which warms
    up.
    """
    command = [sys.executable, "-c", MEASURE, *folders]
    done = subprocess.run(command, cwd=PROGRAM_ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "family", slow_but(SHAPES, {"qwen3_moe"}, "it is another layout of experts")
)
def test_a_real_load_takes_less_than_the_bound_and_far_less_than_a_copy(family, tmp_path):
    plain = large_model(family)
    folders = [str(make_model(tmp_path / "small", family, torch.float16))]
    with no_progress_bars():
        for dtype in STORED:
            folders.append(str(tmp_path / str(dtype)))
            plain.to(dtype).save_pretrained(folders[-1], max_shard_size="40MB")
    folders.append(str(shutil.copytree(folders[-1], tmp_path / "pickled")))
    pickle_weights(Path(folders[-1]))
    measured = taken_by(folders)
    model = build_model(load_config(folders[-1]), ModelConfig(source=folders[-1]))
    bound, copy = reading_bytes(model), 4 * model.parameter_count
    assert bound == most_read_ahead_bytes(shape_of(model).read_ahead_numel)
    for how, took in zip((*STORED, "pickled"), measured, strict=True):
        figures = f"{how}: {took / MIB:.0f}, {bound / MIB:.0f} and {copy / MIB:.0f} MiB"
        assert took < bound < copy / 3, figures


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "family, quantize",
    [("qwen3_moe", quantize_to_fp8), ("gpt_oss", quantize_to_mxfp4)],
)
def test_dequantizing_takes_less_than_the_bound(family, quantize, tmp_path):
    folders = [
        str(make_model(tmp_path / "small", family, **WIDE)),
        str(tmp_path / "large"),
    ]
    with no_progress_bars():
        large_model(family).bfloat16().save_pretrained(folders[1])
    for folder in folders:
        quantize(Path(folder))
    (took,) = taken_by(folders)
    model = build_model(load_config(folders[1]), ModelConfig(source=folders[1]))
    bound, copy = reading_bytes(model), 4 * model.parameter_count
    figures = f"{took / MIB:.0f}, {bound / MIB:.0f} and {copy / MIB:.0f} MiB"
    assert took < bound < copy / 3, figures


def test_memory_of_dequantized_weights_is_given_back(monkeypatch):
    """They take more than the tensors that they are made of, and count like these."""
    given_back = []
    monkeypatch.setattr(mmap_reader, "give_back_free_memory", lambda: given_back.append(True))

    class Doubled(QuantizedTensor):
        def decoded(self, views):
            return views[0].double()

    reading, least = MmapReader(), mmap_reader._LEAST_BYTES
    stored = Doubled("weight", (torch.zeros(least // 8),))  # half of the bytes that are waited for
    tensor = reading.read(stored)
    assert tensor.nbytes == least
    reading.drop(tensor.data_ptr())
    assert given_back == [True]


def test_only_pages_of_files_are_dropped():
    reading, numbers = MmapReader(), torch.arange(1 << 20)
    same = reading.read(numbers)
    reading.drop(same.data_ptr())
    assert same.data_ptr() == numbers.data_ptr()
    assert torch.equal(numbers, torch.arange(1 << 20)), "memory that is no file keeps its values"
