"""The masters have every bit that a checkpoint has, and an export in float32 gives them back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from engine.config.export_choice import ExportChoice
from engine.errors import ConfigError
from engine.model.build.pretrained_files import load_config
from engine.model.build.units import StreamedModel
from engine.model.hub.tensor_files import reading_dtype
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.runtime.host.host_states import HostStates
from engine.training.export.export import TrainedModel, write_model
from engine.training.weights.stream_loader import StreamingLoader
from tests.support.checkpoints_of_families import (
    bf16_model,
    kept_in_fp32,
    load_plain,
    round_to_bf16,
    save_family,
)
from tests.support.families import VOCAB
from tests.support.folders import make_tokenizer
from tests.support.sets import slow_but

pytestmark = pytest.mark.computing

TWELVE = (
    "llama",
    "qwen3",
    "gemma3_text",
    "phi3",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "olmo2",
    "falcon_h1",
    "ernie4_5_moe",
    "deepseek_v3",
    "nemotron_h",
)
CORRECTED = (
    "deepseek_v3",
    "axk1",
    "bailing_hybrid",
    "beam",
    "dots1",
    "exaone_moe",
    "hy_v3",
    "inkling_text",
    "kolibri1",
    "mimo_v2_flash",
    "nemotron_h",
)
"""Families with a persistent buffer that transformers keeps in fp32."""
A_FEW = ("llama", "gpt2", "mixtral", "ernie4_5_moe", "deepseek_v3")
SWEEP = "it sweeps over twelve families; a plain run has five"
STORED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def away_from_zero(values: torch.Tensor) -> torch.Tensor:
    """Returns fp32 values rounded to bf16, with ties away from zero: the rule of docs/planes.md."""
    bits = values.contiguous().view(torch.int32) + 0x8000
    return (bits & -0x10000).view(torch.float32).bfloat16()


def exported(model: StreamedModel, states: HostStates, source: Path, dtype: str) -> Path:
    """Exports the untrained model in `dtype`, and returns the folder."""
    folder = source.with_name(f"{source.name}-{dtype}")
    write_model(TrainedModel(model, states, make_tokenizer(), str(source), dtype), folder)
    return folder


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Returns every tensor of the weight files in a folder, as it is stored."""
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("family", slow_but(TWELVE, A_FEW, SWEEP))
def test_masters_and_exports_have_every_bit_of_the_checkpoint(family, stored, poured, tmp_path):
    source = save_family(tmp_path / "source", family, STORED[stored])
    model, states = poured(source)
    truth = dict(load_plain(source, torch.float32).named_parameters())
    for unit in model.units:
        for spec in unit.layout.parameters:
            true, name = truth[spec.full_name].detach(), spec.full_name
            assert torch.equal(states.parameters.master(unit.name, spec.name), true), name
            assert torch.equal(
                states.parameters.view(unit.name, spec.name), away_from_zero(true)
            ), name
    whole, rounded = weights_in(source), weights_in(exported(model, states, source, "auto"))
    given_back = weights_in(exported(model, states, source, "float32"))
    assert given_back.keys() == rounded.keys() == whole.keys()
    for name, tensor in whole.items():
        if tensor.is_floating_point():
            assert given_back[name].dtype == torch.float32
            assert torch.equal(given_back[name], tensor.float()), name
            expected = tensor.float()
            if rounded[name].dtype != torch.float32:  # not one that stays in fp32
                expected = away_from_zero(expected)
            assert torch.equal(rounded[name], expected), name
    assert load_config(str(source.with_name("source-float32"))).dtype == torch.float32


