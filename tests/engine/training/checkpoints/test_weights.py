"""Loading pretrained weights into the planes."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config
from engine.runtime.host.host_states import HostStates
from engine.training.weights.weights import load_pretrained
from tests.support.families import tiny_family_config
from tests.support.folders import make_model
from tests.support.tiny import plain_model


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_one(family: str, dtype: str, **changes):
        folder = make_model(tmp_path / family, family, **changes)
        model = build_model(load_config(str(folder)), ModelConfig(source=str(folder), dtype=dtype))
        states = HostStates(model.layouts, dtype, threads=1)
        states.allocate_weights()
        made.append(states)
        return folder, model, states

    yield open_one
    for states in made:
        states.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family, tied", [("qwen3", False), ("gpt2", True), ("mixtral", False)])
def test_planes_hold_what_the_library_loads(opened, family, tied, dtype):
    folder, model, states = opened(family, dtype, tie_word_embeddings=tied)
    found = []
    load_pretrained(model, str(folder), states, lambda done, total: found.append((done, total)))
    # The folder is in fp32, and the masters are so in both modes.
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = dict(loaded.named_parameters())
    for unit in model.units:
        for spec in unit.layout.parameters:
            master = states.parameters.master(unit.name, spec.name)
            assert torch.equal(master, plain[spec.full_name]), spec.full_name
    size = model.parameter_count * 4  # the file is in fp32
    assert found == sorted(found)
    assert found[0] == (0, size)
    assert found[-1] == (size, size)
    assert sum(done < size for done, _ in found) > 5, "reading is told"


def test_buffers_that_are_saved_with_the_weights_are_read_with_them(tmp_path):
    """The correction bias of a router is such a buffer: without it, tokens go to other experts."""
    folder, name = tmp_path / "model", "model.layers.1.mlp.gate.e_score_correction_bias"
    plain = plain_model(tiny_family_config("deepseek_v3"))
    bias = torch.tensor([-0.09, -1.45, 0.6, 1.1])
    dict(plain.named_buffers())[name].copy_(bias)
    plain.save_pretrained(folder)
    source = ModelConfig(source=str(folder), dtype="float32")
    model = build_model(load_config(str(folder)), source)
    states = HostStates(model.layouts, "float32", threads=1)
    states.allocate_weights()
    load_pretrained(model, str(folder), states)
    states.close()
    read = model.persistent_buffers()
    assert torch.equal(read[name], bias)
    saved = set(plain.state_dict()) - {own for own, _ in plain.named_parameters()}
    assert read.keys() == saved


def test_giving_up_while_weights_are_read(opened):
    folder, model, states = opened("llama", "float32")

    class Enough(Exception):
        pass

    def abort(done: int, total: int) -> None:
        if done > total / 10:
            raise Enough

    with pytest.raises(Enough):
        load_pretrained(model, str(folder), states, abort)


def test_missing_weights_are_refused_by_name(opened):
    """transformers would draw them at random."""
    folder, model, states = opened("llama", "float32")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    kept = {key: tensor for key, tensor in load_file(file).items() if key != name}
    save_file(kept, file, {"format": "pt"})
    with pytest.raises(ModelError, match=f"{name} is missing"):
        load_pretrained(model, str(folder), states)


def test_weights_of_another_shape_are_refused_by_name(opened, tmp_path):
    _, model, states = opened("llama", "float32")
    other = make_model(tmp_path / "other", "llama", intermediate_size=80)
    with pytest.raises(ModelError, match=r"has the shape \(80, 32\)"):
        load_pretrained(model, str(other), states)
