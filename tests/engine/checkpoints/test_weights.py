"""Loading pretrained weights into the planes."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.checkpoints.weights import load_pretrained
from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build import build_model
from engine.model.pretrained_files import load_config
from engine.runtime.host_store import HostStore
from tests.support.folders import make_model


@pytest.fixture
def opened(tmp_path):
    made = []

    def open_one(family: str, dtype: str, **changes):
        folder = make_model(tmp_path / family, family, **changes)
        model = build_model(load_config(str(folder)), ModelConfig(source=str(folder), dtype=dtype))
        store = HostStore(model.layouts, dtype, threads=1)
        store.allocate_weights()
        made.append(store)
        return folder, model, store

    yield open_one
    for store in made:
        store.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family, tied", [("qwen3", False), ("gpt2", True), ("mixtral", False)])
def test_planes_hold_what_the_library_loads(opened, family, tied, dtype):
    folder, model, store = opened(family, dtype, tie_word_embeddings=tied)
    told = []
    load_pretrained(model, str(folder), store, lambda done, total: told.append((done, total)))
    plain = dict(
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).named_parameters()
    )
    for unit in model.units:
        for spec in unit.layout.parameters:
            assert torch.equal(store.view(unit.name, spec.name), plain[spec.full_name]), (
                spec.full_name
            )
    size = model.parameter_count * getattr(torch, dtype).itemsize
    assert told == sorted(told) and told[0] == (0, 2 * size) and told[-1] == (2 * size, 2 * size)
    assert sum(done < size for done, _ in told) > 5, "reading is told too"


def test_giving_up_while_weights_are_read(opened):
    folder, model, store = opened("llama", "float32")

    class Enough(Exception):
        pass

    def give_up(done: int, total: int) -> None:
        if done > total / 10:
            raise Enough

    with pytest.raises(Enough):
        load_pretrained(model, str(folder), store, give_up)


def test_weights_of_another_shape_are_refused_by_name(opened, tmp_path):
    _, model, store = opened("llama", "float32")
    other = make_model(tmp_path / "other", "llama", intermediate_size=80)
    with pytest.raises(ModelError, match=r"has the shape \(80, 32\)"):
        load_pretrained(model, str(other), store)
