"""A run from its configuration to its export on a GPU, through the same calls as the app and the command line."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.events import MemorySampled, RunStarted, StepFinished
from engine.export import export_run
from engine.generate import ask_run
from engine.job import resume_run, start_run
from engine.restore import newest_checkpoint
from tests.folders import WORDS, make_config, make_model, make_tokenizer
from tests.test_trainer import events_of, execute, planes_on_disk

pytestmark = pytest.mark.gpu


def gpu_config(tmp_path, dtype: str, **values):
    make_model(tmp_path / "model", "qwen2", getattr(torch, dtype), hidden_size=256, intermediate_size=512)
    return make_config(tmp_path, **{"engine.device": "cuda", "model.dtype": dtype, "train.learning_rate": 1e-3} | values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_stop_save_and_resume_equal_the_undisturbed_run_to_the_bit(deterministic, tmp_path, dtype):
    config = gpu_config(tmp_path, dtype)
    whole = start_run(config, tmp_path / "runs")
    assert execute(whole).state == "finished", whole.recorder.snapshot.reason
    started, = events_of(whole, RunStarted)
    assert started.device == "cuda"
    sampled = events_of(whole, MemorySampled)[-1]
    assert sampled.host_pinned > 0 and 0 < sampled.gpu_allocated <= sampled.gpu_peak <= sampled.gpu_driver
    for step in events_of(whole, StepFinished)[1:]:
        assert sum(step.exposed.values()) <= 1.1 * step.seconds
    part = start_run(config, tmp_path / "runs")
    assert execute(part, {3: "stop"}).state == "stopped"
    assert newest_checkpoint(part.folder.checkpoints_path).step < 8
    again = resume_run(tmp_path / "runs", part.id)
    assert execute(again).state == "finished"
    assert planes_on_disk(again) == planes_on_disk(whole)


def test_the_exported_folder_answers_as_our_own_sampling(tmp_path):
    config = gpu_config(tmp_path, "float32", **{"train.steps": 40, "output.eval_every": 0})
    run = start_run(config, tmp_path / "runs")
    assert execute(run).state == "finished", run.recorder.snapshot.reason
    export_run(tmp_path / "runs", run.id, tmp_path / "home")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "home").cuda().eval()
    tokenizer = make_tokenizer()
    for word in range(5):
        prompt = f"say after {WORDS[word]}"
        ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                            return_dict=True, return_tensors="pt")["input_ids"].cuda()
        out = loaded.generate(ids, max_new_tokens=6, do_sample=False)
        theirs = tokenizer.decode(out[0, ids.shape[1]:], skip_special_tokens=True).strip()
        assert ask_run(tmp_path / "runs", run.id, prompt, max_new_tokens=6) == theirs
