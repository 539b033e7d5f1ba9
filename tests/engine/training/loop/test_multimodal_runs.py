"""Runs that train the language model of a model that also reads images: what they write is the
whole model again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForMultimodalLM

from engine.config.export_choice import ExportChoice
from engine.errors import ModelError
from engine.training.export.export import export_run
from engine.training.export.serve_commands import what_to_type
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.multimodal import CONFIGS, image_prompt, make_multimodal
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.trained_runs import execute

pytestmark = [pytest.mark.slow("a plain run has shorter tests of the same"), pytest.mark.computing]

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
    """The names of weights that no text passes through, and of buffers, which nothing trains."""
    parts = ("vis", "projector", "connector", "mlp1", "layer_scalar")
    return {name for name in names if any(part in name for part in parts)}


@pytest.mark.parametrize("family", slow_but(CONFIGS, PLAIN, FAMILY_SWEEP))
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
        card = (export / "README.md").read_text(encoding="utf-8")
        (_, typed), *_ = what_to_type(export, "tiny")
        for text in (card, typed):
            assert f"import AutoProcessor, {type(whole).__name__}" in text
        assert [file.name for file in export.glob("model*")] == ["model.safetensors"]


def test_an_export_keeps_the_names_and_the_layout_of_its_source(tmp_path):
    """Also those of another version of the library, a second copy of a tied head, and weights that
    the library does not know.
    """
    source = make_multimodal(tmp_path / "model", "gemma3", tied=True)
    before = tensors_of(source)
    for file in source.glob("model*"):
        file.unlink()
    head = "language_model.model.embed_tokens.weight"
    renamed = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in before.items()
    }
    renamed["draft.weight"] = torch.ones(3)
    copy_of_head = {"language_model.lm_head.weight": renamed[head].clone()}
    save_file(renamed | copy_of_head, source / "model.safetensors", metadata={"format": "pt"})
    export = train(tmp_path, **{"model.source": str(source), "output.export": True})
    after = tensors_of(export.folder.export_path)
    assert after.keys() == renamed.keys()
    same = {name for name in after if torch.equal(after[name], renamed[name])}
    assert same == untouched(renamed) | {"draft.weight"} and head not in same
    ids = image_prompt("gemma3")
    with torch.no_grad():
        whole = whole_model(export.folder.export_path)
        assert torch.equal(whole.lm_head.weight, after[head])
        assert whole(**ids).logits.isfinite().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_is_not_trained_keeps_its_dtype(tmp_path, dtype):
    source = make_multimodal(tmp_path / "model", "llava", dtype=torch.bfloat16)
    before = tensors_of(source)
    run = train(tmp_path, **{"model.source": str(source), "model.dtype": "bfloat16"})
    choice = ExportChoice(dtype=dtype)
    export_run(tmp_path / "runs", run.folder.id, tmp_path / "out", choice)
    after = tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    for name in after:
        is_trained = name not in untouched(before)
        assert after[name].dtype == (getattr(torch, dtype) if is_trained else torch.bfloat16)
        assert is_trained or torch.equal(after[name], before[name])
    assert whole_model(tmp_path / "out").dtype == getattr(torch, dtype)


def test_an_export_without_its_source_is_refused_and_leaves_nothing(tmp_path):
    source = make_multimodal(tmp_path / "model", "llava")
    run = train(tmp_path, **{"model.source": str(source)})
    for file in source.glob("*.safetensors"):
        file.rename(file.with_suffix(".away"))
    with pytest.raises(ModelError, match="not trained are copied from there into the export; get"):
        export_run(tmp_path / "runs", run.folder.id, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for file in source.glob("*.away"):
        file.rename(file.with_suffix(".safetensors"))
    export_run(tmp_path / "runs", run.folder.id, tmp_path / "out")
    assert tensors_of(tmp_path / "out").keys() == tensors_of(source).keys()


def test_a_run_whose_export_would_lack_weights_does_not_begin(tmp_path):
    """With random weights, a folder with a configuration alone is enough for other models."""
    source = make_multimodal(tmp_path / "model", "llava")
    for file in source.glob("*.safetensors*"):
        file.unlink()
    values = {"model.source": str(source), "model.init": "random"}
    ended = execute(start_run(make_config(tmp_path, **values), tmp_path / "runs"))
    assert ended.state == "failed" and "is not trained and is copied" in ended.reason


def test_adapters_stand_beside_the_language_model_alone(tmp_path):
    peft = pytest.importorskip("peft")
    source = make_multimodal(tmp_path / "model", "llava")
    values = {"model.source": str(source), "train.method": "lora", "output.export_form": "adapter"}
    run = train(tmp_path, **values, **{"output.export": True})
    adapted = peft.PeftModel.from_pretrained(whole_model(source), run.folder.export_path).eval()
    layers = {name for name, _ in adapted.named_parameters() if ".lora_A." in name}
    assert layers and not any("vision" in name for name in layers)
    choice = ExportChoice(form="model")
    export_run(tmp_path / "runs", run.folder.id, tmp_path / "out", choice)
    before, after = tensors_of(source), tensors_of(tmp_path / "out")
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in untouched(before))
    with torch.no_grad():
        prompt = image_prompt("llava")
        merged = seen(tmp_path / "out", "llava")
        torch.testing.assert_close(adapted(**prompt).logits, merged, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(merged, seen(source, "llava"), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("own", [1, [1, 2]])
def test_an_export_ends_its_answers_as_it_was_trained(tmp_path, own):
    """The generation settings of the source stay as they are where they have the token."""
    source = make_multimodal(tmp_path / "model", "gemma3")
    settings = source / "generation_config.json"
    settings.write_text(json.dumps({"eos_token_id": own, "top_k": 3, "do_sample": True}))
    values = {"model.source": str(source), "train.steps": 1, "output.export": True}
    export = train(tmp_path, **values).folder.export_path
    found = json.loads((export / "generation_config.json").read_text())
    assert found["eos_token_id"] == [1, 2] and found["top_k"] == 3
    is_same = (export / "generation_config.json").read_bytes() == settings.read_bytes()
    assert is_same is (own == [1, 2])


PRIVATE = b"-----BEGIN OPENSSH PRIVATE KEY-----\n"


def test_a_link_to_a_file_elsewhere_is_copied_into_no_export(tmp_path):
    """A stranger who gives the folder of a model may know the name of a private file."""
    source = make_multimodal(tmp_path / "model", "llava")
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "id_rsa").write_bytes(PRIVATE)
    run = train(tmp_path, **{"model.source": str(source), "train.steps": 1})
    for name in ("notes.txt", "keys.json"):
        link = source / name
        link.symlink_to(tmp_path / "private" / "id_rsa")
        with pytest.raises(ModelError) as refused:
            export_run(tmp_path / "runs", run.folder.id, tmp_path / "out")
        assert str(refused.value) == (
            f"model.source: {link} is a link to a file outside of the model's folder, and would be "
            "copied into the export; put the file itself there, or remove the link."
        )
        assert not (tmp_path / "out").exists()
        values = {"model.source": str(source), "train.steps": 1}
        ended = execute(start_run(make_config(tmp_path, **values), tmp_path / "more"))
        assert (ended.state, ended.reason) == ("failed", str(refused.value))
        link.unlink()


@pytest.mark.parametrize("blobs", ["../../blobs", "../../../blobs", "more"])
def test_links_to_where_the_model_is_keep_working(tmp_path, blobs):
    """As in the hub's cache, in a folder whose files are on another disk, and within a folder."""
    made = make_multimodal(tmp_path / "made", "llava")
    (made / "notes.txt").write_bytes(b"notes")
    folder = tmp_path / "models--tiny--llava" / "snapshots" / "5f3a"
    (folder / blobs).mkdir(parents=True)
    for number, file in enumerate(sorted(made.iterdir())):
        file.rename(folder / blobs / f"blob{number}")
        (folder / file.name).symlink_to(f"{blobs}/blob{number}")
    run = train(tmp_path, **{"model.source": str(folder), "train.steps": 1})
    export_run(tmp_path / "runs", run.folder.id, tmp_path / "out")
    assert (tmp_path / "out" / "notes.txt").read_bytes() == b"notes"
    assert not [file for file in (tmp_path / "out").iterdir() if file.is_symlink()]
