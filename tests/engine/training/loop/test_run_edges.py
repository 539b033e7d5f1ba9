"""Runs handle edge cases: failing ends, requests at unusual moments, short runs, moved folders,
unusual text and unusual models.
"""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import DataError, RunError
from engine.runs.record.events import (
    CheckpointWritten,
    DataPrepared,
    ExactMatchMeasured,
    JobProgressed,
    LogLine,
    StepFinished,
)
from engine.runs.summaries.listing import list_runs
from engine.runtime.step.per_document import Evaluation
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from tests.support.asking import ask_run
from tests.support.folders import make_config, make_data, make_model, make_tokenizer
from tests.support.trained_runs import events_of, execute, planes_on_disk


def test_a_last_evaluation_that_fails_costs_nothing_and_is_made_up_for(tmp_path, monkeypatch):
    config = make_config(
        tmp_path, **{"output.checkpoint_every": 0, "output.eval_every": 0, "output.export": True}
    )
    with monkeypatch.context() as broken:
        nothing = Evaluation(float("nan"), np.zeros(1), np.zeros(1, dtype=np.int64))
        broken.setattr(StreamingEngine, "evaluate_rows", lambda *_: nothing)
        run = start_run(config, tmp_path / "runs")
        ended = execute(run)
    assert ended.state == "failed"
    assert "validation loss after step 8 is not a finite number" in ended.reason
    assert [c.step for c in events_of(run, CheckpointWritten)] == [8]
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert (run.folder.export_path / "model.safetensors").exists()
    assert [s.step for s in events_of(again, StepFinished)] == list(range(1, 9))
    with pytest.raises(RunError, match="has finished all its 8 steps"):
        resume_run(tmp_path / "runs", run.id)


@pytest.mark.slow("it tries a fault at many moments of a run")
@pytest.mark.parametrize(
    "moment, message",
    [("before", "nothing was trained"), ("after", "Stopped and saved at step 40")],
)
def test_stop_is_obeyed_while_answers_are_measured(tmp_path, moment, message):
    config = make_config(
        tmp_path, **{"output.exact_match_samples": 3, "data.eval_fraction": 0.2, "train.steps": 40}
    )
    run = start_run(config, tmp_path / "runs")
    seen = []

    def react(record):
        event = record.event
        if (
            isinstance(event, JobProgressed)
            and event.job == "sample"
            and moment in event.message
            and not seen
        ):
            seen.append(event)
            run.request("stop")

    run.recorder.subscribe(react)
    ended = run.execute()
    assert seen
    assert ended.state == "stopped"
    assert message in ended.reason
    assert len(events_of(run, ExactMatchMeasured)) == (0 if moment == "before" else 1)
    assert execute(resume_run(tmp_path / "runs", run.id)).state == "finished"


def test_a_save_asked_for_while_answers_are_measured_is_made_at_the_next_step(tmp_path):
    config = make_config(
        tmp_path, **{"output.exact_match_samples": 3, "output.checkpoint_every": 0}
    )
    run = start_run(config, tmp_path / "runs")

    def react(record):
        if isinstance(record.event, JobProgressed) and record.event.job == "sample":
            run.request("save") if not asked else None
            asked.append(record)
        if isinstance(record.event, StepFinished) and record.event.step == 2:
            run.request("save")

    asked: list = []
    run.recorder.subscribe(react)
    assert run.execute().state == "finished"
    assert len(events_of(run, CheckpointWritten)) == 2


def test_a_short_run_learns_something_and_says_that_its_warm_up_is_shorter(tmp_path):
    run = start_run(
        make_config(tmp_path, **{"train.steps": 1, "train.warmup_steps": 10}), tmp_path / "runs"
    )
    execute(run)
    (step,) = events_of(run, StepFinished)
    assert step.learning_rate == 1e-2
    assert any(
        "train.warmup_steps 10 is more than half of the 1 steps, so 0 are used" in line.text
        for line in events_of(run, LogLine)
    )


def test_what_cannot_be_evaluated_is_said(tmp_path):
    run = start_run(
        make_config(tmp_path, **{"train.steps": 1, "data.eval_fraction": 0.0}), tmp_path / "runs"
    )
    execute(run)
    assert any("no validation rows" in line.text for line in events_of(run, LogLine))


def test_resume_counts_the_disk_that_its_own_checkpoints_take(tmp_path, monkeypatch):
    run = start_run(make_config(tmp_path, **{"output.keep_checkpoints": 2}), tmp_path / "runs")
    assert execute(run, {6: "stop"}).state == "stopped"
    size = events_of(run, CheckpointWritten)[-1].bytes
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: usage._replace(free=int(2.2 * size) + (17 << 20))
    )
    ended = execute(resume_run(tmp_path / "runs", run.id))
    assert ended.state == "finished", ended.reason


