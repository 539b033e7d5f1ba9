"""Complete runs on the CPU are tested: the record, stopping and resuming bit for bit, requests,
failures, export and sampling.
"""

from __future__ import annotations

import json
import math
import threading
import weakref

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config.changes import Change
from engine.errors import RunError
from engine.planning.schedule.ops import Lane
from engine.runs.record.control import send_command
from engine.runs.record.events import (
    CheckpointWritten,
    ControlReceived,
    EvalFinished,
    MemorySampled,
    PlanBuilt,
    RunEnded,
    RunStarted,
    StateChanged,
    StepFinished,
    StepTimeline,
)
from engine.runs.record.following import replay
from engine.runs.record.run_folder import open_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.listing import list_runs
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from tests.support.asking import ask_run
from tests.support.folders import WORDS, make_config, make_model, make_tokenizer
from tests.support.trained_runs import events_of, execute, planes_on_disk


def test_a_run_from_start_to_end_and_its_record(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    live = []
    run.recorder.subscribe(live.append)
    ended = execute(run)
    assert ended == RunEnded("finished", "Finished all 8 steps.")
    steps = events_of(run, StepFinished)
    assert [s.step for s in steps] == list(range(1, 9))
    assert all(
        math.isfinite(s.loss) and s.seconds > 0 and s.tokens > s.loss_tokens > 0 for s in steps
    )
    assert steps[-1].loss < steps[0].loss
    (started,) = events_of(run, RunStarted)
    assert started.total_steps == 8
    assert started.units == ["embed", "block 0", "block 1", "block 2", "head"]
    for step in steps:
        assert step.tflops == pytest.approx(
            6 * started.parameters * step.tokens / step.seconds / 1e12
        )
        assert step.tokens_per_second == pytest.approx(step.tokens / step.seconds)
        assert set(step.exposed) == {"h2d", "d2h", "optimizer", "other"}
        assert sum(step.exposed.values()) <= step.seconds
    assert [c.step for c in events_of(run, CheckpointWritten)] == [3, 6, 8]
    assert [e.step for e in events_of(run, EvalFinished)] == [0, 4, 8]
    timeline = events_of(run, StepTimeline)[0]
    assert {s["lane"] for s in timeline.spans} == {Lane.H2D, Lane.COMPUTE, Lane.D2H, Lane.HOST}
    assert {s["unit"] for s in timeline.spans} > {"block 1"}
    assert all(s["end"] >= s["start"] >= 0 for s in timeline.spans)
    assert events_of(run, MemorySampled)[0].host_rss > 0
    # Law 7: fold(events) == live snapshot == replay(file).
    folded, replayed = RunSnapshot(), RunSnapshot()
    for record in live:
        folded.apply(record)
    for record in replay(run.folder.events_path):
        replayed.apply(record)
    assert folded == replayed == run.recorder.snapshot
    assert list_runs(tmp_path / "runs")[0].state == "finished"


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_stop_and_resume_equals_the_undisturbed_run_to_the_bit(tmp_path, stop_at):
    config = make_config(tmp_path)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {stop_at: "stop"}).state == "stopped"
    reached = newest_checkpoint(part.folder.checkpoints_path).step
    assert stop_at <= reached < 8
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    assert events_of(again, RunStarted)[-1].resumed_step == reached
    assert planes_on_disk(again) == planes_on_disk(whole)
    ours, theirs = again.recorder.snapshot.steps, whole.recorder.snapshot.steps
    assert ours.step == theirs.step
    assert ours.loss == theirs.loss
    assert ours.grad_norm == theirs.grad_norm


def test_resume_after_a_crash_repeats_the_lost_steps_to_the_bit(tmp_path):
    config = make_config(tmp_path)
    whole = start_run(config, tmp_path / "runs")
    execute(whole)

    class Killed(BaseException):
        pass

    crashed = start_run(config, tmp_path / "runs")

    def die(record):
        if isinstance(record.event, StepFinished) and record.event.step == 5:
            raise Killed

    crashed.recorder.subscribe(die)
    with pytest.raises(Killed):
        crashed.execute()
    assert list_runs(tmp_path / "runs")[0].state == "interrupted"
    again = resume_run(tmp_path / "runs", crashed.id)
    execute(again)
    assert planes_on_disk(again) == planes_on_disk(whole)
    assert list(again.recorder.snapshot.steps.step) == list(range(1, 9))


