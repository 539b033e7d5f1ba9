"""Published models go the whole way: they are loaded, shown, trained and exported.

Tokenizers, chat templates and configurations are the true ones (`tests/support/published.py`); only
widths and the number of layers are smaller.
"""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.config.settings import TrainConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.model.build.pretrained_files import load_tokenizer
from engine.runs.record.events import DataPrepared, EvalFinished, StepFinished
from engine.training.export.export import export_run
from tests.support.published import PUBLISHED
from tests.support.trained_runs import events_of, trained

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("it trains five published models, each for three steps"),
]
TEXT = (
    "“Don't,” she'd said — it's 3,141 km to Zürich!\n\n\tНо 東京は遠い。  🙂 naïve ﬁn\r\n"
    "def f(x):\n    return x**2  # ½ of it\n" + "La mer, la mer, toujours recommencée ! "
)
"""It has no character that a normalization changes."""
ANSWER = "42 — né 🙂"
ENDS = {
    "Qwen2.5-0.5B-Instruct": "<|im_end|>",
    "Llama-3.2-1B-Instruct": "<|eot_id|>",
    "DeepSeek-V3": "<｜end▁of▁sentence｜>",
}
"""The models with a chat template end an answer so."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_goes_the_whole_way(tmp_path, name):
    published = PUBLISHED[name]
    model = published.write(tmp_path / name)
    tokenizer = load_tokenizer(str(model))
    ours = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    if published.own_tokens is not None:
        assert ours == published.own_tokens(TEXT), "the publisher's library makes others"

    turns = [{"role": "user", "content": TEXT}, {"role": "assistant", "content": ANSWER}]
    row = {"messages": turns} if name in ENDS else {"text": TEXT}
    data = tmp_path / "data.jsonl"
    data.write_text(f"{json.dumps(row)}\n" * 20)
    config = TrainConfig.from_dict(
        {
            "model": {"source": str(model)},
            "data": {"source": str(data), "max_seq_len": 256},
            "train": {"steps": 3, "batch_size": 1, "learning_rate": 1e-2},
        }
    )
    spans = preview(config.data, tokenizer)["rows"][0]["documents"][0]
    shown = "".join(span["text"] for span in spans if span["trained"])
    assert shown.strip() == ANSWER + ENDS[name] if name in ENDS else "mer, la mer" in shown

    run = trained(config, tmp_path / "runs")
    losses = [event.loss for event in events_of(run, StepFinished)]
    assert losses[0] == pytest.approx(math.log(published.config()["vocab_size"]), rel=0.03)
    assert losses[2] < losses[0]  # the first step has no rate yet
    assert not events_of(run, DataPrepared)[0].summary["rows_skipped"]

    home = tmp_path / "home"
    export_run(tmp_path / "runs", run.folder.id, home)
    there = AutoTokenizer.from_pretrained(home)
    assert there(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert there.chat_template == tokenizer.chat_template
    found, reported = AutoModelForCausalLM.from_pretrained(home, output_loading_info=True)
    assert not reported["missing_keys"] and not reported["unexpected_keys"]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, home))
    assert {key: (each.shape, each.dtype) for key, each in before.items()} == {
        key: (each.shape, each.dtype) for key, each in after.items()
    }
    validation = prepare_data(config.read_data, tokenizer, config.train.seed).eval.row(0)
    with torch.no_grad():
        logits = found.float()(input_ids=torch.tensor(validation.input_ids)[None].long()).logits[0]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(validation.labels).long())
    assert loss.item() == pytest.approx(events_of(run, EvalFinished)[-1].loss, rel=5e-3)
