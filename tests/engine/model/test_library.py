"""transformers in a program with threads."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.model.build.library import _DefaultDtype, empty_model, hub_is_cut_off, weights_read_by
from engine.model.build.pretrained_files import load_config
from engine.paths import PROGRAM_ROOT
from tests.support.tiny import FAMILIES, tiny_config

AT_ONCE = """
import sys, threading
from engine.config.settings import ModelConfig
from engine.runtime.sampling.generate import end_tokens
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config, load_tokenizer

source, errors = sys.argv[1], []

def attempt(work):
    try:
        work()
    except BaseException as error:
        errors.append(f"{type(error).__name__}: {error}")

def build():
    build_model(load_config(source), ModelConfig(source=source))

tokenizer, config = lambda: load_tokenizer(source), lambda: load_config(source)
works = [tokenizer, build, config, tokenizer, build]
threads = [threading.Thread(target=attempt, args=(work,)) for work in works]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert not errors, errors
"""


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_threads_may_need_it_first_at_the_same_moment():
    """A page makes a preview and a verdict while a run starts."""
    done = subprocess.run(
        [sys.executable, "-c", AT_ONCE, "assets/starter-model"],
        cwd=PROGRAM_ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_empty_model_is_the_librarys_own_without_weights(family, dtype):
    plain = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    empty = empty_model(tiny_config(family), dtype)
    assert empty.config.dtype == plain.config.dtype == dtype
    assert [(name, p.shape, p.dtype, p.device.type) for name, p in empty.named_parameters()] == [
        (name, p.shape, p.dtype, "meta") for name, p in plain.named_parameters()
    ]
    buffers = dict(empty.named_buffers())
    assert buffers.keys() == dict(plain.named_buffers()).keys()
    for name, buffer in plain.named_buffers():
        assert buffers[name].dtype == buffer.dtype and torch.equal(buffers[name], buffer), name


def test_stacks_of_experts_that_a_family_fills_with_zeros_occupy_no_memory():
    """Those of Llama 4 Scout, 2.7 GB in each of its 48 blocks, took minutes to be filled."""
    with _DefaultDtype(torch.bfloat16):
        for stack in (torch.zeros(16, 5120, 16384), torch.zeros((16, 5120, 16384))):
            assert stack.shape == (16, 5120, 16384) and stack.dtype == torch.bfloat16
            assert stack.untyped_storage().nbytes() == 2 and stack[3, 5, 7] == 0
        usual = torch.zeros(4, 8)
        assert usual.is_contiguous() and usual.add_(1).sum() == 32
    config = tiny_config("llama4_text", num_hidden_layers=2, num_local_experts=512)
    config.hidden_size, config.intermediate_size = 1024, 1024
    experts = empty_model(config, torch.bfloat16).model.layers[1].feed_forward.experts
    assert experts.gate_up_proj.is_meta and experts.gate_up_proj.is_contiguous()
    assert experts.gate_up_proj.numel() == 512 * 1024 * 2048 > 1 << 28


def test_building_leaves_other_threads_and_the_process_alone():
    done, seen, register = threading.Event(), set(), torch.nn.Module.register_parameter

    def look():
        while not done.is_set():
            seen.add((torch.get_default_dtype(), torch.ones(1).dtype))

    watcher = threading.Thread(target=look)
    watcher.start()
    builders = [
        threading.Thread(target=empty_model, args=(tiny_config("qwen2"), torch.bfloat16))
        for _ in range(8)
    ]
    for thread in builders:
        thread.start()
    for thread in builders:
        thread.join()
    done.set()
    watcher.join()
    assert seen == {(torch.float32, torch.float32)}
    assert torch.nn.Module.register_parameter is register


def test_weights_are_read_by_the_function_of_their_own_thread(tmp_path):
    """In this thread as they are stored, in another one as the library reads them: in float32."""
    stored = AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float16)
    stored.save_pretrained(tmp_path)
    asked = []

    def read(stored_slice) -> torch.Tensor:
        asked.append(threading.get_ident())
        return stored_slice[...]

    def load(found: list) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        found += [(parameter.dtype, parameter.float()) for parameter in loaded.parameters()]

    here, elsewhere, after = [], [], []
    with weights_read_by(read):
        load(here)
        other = threading.Thread(target=load, args=(elsewhere,))
        other.start()
        other.join()
    load(after)
    assert set(asked) == {threading.get_ident()} and len(asked) == len(here)
    for found, dtype in ((here, torch.float16), (elsewhere, torch.float32), (after, torch.float32)):
        for (own, value), parameter in zip(found, stored.parameters(), strict=True):
            assert own == dtype and torch.equal(value, parameter.float())


def test_a_hub_without_a_name_is_not_asked(monkeypatch):
    """The library would try again for half a minute."""

    def unknown(*_):
        raise socket.gaierror("Temporary failure in name resolution")

    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    monkeypatch.setattr("engine.model.build.library.getproxies", dict)
    monkeypatch.setattr("engine.model.build.library.socket.getaddrinfo", unknown)
    asked = []
    monkeypatch.setattr(
        "transformers.AutoConfig.from_pretrained",
        lambda *_, **given: asked.append(given) or "config",
    )
    assert hub_is_cut_off() and load_config("nobody/nothing") == "config"
    monkeypatch.setattr(
        "engine.model.build.library.getproxies", lambda: {"https": "http://proxy:3128"}
    )
    assert not hub_is_cut_off() and load_config("nobody/nothing") == "config"
    assert [given["local_files_only"] for given in asked] == [True, False]