def test_pause_save_and_resume_requests(tmp_path):
    run = start_run(make_config(tmp_path, **{"output.checkpoint_every": 0}), tmp_path / "runs")
    paused = threading.Event()

    def react(record):
        if isinstance(record.event, StateChanged) and record.event.state == "paused":
            paused.set()

    run.recorder.subscribe(react)

    def person():
        assert paused.wait(60)
        send_command(open_run(tmp_path / "runs", run.id), "save")  # as from another process
        run.request("resume")

    helper = threading.Thread(target=person)
    helper.start()
    assert execute(run, {2: "pause"}).state == "finished"
    helper.join()
    assert {c.command for c in events_of(run, ControlReceived)} == {"pause", "save", "resume"}
    states = [s.state for s in events_of(run, StateChanged)]
    assert (
        states.index("pausing")
        < states.index("paused")
        < len(states) - 1 - states[::-1].index("running")
    )
    assert [c.step for c in events_of(run, CheckpointWritten)][-1] == 8


@pytest.mark.parametrize("is_paused", [False, True], ids=["running", "paused"])
def test_steps_that_are_lowered_to_those_that_are_done_end_the_run(tmp_path, is_paused):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    wanted = Change({"train.steps": 4})

    def ask(record):
        event = record.event
        if isinstance(event, StepFinished) and event.step == 4:
            run.request("pause" if is_paused else wanted)
        if isinstance(event, StateChanged) and event.state == "paused":
            run.request(wanted)
            run.request("resume")

    run.recorder.subscribe(ask)
    ended = run.execute()
    assert (ended.state, ended.reason) == ("finished", "Finished all 4 steps.")
    assert [event.step for event in events_of(run, StepFinished)] == [1, 2, 3, 4]
    assert events_of(run, CheckpointWritten)[-1].step == 4
    assert run.recorder.snapshot.total_steps == 4


