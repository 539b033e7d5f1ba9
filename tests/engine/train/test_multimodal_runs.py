"""Runs that train the language model of a model that also reads images: what they write is the
whole model again.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from engine.checkpoints.export import export_run
from engine.config.export_choice import ExportChoice
from engine.errors import ModelError
from engine.train.run import start_run
from tests.support.folders import make_config
from tests.support.multimodal import CONFIGS, image_prompt, make_multimodal
from tests.support.tiers import FAMILY_SWEEP, in_tiers
from tests.support.trained_runs import execute

pytestmark = pytest.mark.computing

PLAIN = ("qwen2_5_vl",)
"""A plain run of the tests trains this one."""
NOTHING = 1e-30
"""Steps at this learning rate change no weight."""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def whole_model(folder: Path):
    """The model in `folder`, in memory of its own: how a file is aligned decides some roundings."""
    whole = AutoModelForMultimodalLM.from_pretrained(folder, dtype="auto").eval()
    for parameter in whole.parameters():
        parameter.data = parameter.data.clone()
    return whole


def seen(folder: Path, family: str) -> torch.Tensor:
    """The logits of the whole model in `folder`, for a text with an image."""
    with torch.no_grad():
        return whole_model(folder)(**image_prompt(family)).logits


def train(tmp_path: Path, **values):
    run = start_run(make_config(tmp_path, **values), tmp_path / "runs")
    ended = execute(run)
    assert ended.state == "finished", ended.reason
    return run


def untouched(names) -> set[str]:
    """The names of weights that no text passes through."""
    parts = ("vis", "projector", "connector", "mlp1")
    return {name for name in names if any(part in name for part in parts)}


@pytest.mark.parametrize("family", in_tiers(CONFIGS, PLAIN, FAMILY_SWEEP))
def test_an_export_is_the_whole_model_again(tmp_path, family):
    """With a learning rate that is lost in rounding it is the same model, to the bit; otherwise its
    language model has learned, and everything else is as it was.
    """
    source = make_multimodal(tmp_path / "model", family)
    before = tensors_of(source)
    prompt = image_prompt(family)
    for rate in (NOTHING, 1e-2):
        folder = tmp_path / f"at {rate}"
        folder.mkdir()
        values = {"model.source": str(source), "train.learning_rate": rate, "output.export": True}
        has_learned = rate != NOTHING
        export = train(folder, **values).folder.export_path
        after = tensors_of(export)
        assert after.keys() == before.keys()
        same = {name for name in before if torch.equal(before[name], after[name])}
        assert untouched(before) and same == (untouched(before) if has_learned else before.keys())
        is_equal = torch.equal(seen(export, family), seen(source, family))
        assert is_equal != has_learned
        whole = whole_model(export)
        assert type(whole).__name__ == type(whole_model(source)).__name__
        answer = whole.generate(**prompt, max_new_tokens=4, do_sample=False)
        assert answer.shape[1] > prompt["input_ids"].shape[1]
        for name in ("config.json", "preprocessor_config.json", "chat_template.json"):
            assert (export / name).read_bytes() == (source / name).read_bytes()
        index = json.loads((export / "model.safetensors.index.json").read_text("utf-8"))
        assert index["weight_map"].keys() == before.keys()
