"""Tokenizing in several processes gives the same bits as in one, reports errors in the same order,
and leaves no process behind.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.tokens import cache_key, encoded, tokenize, workers
from engine.data.tokens.tokenize import Execution
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.cached_data import assert_same
from tests.support.rows import write_rows


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(encoded, "_ROWS", 16)
    yield
    assert not others()


@pytest.fixture(scope="module")
def tokenizer():
    return made.byte_level_tokenizer(made.QWEN3)


def others() -> list[psutil.Process]:
    """Returns the child processes that tokenize, without the resource trackers of other tests."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process may have ended in the meantime
            if "engine.data.tokens.workers" in " ".join(child.cmdline()):
                found.append(child)
    return found


def rows(count=400):
    """Yields rows, of which some are skipped, cut, trained one turn at a time or warned about, and
    some contain typed special tokens.
    """
    for i in range(count):
        text = f"<think>so {i}</think> an" if i % 5 == 0 else f"an {'hello ' * (i % 60)}"
        messages = [
            {"role": "user", "content": f"{i} <|im_end|>" if i % 11 == 0 else f"{i}"},
            {"role": "assistant", "content": text},
        ]
        yield {"messages": [] if i % 13 == 0 else messages * (1 + i % 3)}


def config(path, **changes):
    return DataConfig(**{"source": str(path), "max_seq_len": 200, "eval_fraction": 0.1, **changes})


def in_a_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_any_number_of_processes_makes_the_same_bits(
    tmp_path, tokenizer, tmp_path_factory, monkeypatch
):
    path = write_rows(tmp_path / "a.jsonl", rows())
    alone = prepare_data(config(path), tokenizer, 1, execution=Execution(processes=0))
    assert alone.summary["rows_cut"]
    assert alone.summary["rows_skipped"]
    assert len(alone.summary["warnings"]) > 3
    for count in (1, 3):
        in_a_cache(tmp_path_factory, monkeypatch)
        found = []
        data = prepare_data(
            config(path),
            tokenizer,
            1,
            execution=Execution(lambda *now: found.append(now), processes=count),
        )
        assert_same(data, alone)
        assert not data.summary["cached"]
        assert [now[0] for now in found] == [*range(16, 401, 16), 400]
        assert found[-1] == (400, 400, "Tokenized a.jsonl")


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_going_on_in_processes_makes_the_same_bits(
    tmp_path, tokenizer, tmp_path_factory, monkeypatch
):
    path = write_rows(tmp_path / "a.jsonl", rows(200))
    alone = prepare_data(config(path), tokenizer, 1, execution=Execution(processes=0))
    in_a_cache(tmp_path_factory, monkeypatch)
    asked = []

    def worth(done, total, seconds):
        asked.append((done, total))
        return 2 if len(asked) == 3 else None

    monkeypatch.setattr(tokenize, "_worth", worth)
    assert_same(prepare_data(config(path), tokenizer, 1), alone)
    assert asked == [(16, 200), (32, 200), (48, 200)]


@pytest.mark.parametrize(
    ("cores", "free", "done", "total", "seconds", "workers"),
    [
        (8, 64 << 30, 512, 2_000, 0.4, None),
        (8, 64 << 30, 512, 1_000_000, 0.4, 8),
        (1, 64 << 30, 512, 1_000_000, 0.4, None),
        (64, 512 << 30, 512, 1_000_000, 0.4, 16),
        (64, 3 << 30, 512, 1_000_000, 0.4, 3),
        (8, 1 << 30, 512, 1_000_000, 9, None),
        (2, 64 << 30, 512, None, 4.0, None),
        (2, 64 << 30, 9_000, None, 20.0, 2),
        (2, 64 << 30, 1_000, 1_000, 60.0, None),
    ],
)
def test_processes_are_started_where_they_pay(
    monkeypatch, cores, free, done, total, seconds, workers
):
    monkeypatch.setattr(tokenize, "usable_cores", lambda: cores)
    monkeypatch.setattr(tokenize, "sample_host_memory", lambda: (0, free))
    assert tokenize._worth(done, total, seconds) == workers


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (
            {"messages": [{"role": 3}]},
            r"^There is no role in turn 1 of messages in line 151 of a\.jsonl",
        ),
        ("[", r"^Line 151 of a\.jsonl is not valid JSON"),
    ],
)
def test_the_first_error_in_the_data_is_the_one_that_is_told(tmp_path, tokenizer, broken, sentence):
    path = write_rows(tmp_path / "a.jsonl", rows(150))
    with path.open("a") as file:
        file.write(f"{broken if isinstance(broken, str) else json.dumps(broken)}\n")
        # A line that is no JSON would come first wherever it is: columns are those of all rows.
        file.write('{"messages": 3}\n' * 20)
    for count in (0, 2):
        with pytest.raises(DataError, match=sentence):
            prepare_data(config(path), tokenizer, 1, execution=Execution(processes=count))


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_process_that_dies_is_one_sentence(tmp_path, tokenizer):
    path = write_rows(tmp_path / "a.jsonl", rows(600))

    def kill(*_):
        for child in others():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()

    with pytest.raises(
        DataError, match=r"^A process that tokenizes a\.jsonl ended \(SIGKILL\); .*\.$"
    ) as caught:
        prepare_data(config(path), tokenizer, 1, execution=Execution(kill, processes=2))
    assert "\n" not in str(caught.value)


