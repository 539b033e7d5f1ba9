"""Where memory is too short, every command and the app end with an exit code and one sentence that
says so, and no model is blamed.
"""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from engine.errors import HostMemoryError, ModelError
from engine.machine import short_memory
from engine.machine.short_memory import Work, is_short_of_memory, refuse_little_memory
from engine.model.build import pretrained_files
from engine.paths import PROGRAM_ROOT
from engine.text import MIB
from engine.training.loop.explain import explained
from tests.support.folders import make_config, make_model
from tests.support.ports import free_port


def ended(arguments: list[str], mib: int) -> subprocess.CompletedProcess[str]:
    """A command that may take so much address space."""
    return subprocess.run(
        [sys.executable, PROGRAM_ROOT / "launch.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (mib * MIB, mib * MIB)),
        timeout=120,
    )


def tells_of_memory(done: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("ramstream: ")]
    assert done.returncode in (1, 2) and len(lines) == 1, done
    assert "Traceback" not in done.stderr + done.stdout
    assert "memory" in lines[0].casefold()
    assert "ulimit -v" in lines[0]
    assert "iB of address space" in lines[0]


LIMITS = {"train": (400, 600, 1000, 1100), "check": (400, 600, 800), "app": (400, 500)}


@pytest.mark.parametrize(
    ("command", "mib"), [(c, m) for c, limits in LIMITS.items() for m in limits]
)
def test_little_address_space_is_told_in_one_sentence(tmp_path, command, mib):
    make_config(tmp_path).save(tmp_path / "preset.yaml")
    arguments = [command, tmp_path / "preset.yaml"]
    if command == "app":
        arguments = ["--no-browser", "--port", free_port()]
    if command != "check":
        arguments += ["--runs-dir", tmp_path / "runs"]
    tells_of_memory(ended(arguments, mib))
    assert command != "train" or not (tmp_path / "runs").exists()


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("mib", [1160, 1250, 1400, 1600])
def test_a_run_above_the_least_is_whole_or_tells_of_memory(tmp_path, mib):
    make_config(tmp_path, **{"train.steps": 2}).save(tmp_path / "preset.yaml")
    done = ended(["train", tmp_path / "preset.yaml", "--runs-dir", tmp_path / "runs"], mib)
    if done.returncode:
        tells_of_memory(done)


ERRORS = [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
    RuntimeError("can't start new thread"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 bytes"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("read", ["load_config", "load_tokenizer"])
def test_no_model_is_blamed_for_it(tmp_path, monkeypatch, error, read):
    """Neither if a library wraps it into an error of its own."""
    model = make_model(tmp_path / "model")

    class Auto:
        @staticmethod
        def from_pretrained(*_, **__):
            try:
                raise error
            except Exception as inner:
                raise ValueError("Unrecognized model") from inner

    real = pretrained_files.transformers()
    fake = type("Fake", (), {"AutoConfig": Auto, "AutoTokenizer": Auto})
    fake.CONFIG_MAPPING = real.CONFIG_MAPPING
    monkeypatch.setattr(pretrained_files, "transformers", lambda: fake)
    with pytest.raises(
        HostMemoryError, match=r"^The host ran out of memory while the .* was read:"
    ):
        getattr(pretrained_files, read)(str(model))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_run_tells_of_it(error):
    found = explained(error)
    assert isinstance(found, HostMemoryError) and "free some memory" in str(found)


def test_other_errors_are_none_of_it():
    assert not is_short_of_memory(ValueError("can't allocate memory for this name"))
    assert not is_short_of_memory(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_short_of_memory(ModelError("no"))


def test_a_control_group_that_is_too_small_is_told(monkeypatch):
    """The system would end the process without a word."""
    monkeypatch.setattr(short_memory, "cgroup_memory", lambda: (300 * MIB, 200 * MIB))
    with pytest.raises(HostMemoryError, match=r"may take 300 MiB, and a run of even .* 400 MiB at"):
        refuse_little_memory(Work.RUN)
    refuse_little_memory(Work.APP)