def test_discard_deletes_checkpoints_and_keeps_the_record(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    assert execute(run, {4: "discard"}).state == "discarded"
    assert not run.folder.checkpoints_path.exists()
    assert len(events_of(run, StepFinished)) >= 4


def test_stop_before_the_first_step(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    run.request("stop")
    assert run.execute().state == "stopped"
    assert not events_of(run, StepFinished)


def test_a_non_finite_weight_ends_the_run_by_name_and_keeps_the_checkpoint(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    assert execute(run, {3: "stop"}).state == "stopped"
    before = planes_on_disk(run)
    poisoned = tmp_path / "poisoned"
    make_model(poisoned)
    weights = load_file(poisoned / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, poisoned / "model.safetensors", metadata={"format": "pt"})
    bad = start_run(make_config(tmp_path, **{"model.source": str(poisoned)}), tmp_path / "runs")
    ended = bad.execute()
    assert (ended.state, ended.error_type) == (
        "failed",
        "NonFiniteError",
    )
    assert "before the first step is not a finite number" in ended.reason
    assert not events_of(bad, StepFinished)
    assert planes_on_disk(run) == before


def test_a_job_that_fails_leaves_one_sentence(tmp_path):
    run = start_run(
        make_config(tmp_path, **{"model.source": str(tmp_path / "nowhere")}), tmp_path / "runs"
    )
    ended = run.execute()
    assert ended.state == "failed"
    assert ended.error_type == "ModelError"
    assert "\n" not in ended.reason
    assert list_runs(tmp_path / "runs")[0].state == "failed"


def test_resume_refuses_changed_data(tmp_path):
    config = make_config(tmp_path)
    run = start_run(config, tmp_path / "runs")
    execute(run, {2: "stop"})
    with open(config.data.source, "a", encoding="utf-8") as file:
        file.write(
            json.dumps(
                {
                    "messages": [
                        {"role": "user", "content": "say one"},
                        {"role": "assistant", "content": "two"},
                    ]
                }
            )
            + "\n"
        )
    ended = resume_run(tmp_path / "runs", run.id).execute()
    assert ended.state == "failed" and "no longer what it was trained on" in ended.reason


def test_resume_refuses_a_finished_run_and_leaves_it_as_it_was(tmp_path):
    run = start_run(make_config(tmp_path, **{"train.steps": 2}), tmp_path / "runs")
    assert execute(run).state == "finished"
    before = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
    with pytest.raises(RunError, match="has finished all its 2 steps"):
        resume_run(tmp_path / "runs", run.id)
    after = {path: path.read_bytes() for path in run.folder.path.rglob("*") if path.is_file()}
    assert after == before


@pytest.mark.parametrize("end", ["finished", "stopped", "discarded", "failed"])
def test_nothing_that_was_allocated_outlives_the_run(tmp_path, monkeypatch, end):
    """Nothing is kept alive even while the run object exists; otherwise its memory, above all on
    the GPU, would not be free for the next run.
    """
    engines, begin = [], StreamingEngine.__init__

    def noted(self, *arguments):
        begin(self, *arguments)
        engines.append(weakref.ref(self))

    monkeypatch.setattr(StreamingEngine, "__init__", noted)
    if end == "failed":
        step = StreamingEngine.train_step
        monkeypatch.setattr(
            StreamingEngine,
            "train_step",
            lambda self, number, *rest: step(self, number, *rest) if number < 3 else 1 / 0,
        )
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    assert (
        execute(run, {2: {"stopped": "stop", "discarded": "discard"}.get(end, "save")}).state == end
    )
    monkeypatch.undo()
    assert [engine() for engine in engines] == [None]


def test_two_processes_cannot_have_one_run(tmp_path):
    run = start_run(make_config(tmp_path), tmp_path / "runs")
    with pytest.raises(RunError, match="in use by process"):
        resume_run(tmp_path / "runs", run.id)
    run.close()
    assert execute(resume_run(tmp_path / "runs", run.id)).state == "finished"


def test_random_initialization_trains_and_depends_on_the_seed_alone(tmp_path):
    values = {"model.init": "random", "train.steps": 1, "output.checkpoint_every": 0}
    first, again, other = (
        start_run(make_config(tmp_path, **values, **{"train.seed": seed}), tmp_path / "runs")
        for seed in (1, 1, 2)
    )
    assert [execute(r).state for r in (first, again, other)] == ["finished"] * 3
    assert planes_on_disk(first) == planes_on_disk(again) != planes_on_disk(other)


@pytest.mark.parametrize(
    "family,tied,dtype",
    [
        ("llama", False, "float32"),
        ("qwen2", True, "bfloat16"),
        ("mixtral", False, "bfloat16"),
        ("gpt2", True, "float32"),
    ],
)
def test_the_exported_folder_loads_and_answers_as_our_own_sampling(tmp_path, family, tied, dtype):
    model = make_model(tmp_path / "model", family, getattr(torch, dtype), tie_word_embeddings=tied)
    config = make_config(
        tmp_path,
        **{
            "model.source": str(model),
            "model.dtype": dtype,
            "train.steps": 40,
            "output.export": True,
            "train.weight_decay": 0.0,
            "output.eval_every": 0,
        },
    )
    run = start_run(config, tmp_path / "runs")
    assert execute(run).state == "finished", run.recorder.snapshot.reason
    exported = tmp_path / "home"
    export_run(tmp_path / "runs", run.id, exported)
    for folder in (run.folder.export_path, exported):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
        assert loaded.dtype == getattr(torch, dtype)
        tokenizer = make_tokenizer()
        for word in (0, 3):
            prompt = f"say after {WORDS[word]}"
            ids = tokenizer.apply_chat_template(
                [{"role": "user", "content": prompt}],
                add_generation_prompt=True,
                return_dict=True,
                return_tensors="pt",
            )["input_ids"]
            out = loaded.generate(ids, max_new_tokens=6, do_sample=False)
            theirs = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip()
            pieces = []
            assert (
                ask_run(tmp_path / "runs", run.id, prompt, max_new_tokens=6, on_text=pieces.append)
                == theirs
            )
            if theirs:
                assert pieces[-1].strip() == theirs


def test_what_the_host_states_allocate_is_what_the_report_itemised(tmp_path):
    """Law 5 holds throughout a complete run."""
    run = start_run(make_config(tmp_path, **{"train.steps": 1}), tmp_path / "runs")
    execute(run)
    snapshot = run.recorder.snapshot
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert snapshot.parameters == sum(p.numel() for p in model.parameters())
    (plan,) = events_of(run, PlanBuilt)
    assert plan.choices["micro_batch_size"] == 2 and "forward block 0[0]" in plan.grid


def test_small_blocks_are_computed_by_one_thread_and_the_others_come_back(tmp_path, monkeypatch):
    """Several threads would spend more time waiting for each other than working. Rounding depends
    on the plan alone.
    """
    threads, before = [], torch.get_num_threads()
    monkeypatch.setattr(
        StreamingEngine, "train_step", _counted(StreamingEngine.train_step, threads)
    )
    torch.set_num_threads(2)
    try:
        for least in (1.0, 1e12):
            monkeypatch.setattr("engine.runtime.device.cpu_backend.SMALL_PRODUCT", least)
            assert (
                execute(
                    start_run(
                        make_config(tmp_path, **{"train.steps": 1, "train.warmup_steps": 0}),
                        tmp_path / "runs",
                    )
                ).state
                == "finished"
            )
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 1]


def _counted(method, threads):
    def counted(*arguments, **keywords):
        threads.append(torch.get_num_threads())
        return method(*arguments, **keywords)

    return counted