def test_a_run_started_with_a_relative_path_is_resumed_from_elsewhere(tmp_path, monkeypatch):
    make_data(tmp_path / "my.jsonl")
    config = make_config(tmp_path, **{"data.source": "my.jsonl"})
    monkeypatch.chdir(tmp_path)
    run = start_run(config, "runs")
    assert execute(run, {3: "stop"}).state == "stopped"
    monkeypatch.chdir("/")
    assert execute(resume_run(tmp_path / "runs", run.id)).state == "finished"
    assert list_runs(tmp_path / "runs")[0].data == str(tmp_path / "my.jsonl")


def test_broken_text_is_left_out_and_counted(tmp_path):
    rows = [
        {
            "messages": [
                {"role": "user", "content": "say after one"},
                {"role": "assistant", "content": answer},
            ]
        }
        for answer in ["two"] * 12 + ["\ud800 two"]
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    run = start_run(make_config(tmp_path, **{"train.steps": 1}), tmp_path / "runs")
    assert execute(run).state == "finished"
    (prepared,) = events_of(run, DataPrepared)
    assert prepared.summary["skipped_because"] == {"the text is not valid Unicode": 1}


def test_answers_end_where_a_models_positions_end(tmp_path):
    make_model(tmp_path / "model", "gpt2", n_positions=32)
    run = start_run(
        make_config(tmp_path, **{"output.exact_match_samples": 4, "data.eval_fraction": 0.2}),
        tmp_path / "runs",
    )
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    assert len(ask_run(tmp_path / "runs", run.id, "one", max_new_tokens=100).split()) < 32
    with pytest.raises(
        DataError, match="The conversation has .* tokens and this model takes 32 at most"
    ):
        ask_run(tmp_path / "runs", run.id, "one " * 40)


def with_router_bias(folder) -> torch.Tensor:
    """Writes a mixture-of-experts model whose router has a bias that is a buffer, not a parameter;
    returns the bias.
    """
    config = CONFIG_MAPPING["deepseek_v3"](
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    bias = dict(model.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"]
    bias.copy_(torch.tensor([-0.09, -1.45, 0.6, 1.1]))
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return bias


def test_buffers_of_the_weights_survive_resume_and_export(tmp_path):
    bias = with_router_bias(tmp_path / "model")
    config = make_config(tmp_path)
    whole, part = (start_run(config, tmp_path / "runs") for _ in range(2))
    assert execute(whole).state == "finished", whole.recorder.snapshot.reason
    assert execute(part, {3: "stop"}).state == "stopped"
    again = resume_run(tmp_path / "runs", part.id)
    execute(again)
    assert planes_on_disk(again) == planes_on_disk(whole)
    export_run(tmp_path / "runs", again.id, tmp_path / "home")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "home")
    assert torch.equal(
        dict(loaded.named_buffers())["model.layers.1.mlp.gate.e_score_correction_bias"], bias
    )


def test_export_takes_the_newest_checkpoint_that_verifies_and_says_so(tmp_path):
    changes = {"output.keep_checkpoints": 3, "output.keep_best": "none"}
    run = start_run(make_config(tmp_path, **changes), tmp_path / "runs")
    execute(run)
    planes = next((run.folder.checkpoints_path / "step-8").glob("0002-*"))
    content = bytearray(planes.read_bytes())
    content[5] ^= 1
    planes.write_bytes(content)
    link = tmp_path / "link"
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", link)
    found = export_run(tmp_path / "runs", run.id, link)
    assert found.step == 6 and "step-8" in found.notes[0]
    assert (tmp_path / "real" / "model.safetensors").exists()


def test_a_run_that_was_killed_after_its_last_checkpoint_leaves_no_others(tmp_path):
    """No step follows, so no writer clears up behind the one that was killed."""
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    assert execute(run).state == "finished"
    record = run.folder.events_path
    *lines, last = record.read_text().splitlines(keepends=True)
    assert "finished" in last
    record.write_text("".join(lines))
    checkpoints = run.folder.checkpoints_path
    whole = {path.name for path in checkpoints.iterdir()}
    for name in (".step-3.deleted", ".step-8.old", ".step-8.partial"):
        shutil.copytree(checkpoints / "step-8", checkpoints / name)
    again = resume_run(tmp_path / "runs", run.id)
    assert execute(again).state == "finished"
    assert {path.name for path in checkpoints.iterdir()} == whole
