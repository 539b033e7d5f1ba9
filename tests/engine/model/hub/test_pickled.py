"""Weights that `torch.save` wrote fill the planes as safetensors do, and no code of theirs runs."""

from __future__ import annotations

import os
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError
from engine.model.hub.tensor_files import read_tensor, reading_dtype, tensors_in
from engine.model.hub.torch_pickle import open_pickled
from engine.training.weights.weights import load_pretrained
from tests.support.checkpoints_of_families import save_family
from tests.support.folders import make_model
from tests.support.pickled_folders import pickle_weights, write_pickled
from tests.support.sets import slow_but

pytestmark = pytest.mark.computing

STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
FAMILIES = ("llama", "gpt2", "mixtral", "deepseek_v3", "ernie4_5_moe")


def masters(model, states) -> dict[str, torch.Tensor]:
    return {
        spec.full_name: states.parameters.master(unit.name, spec.name)
        for unit in model.units
        for spec in unit.layout.parameters
    }


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", slow_but(FAMILIES, ("gpt2", "mixtral"), "a part says as much"))
def test_masters_and_buffers_are_those_of_the_same_safetensors(
    family, stored, files, poured, tmp_path
):
    source = save_family(tmp_path / "source", family, STORED[stored])
    model, states = poured(source)
    expected, dtype = masters(model, states), reading_dtype(source)
    buffers = {name: buffer.clone() for name, buffer in model.persistent_buffers().items()}
    pickle_weights(source, files)
    model, states = poured(source)
    assert_equal(masters(model, states), expected)
    assert_equal(model.persistent_buffers(), buffers)
    assert reading_dtype(source) == dtype


@pytest.mark.parametrize("kept", ["model.embed_tokens.weight", "lm_head.weight", "both"])
def test_a_tied_weight_is_found_under_either_name(kept, poured, tmp_path):
    source = save_family(tmp_path / "source", "gemma3_text")
    weights = pickle_weights(source)
    embedding = weights.pop("model.embed_tokens.weight")
    names = ["model.embed_tokens.weight", "lm_head.weight"] if kept == "both" else [kept]
    write_pickled(source, weights | dict.fromkeys(names, embedding))
    model, states = poured(source)
    assert model.tied
    (spec,) = model.unit("embed").layout.parameters
    assert torch.equal(states.parameters.master("embed", spec.name), embedding)


