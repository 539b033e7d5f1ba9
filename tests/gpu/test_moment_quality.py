"""The trainer of `tests.gpu.moment_quality` computes what plain transformers and torch do, and
updates as the engine's host does.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config.settings import OptimConfig
from tests.gpu import moment_quality
from tests.gpu.in_memory import InMemoryTraining, Moments, TrainingSettings
from tests.gpu.token_file import read_tokens, write_tokens

pytestmark = [
    pytest.mark.computing,
    pytest.mark.slow("without a GPU it tries a command for the GPU"),
]

VOCABULARY = 384
SHAPE = {
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
OPTIM = OptimConfig(learning_rate=1e-2, schedule="cosine", warmup_steps=2)
STEPS = 10
EXACT = Moments("adamw")


@pytest.fixture
def make():
    """Makes trainings on the CPU, and closes them."""
    made = []

    def training(dtype: str = "bfloat16", kind: Moments = EXACT) -> InMemoryTraining:
        settings = TrainingSettings(4, 32, dtype, loss_chunk=50)
        made.append(
            InMemoryTraining(CONFIG_MAPPING["qwen2"](**SHAPE), settings, torch.device("cpu"))
        )
        made[-1].begin(kind, OPTIM, STEPS, seed=0)
        return made[-1]

    yield training
    for each in made:
        each.close()


def rows(seed: int) -> torch.Tensor:
    """Rows of a step in which low tokens are frequent, int64 [4, 33]."""
    generator = torch.Generator().manual_seed(seed)
    return (VOCABULARY * torch.rand(4, 33, generator=generator) ** 3).long()


def named(training: InMemoryTraining, planes: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns parameters by their full names, from a plane of each unit."""
    found = {}
    for unit, states in training.states.items():
        for spec, offset in zip(states.layout.parameters, states.layout.offsets):
            part = planes[unit][offset : offset + spec.numel]
            found[spec.full_name] = part.view(spec.shape).clone()
    return found


def test_gradients_are_those_of_plain_transformers(make):
    training = make("float32")
    plain = AutoModelForCausalLM.from_config(CONFIG_MAPPING["qwen2"](**SHAPE)).float()
    masters = named(training, {unit: each.masters() for unit, each in training.states.items()})
    missing, unexpected = plain.load_state_dict(masters, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    ids = rows(1)
    training.ids.copy_(ids)
    training.forward_backward()
    logits = plain(input_ids=ids[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    loss = float(loss.detach())
    assert float(training.norms[-1]) == pytest.approx(loss, rel=1e-6)
    gradients = named(training, {unit: each.grad for unit, each in training.states.items()})
    for name, parameter in plain.named_parameters():
        error = (gradients[name] - parameter.grad).abs().max() / parameter.grad.abs().max()
        assert error < 1e-5, name
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert float(training.norms[:-1].sum().sqrt()) == pytest.approx(float(norm), rel=1e-5)
    assert training.evaluate(ids) == pytest.approx(loss, rel=1e-6)


def test_each_epoch_has_all_rows():
    order = moment_quality.row_order(7, 20, seed=1)
    assert sorted(order[:7]) == sorted(order[7:14]) == list(range(7))
    assert list(order[:7]) != list(moment_quality.row_order(7, 20, seed=2)[:7])
    found = moment_quality.in_rows(np.arange(21, dtype=np.int32), 5)
    assert found[:, 0].tolist() == [0, 5, 10, 15] and found[1].tolist() == [5, 6, 7, 8, 9, 10]


def test_the_command_trains_and_goes_on_in_another_call(tmp_path, monkeypatch, capsys):
    generator = np.random.default_rng(0)
    tokens = (VOCABULARY * generator.random(5000) ** 3).astype(np.int32)
    tokens[0] = 70_000 % VOCABULARY
    write_tokens(tmp_path / "tokens.npz", tokens[:4000], tokens[4000:])
    (tmp_path / "shape.json").write_text(json.dumps(SHAPE))
    command = [
        *("quality", str(tmp_path / "tokens.npz"), str(tmp_path / "out.json")),
        *("--shape", str(tmp_path / "shape.json"), "--rows", "4", "--length", "32"),
        *("--steps", "16", "--every", "8", "--rate", "1e-2", "--warmup", "2"),
    ]
    monkeypatch.setattr(moment_quality, "TRIAL", (1, 2))
    for runs in (("adamw-0", "adamw-1"), ("adamw-1", "adamw_8bit_all-0")):
        monkeypatch.setattr(sys, "argv", [*command, "--runs", *runs])
        moment_quality.main()
    results = moment_quality.load([tmp_path / "out.json"])
    assert set(results) == {"adamw-0", "adamw-1", "adamw_8bit_all-0"}
    begun = {run.validation[0][1] for run in results.values()}
    assert len(begun) == 1
    for run in results.values():
        assert run.finished and not run.not_applied
        assert [step for step, _ in run.validation] == [0, 8, 16]
        assert run.validation[-1][1] < run.validation[0][1] - 0.1
    found = capsys.readouterr().out
    assert "| adamw_8bit_all-0 |" in found and found.count("adamw-1 took") == 1


def test_a_token_file_keeps_every_token(tmp_path):
    training = np.array([0, 65_535, 65_536, 151_935], dtype=np.int32)
    write_tokens(tmp_path / "t.npz", training, np.array([7, 131_072]))
    found = read_tokens(tmp_path / "t.npz")
    assert found.training.tolist() == training.tolist()
    assert found.validation.tolist() == [7, 131_072]
