"""`launch.py check --gpus` says what each of several GPUs takes, and how fast all of them are."""

from __future__ import annotations

import json

import pytest

import launch
from tests.support.bad_commands import bad

ASKED = ("check", "--model", "Qwen/Qwen2.5-7B", "--set", "data.max_seq_len=1024")
ROWS = ("--set", "train.batch_size=148")


def test_check_takes_a_number_of_gpus(capsys):
    assert launch.main([*ASKED, *ROWS, "--machine", "RTX 4090", "--gpus", "2"]) == 0
    text = capsys.readouterr().out
    assert " of memory on each of 2 GPUs (" in text
    assert "\nGPU memory of each of 2 GPUs: " in text and "Exchange buffers" in text
    assert "\n  2 GPUs, and on each of them\n  cuda: 2 x 37 rows a step, " in text
    assert "in 2 processes" in text and "exchange between GPUs" in text
    assert "a workstation with eight channels of DDR5-5200" in text
    assert "Each of the 2 GPUs is assumed to receive 8 GB/s from the others" in text


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_check_compares_numbers_of_gpus(capsys):
    asked = (*ASKED, *ROWS, "--machine", "2 x H100 SXM", "--ram-gib", "256", "--json")
    found = {}
    for gpus in ("1", "2", "auto"):
        assert launch.main([*asked, "--gpus", gpus]) == 0
        found[gpus] = json.loads(capsys.readouterr().out)
    one, two = found["1"], found["2"]
    assert (one["choices"]["ranks"], two["choices"]["ranks"]) == (1, 2)
    # A step of both has as many tokens.
    assert one["time"]["tokens_per_step"] == two["time"]["tokens_per_step"]
    # Each of two keeps half of the accumulators, so it has room for more activations.
    room = ("micro_batch_size", "blocks_without_recompute")
    assert [two["choices"][name] for name in room] > [one["choices"][name] for name in room]
    assert 1.5 < one["time"]["step_seconds"] / two["time"]["step_seconds"] < 2.1
    assert found["auto"] == two


def test_a_preset_asks_for_gpus_too(capsys, tmp_path):
    preset = tmp_path / "two.yaml"
    preset.write_text(
        "model: {source: Qwen/Qwen2.5-7B}\ndata: {source: assets/starter.jsonl, max_seq_len: 64}\n"
        "engine: {gpus: 2}\n",
        encoding="utf-8",
    )
    wanted = ("check", str(preset), "--ram-gib", "200", "--disk-gib", "500")
    assert launch.main([*wanted, "--machine", "2 x RTX 4090"]) == 0
    assert "each of 2 GPUs" in capsys.readouterr().out
    found = bad(capsys, *wanted, "--machine", "RTX 4090")
    assert "engine.gpus: 2 are asked for, but the machine has 1; choose 1 or fewer" in found


def test_numbers_that_are_none_are_refused(capsys):
    for text in ("0", "-1", "two", "65"):
        found = bad(capsys, *ASKED, f"--gpus={text}")
        assert f"{text!r} is no number of GPUs; give 1 to 64, or auto" in found
    found = bad(capsys, *ASKED, *ROWS, "--machine", "RTX 4090", "--gpus", "3")
    assert "engine.gpus: 3 does not divide train.batch_size 148" in found