def test_safetensors_are_read_where_a_folder_has_both(poured, tmp_path):
    source = save_family(tmp_path / "source", "llama")
    weights = load_file(source / "model.safetensors")
    write_pickled(source, {name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    ours = masters(*poured(source))
    assert torch.equal(ours["model.norm.weight"], weights["model.norm.weight"])
    assert all(tensor.any() for name, tensor in ours.items() if "bias" not in name)


@pytest.mark.slow("a plain run has shorter tests of the same")
def test_parameters_and_views_keep_their_values(poured, tmp_path):
    """Some publishers save parameters, or weights that are transposed in memory."""
    source = save_family(tmp_path / "source", "llama")
    weights = pickle_weights(source)
    expected = masters(*poured(source))
    turned = {
        name: torch.nn.Parameter(tensor.t().contiguous().t() if tensor.ndim == 2 else tensor)
        for name, tensor in weights.items()
    }
    write_pickled(source, turned)
    assert not all(tensor.is_contiguous() for tensor in turned.values())
    assert_equal(masters(*poured(source)), expected)
    for name, tensor in turned.items():
        copied = read_tensor(source / "pytorch_model.bin", name)
        assert torch.equal(copied, tensor)
        assert copied.is_contiguous()
        assert not copied.requires_grad


def test_what_a_file_holds_is_told_alike_for_both_forms(tmp_path):
    tensors = {"a": torch.zeros(3, 5, dtype=torch.float16), "b": torch.zeros(7)}
    save_file(tensors, tmp_path / "model.safetensors")
    write_pickled(tmp_path, tensors)
    both = [
        {name: (each.dtype, each.bytes) for name, each in tensors_in(tmp_path / file).items()}
        for file in ("model.safetensors", "pytorch_model.bin")
    ]
    assert both[0] == both[1] == {"a": ("F16", 30), "b": ("F32", 28)}


class Harmful:
    """Its pickle makes a folder when it is loaded as an object."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


@pytest.mark.parametrize("files", [1, 2])
def test_pickled_code_is_refused_and_never_runs(files, poured, tmp_path):
    source, place = make_model(tmp_path / "source"), tmp_path / "it ran"
    weights = pickle_weights(source)
    write_pickled(source, weights | {"zz": Harmful(place)}, files)
    (file,) = (each for each in source.glob("*.bin") if b"mkdir" in each.read_bytes())
    with pytest.raises(ModelError) as refused:
        poured(source)
    assert str(refused.value) == (
        f"model.source: {file.name} holds pickled objects that are not tensors "
        "(posix.mkdir), and pickled code is never run; give a folder or Hugging Face "
        "id with safetensors weights."
    )
    assert not place.exists()
    torch.load(file, weights_only=False)
    assert place.exists(), "the file would have run it"


def save_older(folder, weights):
    torch.save(weights, folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def cut_off(folder, weights):
    file = folder / "pytorch_model.bin"
    torch.save(weights, file)
    os.truncate(file, file.stat().st_size * 6 // 10)


REFUSED = {
    "an older form": (save_older, "was written by PyTorch before 1.6"),
    "cut off": (cut_off, "is cut off; get the files again"),
    "something else": (
        lambda folder, _: (folder / "pytorch_model.bin").write_bytes(b"not weights"),
        "is no file of torch.save",
    ),
    "no bytes": (
        lambda folder, _: (folder / "pytorch_model.bin").write_bytes(b""),
        "is no file of torch.save",
    ),
    "deeper": (
        lambda folder, weights: write_pickled(folder, {"state_dict": weights}),
        "'state_dict' is none",
    ),
    "a list": (
        lambda folder, weights: torch.save(list(weights.values()), folder / "pytorch_model.bin"),
        "does not hold tensors by name (list)",
    ),
    "nothing": (lambda folder, _: write_pickled(folder, OrderedDict()), "it is empty"),
    "sparse": (
        lambda folder, weights: write_pickled(folder, weights | {"s": torch.eye(3).to_sparse()}),
        "'s' is none",
    ),
}


@pytest.mark.parametrize("write, reported", REFUSED.values(), ids=REFUSED)
def test_other_files_are_refused_in_one_sentence(write, reported, poured, tmp_path):
    source = make_model(tmp_path / "source")
    write(source, pickle_weights(source))
    with pytest.raises(ModelError) as refused:
        poured(source)
    sentence = str(refused.value)
    assert reported in sentence and "\n" not in sentence
    assert "safetensors" in sentence or write is cut_off
    assert sentence.endswith(".") and len(sentence) < 260


def test_a_shard_that_is_missing_is_named(poured, tmp_path):
    source = make_model(tmp_path / "source")
    pickle_weights(source, 2)
    (source / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(ModelError, match=r"lacks pytorch_model-00002-of-00002\.bin of the 2"):
        poured(source)


def test_a_tensor_that_is_missing_is_named(poured, tmp_path):
    source = make_model(tmp_path / "source")
    weights = pickle_weights(source)
    del weights["model.norm.weight"]
    write_pickled(source, weights)
    with pytest.raises(ModelError, match=r"model\.norm\.weight is missing"):
        poured(source)


def test_tensors_are_views_of_the_file_that_it_cannot_change(tmp_path):
    write_pickled(tmp_path, {"a": torch.ones(1 << 12)})
    file = tmp_path / "pytorch_model.bin"
    before = file.read_bytes()
    open_pickled(file)["a"].zero_()
    assert file.read_bytes() == before


def test_giving_up_while_pickled_weights_are_read(poured, tmp_path):
    source = make_model(tmp_path / "source")
    pickle_weights(source)
    model, states = poured(source)

    class Enough(Exception):
        pass

    def give_up(done: int, total: int) -> None:
        if done > total / 10:
            raise Enough

    with pytest.raises(Enough):
        load_pretrained(model, str(source), states, give_up)
