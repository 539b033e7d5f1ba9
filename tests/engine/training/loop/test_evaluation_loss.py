"""The evaluation loss of a run is what plain transformers computes on the exported model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.data.batches.loader import prepare_data
from engine.runs.record.events import EvalFinished
from engine.training.export.export import export_run
from engine.training.loop.run import start_run
from tests.support.folders import WORDS, make_config, make_tokenizer
from tests.support.plain_losses import plain_loss
from tests.support.rows import write_rows
from tests.support.trained_runs import events_of, execute


def conversations(path) -> None:
    """Writes answers of one to eight words, so that a mean of means is another figure."""
    rows = []
    for number in range(48):
        words = [WORDS[(number + k) % 8] for k in range(1 + number % 8)]
        asked = {"role": "user", "content": f"say {words[0]}"}
        rows.append({"messages": [asked, {"role": "assistant", "content": " ".join(words)}]})
    write_rows(path, rows)


@pytest.mark.parametrize("packing", [True, False])
def test_the_evaluation_loss_is_that_of_plain_transformers(tmp_path, packing):
    conversations(tmp_path / "data.jsonl")
    config = make_config(
        tmp_path, **{"data.eval_fraction": 0.25, "data.packing": packing, "train.steps": 4}
    )
    run = start_run(config, tmp_path / "runs")
    assert execute(run).state == "finished"
    export_run(tmp_path / "runs", run.id, tmp_path / "home")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "home", dtype=torch.float32)
    rows = prepare_data(config.data, make_tokenizer(), config.train.seed).eval
    expected, count = plain_loss(model, rows)
    last = events_of(run, EvalFinished)[-1]
    assert last.step == 4 and last.loss_tokens == count
    assert last.loss == pytest.approx(expected, rel=1e-5)
