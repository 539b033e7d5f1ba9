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
from engine.planning.layout.moments import MOMENTS, MomentKind
from engine.runtime.host.host_adamw import AdamWSettings, HostAdamW
from engine.training.loop.lr_schedule import learning_rate
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


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_steps_are_those_of_torch_s_adamw(make, dtype):
    """Torch updates fp32 masters with the same gradients."""
    training = make(dtype)
    masters = {unit: each.masters() for unit, each in training.states.items()}
    decayed = []
    others = []
    for unit, states in training.states.items():
        split = states.layout.decay_numel
        masters[unit].requires_grad_()
        parts = masters[unit].detach().split([split, masters[unit].numel() - split])
        decayed.append(parts[0].requires_grad_())
        others.append(parts[1].requires_grad_())
    adamw = torch.optim.AdamW(
        [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
        weight_decay=OPTIM.weight_decay,
    )
    begun = {unit: plane.detach().clone() for unit, plane in masters.items()}
    for number in range(1, 4):
        training.step(number, rows(number))
        for first, second, states in zip(decayed, others, training.states.values()):
            split = states.layout.decay_numel
            first.grad = states.grad[:split].float()
            second.grad = states.grad[split:].float()
        torch.nn.utils.clip_grad_norm_([*decayed, *others], 1.0)
        for group in adamw.param_groups:
            group["lr"] = learning_rate(OPTIM, number, STEPS)
        adamw.step()
    for unit, states in training.states.items():
        moved = (masters[unit] - begun[unit]).abs().max()
        assert moved > 1e-3
        assert (states.masters() - masters[unit]).abs().max() < 1e-3 * moved, unit


@pytest.mark.parametrize("name", moment_quality.KINDS)
def test_steps_are_those_of_the_engine_s_host(make, name):
    """The host updates its own planes with the same gradients."""
    kind = moment_quality.KINDS[name]
    training = make(kind=kind)
    states = training._store
    states.allocate_states(optimizer=kind.optimizer)
    adamw = HostAdamW(states, AdamWSettings(weight_decay=OPTIM.weight_decay))
    begun = {unit: each.masters() for unit, each in training.states.items()}
    for number in range(1, 3):
        training.step(number, rows(number))
        for unit, states in training.states.items():
            states.tensor(unit, "grad").copy_(states.grad)
            rate = learning_rate(OPTIM, number, STEPS)
            adamw.update(unit, number, rate, float(training.clip[0]))
    adamw.close()
    for unit, states in training.states.items():
        if unit == "embed" and not kind.exact_embed:
            continue  # the engine has no such moments
        high, low = (states.tensor(unit, plane) for plane in ("weight_high", "weight_low"))
        bits = (high.view(torch.int16).int() << 16) + low.int()
        moved = (states.masters() - begun[unit]).abs().max()
        assert moved > 1e-3
        assert (states.masters() - bits.view(torch.float32)).abs().max() < 1e-3 * moved, unit
        for plane in MOMENTS:
            ours, theirs = states.moments[plane], states.tensor(unit, plane)
            assert ours.shape == theirs.shape
            for range_ in kind.layout(states.layout).moment_ranges(kind.optimizer):
                # Of fp32 moments there is no row of bytes where all are so.
                part = slice(range_.place, range_.place + range_.bytes)
                found, expected = (each.view(torch.uint8)[part] for each in (ours, theirs))
                if range_.kind == MomentKind.FP32:
                    numbers = expected.view(torch.float32)
                    error = (found.view(torch.float32) - numbers).abs().max()
                    assert error < 1e-5 * numbers.abs().max(), (unit, plane)
                    continue
                # A moment that differs in its last bit may be rounded to the next code.
                same = (found == expected).float().mean()
                assert same > 0.99, (unit, plane, float(same))


def test_the_embedding_s_moments_are_in_8_bits_only_without_the_exception(make):
    sizes, kinds = {}, {}
    for name, kind in moment_quality.KINDS.items():
        training = make(kind=kind)
        sizes[name] = training.moment_bytes
        layout = kind.layout(training.states["embed"].layout)
        kinds[name] = {range_.kind for range_ in layout.moment_ranges(kind.optimizer)}
    assert sizes["adamw"] > sizes["adamw_bf16"] > sizes["adamw_8bit"] > sizes["adamw_8bit_all"]
    assert kinds["adamw_8bit"] == {MomentKind.BF16}
    assert kinds["adamw_8bit_all"] == {MomentKind.CODES}


def test_runs_begin_alike_and_repeat_to_the_bit(make):
    training = make()

    def trained() -> list[torch.Tensor]:
        training.begin(Moments("adamw_bf16"), OPTIM, STEPS, seed=3)
        for number in range(1, 4):
            training.step(number, rows(number))
        return [states.masters() for states in training.states.values()]

    for first, again in zip(trained(), trained()):
        assert torch.equal(first, again)


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
    told = capsys.readouterr().out
    assert "| adamw_8bit_all-0 |" in told and told.count("adamw-1 took") == 1


def test_a_token_file_keeps_every_token(tmp_path):
    training = np.array([0, 65_535, 65_536, 151_935], dtype=np.int32)
    write_tokens(tmp_path / "t.npz", training, np.array([7, 131_072]))
    found = read_tokens(tmp_path / "t.npz")
    assert found.training.tolist() == training.tolist()
    assert found.validation.tolist() == [7, 131_072]
