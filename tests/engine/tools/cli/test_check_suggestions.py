"""`launch.py check` with other optimizers, and what it says of suggestions."""

from __future__ import annotations

import json
import re

import pytest

import launch
from engine.planning.shape.catalog import entry_of
from engine.text import in_seconds
from tests.support.bad_commands import bad


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_check_takes_the_optimizer_of_a_report_and_any_in_a_table(capsys, monkeypatch):
    asked = ("--model", "Qwen/Qwen2.5-7B", "--machine", "H200")
    assert launch.main(["check", *asked, "--optimizer", "adamw_8bit"]) == 0
    shown = capsys.readouterr().out
    # The embedding, which keeps larger moments, is among the units that live on the GPU.
    assert "AdamW's first moment, 8 bits, 1.02 bytes a parameter; without embed and" in shown
    assert re.search(r"Units that live on the GPU .*weights and moments of embed and", shown)
    assert re.search(
        r"\n  embed and blocks 0 to \d+ +GPU memory [\d.]+ GiB +optimizer on the GPU", shown
    )
    assert "'sgd' is unknown; give adamw," in bad(capsys, "check", *asked, "--optimizer", "sgd")
    assert "best is for tables" in bad(capsys, "check", *asked, "--optimizer", "best")
    monkeypatch.setattr(
        "engine.planning.fit.model_table.catalog", lambda: (entry_of("Qwen/Qwen2.5-7B"),)
    )
    table = ("check", "--table", "--machine", "RTX 4090")
    assert launch.main([*table]) == 0
    plain = capsys.readouterr().out
    assert "GiB of RAM more" in plain and "AdamW's moments in fp32" in plain
    assert launch.main([*table, "--optimizer", "best"]) == 0
    best = capsys.readouterr().out
    assert "tokens/s, only just, bf16" in best
    assert "the first of fp32, bf16 and 8 bits that fits" in best
    assert re.search(r"Of 1 model, this many fit: This machine \d, RTX 4090 1\.", best)
    assert "GPU gradients: gradients wait on the GPU" in best and "GPU gradients: " not in plain


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_check_says_how_long_a_suggestion_takes_and_how_exact_it_is(capsys):
    asked = ("check", "--model", "Qwen/Qwen2.5-7B", "--machine", "RTX 4090")
    assert launch.main([*asked]) == 1
    text = capsys.readouterr().out
    assert launch.main([*asked, "--json"]) == 1
    suggestion, adapters, last = json.loads(capsys.readouterr().out)["suggestions"]
    assert adapters["changes"] == {"train.method": "lora"}
    assert last["changes"].keys() == {"engine.disk"} and last["exactness"] == ["same_bits"]
    assert suggestion["exactness"] == ["rounded_moments"] and suggestion["instead_of"] is None
    assert (
        f"  * {suggestion['text']}\n      about {in_seconds(suggestion['seconds'])} a step. "
        in text
    )
    assert suggestion["exactness_text"] in text
    small = [*asked, "--optimizer", suggestion["changes"]["train.optimizer"], "--json"]
    assert launch.main(small) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["time"]["step_seconds"] == suggestion["seconds"]