@pytest.mark.parametrize("family", slow_but(CORRECTED, ("deepseek_v3", "beam"), SWEEP))
def test_an_untrained_export_has_the_logits_of_its_source(family, poured, tmp_path):
    """Buffers of 8 +- 0.2 moved them by a quarter, when they were rounded to bf16."""
    source = save_family(tmp_path / "source", family, bias=8.0)
    round_to_bf16(source, kept_in_fp32(bf16_model(source, load_config(str(source)))))
    model, states = poured(source)
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
    for dtype, computed in (("auto", torch.bfloat16), ("float32", torch.float32)):
        folder = exported(model, states, source, dtype)
        with torch.no_grad():
            before, after = (
                load_plain(each, computed)(input_ids=ids, use_cache=False).logits
                for each in (source, folder)
            )
        assert torch.equal(before, after), dtype


def test_one_fp16_weight_in_eight_is_a_tie_and_is_rounded_away_from_zero():
    """torch rounds half of the ties the other way, to even."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    normal = every[every.isfinite() & (every.abs() >= 2**-14)].float()
    states = HostStates(
        [lay_out("u", [ParameterSpec("w", "w", tuple(normal.shape), True)])], "bfloat16", threads=1
    )
    states.allocate_weights()
    states.parameters.write("u", "w", normal)
    high, master = states.parameters.view("u", "w").float(), states.parameters.master("u", "w")
    ties = normal.view(torch.int32).numpy().astype(np.uint32) & 0xFFFF == 0x8000
    assert ties.mean() == 1 / 8
    assert torch.equal(master, normal)
    assert torch.equal(high, away_from_zero(normal).float())
    others = torch.from_numpy(~ties)
    assert torch.equal(high[others], normal.bfloat16().float()[others])
    assert ((high.abs() > normal.abs()) == torch.from_numpy(ties))[torch.from_numpy(ties)].all()
    assert 0.49 < (high != normal.bfloat16().float()).float().mean() * 8 < 0.51
    states.close()


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_written_and_freed_while_the_next_are_read(tied, poured, tmp_path, monkeypatch):
    """Never do two weights of a checkpoint stay in memory beside their planes."""
    source = save_family(tmp_path / "source", "gemma3_text" if tied else "llama")
    held: list[torch.nn.Parameter] = []
    write, rest = StreamingLoader._write, StreamingLoader.load_rest
    left: list[int] = []

    def watched(self, full_name, parameter):
        assert all(each.untyped_storage().nbytes() <= 4 for each in held), full_name
        write(self, full_name, parameter)
        held.append(parameter)

    def count(self, loaded):
        left.append(len(self._waiting))
        rest(self, loaded)

    monkeypatch.setattr(StreamingLoader, "_write", watched)
    monkeypatch.setattr(StreamingLoader, "load_rest", count)
    model, _ = poured(source)
    assert len(held) == sum(len(layout.parameters) for layout in model.layouts)
    assert left == [0], "every weight was poured while transformers was reading"
    assert all(each.untyped_storage().nbytes() <= 4 for each in held)


def test_a_tied_weight_is_found_under_its_other_name(poured, tmp_path):
    from safetensors.torch import save_file

    source = save_family(tmp_path / "source", "gemma3_text")
    tensors = load_file(source / "model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = embedding
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    model, states = poured(source)
    (spec,) = model.unit("embed").layout.parameters
    assert model.tied and torch.equal(states.parameters.master("embed", spec.name), embedding)


@pytest.mark.parametrize("stored", STORED)
def test_a_checkpoint_in_bf16_alone_is_read_in_bf16(stored, tmp_path):
    folder = save_family(tmp_path / "source", "llama", STORED[stored])
    expected = torch.bfloat16 if stored == "bf16" else torch.float32
    assert reading_dtype(folder) == expected
    assert reading_dtype(tmp_path) == reading_dtype(None) == torch.float32
    (folder / "model.safetensors").write_bytes(b"\xff" * 20)
    assert reading_dtype(folder) == torch.float32


def test_an_unknown_dtype_of_an_export_is_refused():
    with pytest.raises(ConfigError, match=r"'int8' is unknown; give auto, bfloat16, float32\."):
        ExportChoice(dtype="int8")