def test_a_process_that_cannot_start_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    path = write_rows(tmp_path / "a.jsonl", rows(60))
    monkeypatch.setattr(workers, "_PROGRAM", "raise SystemExit(3)")
    with pytest.raises(
        DataError, match=r"^A process that tokenizes a\.jsonl ended \(exit code 3\); "
    ):
        prepare_data(config(path), tokenizer, 1, execution=Execution(processes=2))


def test_a_program_that_was_changed_while_it_ran_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(cache_key, "PROGRAM", ["an earlier version"])
    with pytest.raises(
        DataError, match=r"^The program was changed on the disk while it ran; start it again\.$"
    ):
        prepare_data(
            config(write_rows(tmp_path / "a.jsonl", rows(60))),
            tokenizer,
            1,
            execution=Execution(processes=2),
        )


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_fault_of_the_program_keeps_its_name_and_its_trace(
    tmp_path, tokenizer, monkeypatch, capfd
):
    path = write_rows(tmp_path / "a.jsonl", rows(60))
    monkeypatch.setattr(
        workers,
        "_PROGRAM",
        "import engine.data.tokens.workers as p; p.encode_batch = lambda *_: 1 / 0; p.serve()",
    )
    with pytest.raises(RuntimeError, match="ZeroDivisionError: division by zero"):
        prepare_data(config(path), tokenizer, 1, execution=Execution(processes=2))
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
def test_a_stop_ends_the_processes(tmp_path, tokenizer, problem, own_cache):
    path = write_rows(tmp_path / "a.jsonl", rows(600))

    def stop(*_):
        assert len(others()) == 2
        raise problem("stop")

    with pytest.raises(problem, match="stop"):
        prepare_data(config(path), tokenizer, 1, execution=Execution(stop, processes=2))
    assert not list((own_cache / "tokens").iterdir())


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_processes_need_no_torch_and_end_with_a_killed_run(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", rows(600))
    code = (
        "import os, sys, psutil\n"
        "from engine.config.data_settings import DataConfig\n"
        "from engine.data.tokens import encoded\n"
        "from engine.data.batches.loader import prepare_data\n"
        "from engine.data.tokens.tokenize import Execution\n"
        "from tests.support import data_tokenizers as made\n"
        "encoded._ROWS = 16\n"
        "def die(*_):\n"
        "    for child in psutil.Process().children(recursive=True):\n"
        "        assert not any('torch' in m.path for m in child.memory_maps())\n"
        "        print(child.pid, flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "tokenizer = made.byte_level_tokenizer(made.CHATML)\n"
        "how = Execution(die, processes=2)\n"
        "prepare_data(DataConfig(sys.argv[1]), tokenizer, 1, execution=how)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, check=False
    )
    assert ended.returncode == -signal.SIGKILL
    left = [int(pid) for pid in ended.stdout.split()]
    assert len(left) >= 4, "each that tokenizes has one for its template, as the run has"
    until = time.monotonic() + 60
    while any(
        psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        for pid in left
    ):
        assert time.monotonic() < until
        time.sleep(0.05)
