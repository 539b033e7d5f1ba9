"""Four kinds of model with blocks of real size and few layers train streamed as they do resident,
in bf16.
"""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.model.build.attention_masks import forward
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cuda_backend import CudaBackend
from tests.support.bf16_parity import distance, plain_gradients
from tests.support.tiny import plain_model, random_batches, streamed

pytestmark = pytest.mark.gpu

VOCABULARY = 4096


def real_size(kind: str, shrink: int = 1):
    """Configurations as published (Qwen2.5 7B, Gemma 3 4B, Qwen3 30B-A3B, LFM2 1.2B) but for depth,
    vocabulary and, of the mixture, the number of experts. `shrink` divides the widths.
    """

    def wide(value: int) -> int:
        return value // shrink

    common = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if kind == "dense":
        return CONFIG_MAPPING["qwen2"](
            hidden_size=wide(3584),
            intermediate_size=wide(18944),
            num_hidden_layers=2,
            num_attention_heads=wide(28) or 1,
            num_key_value_heads=wide(4) or 1,
            **common,
        )
    if kind == "sliding":
        return CONFIG_MAPPING["gemma3_text"](
            hidden_size=wide(2560),
            intermediate_size=wide(10240),
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=wide(256),
            sliding_window=128,
            layer_types=[
                "sliding_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            **common,
        )
    if kind == "mixture":
        return CONFIG_MAPPING["qwen3_moe"](
            hidden_size=wide(2048),
            intermediate_size=wide(6144),
            moe_intermediate_size=wide(768),
            num_hidden_layers=2,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=wide(128),
            num_experts=16,
            num_experts_per_tok=8,
            **common,
        )
    return CONFIG_MAPPING["lfm2"](
        hidden_size=wide(2048),
        intermediate_size=wide(12288),
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "conv", "full_attention", "conv"],
        **common,
    )


def streamed_against_resident(config, backend, length: int) -> None:
    """One step: loss and gradient norm as plain bf16 transformers has them; gradients within about
    one bf16 rounding of those of the resident model with the same attention kernels, and no further
    from the truth in float32 than plain bf16 transformers with its own kernels is (a window has a
    kernel of its own here, a dense mask there).
    """
    start = plain_model(config)
    with torch.no_grad():
        for parameter in start.parameters():
            parameter.copy_(parameter.bfloat16())
    run = streamed(
        start,
        PlanChoices().changed(micro_batches=2),
        backend=backend,
        dtype="bfloat16",
        tokens=2 * length,
        loss_chunk=300,
    )
    device = backend.device
    batches, device_updates = random_batches(2, rows=2, length=length, seed=1), []
    run.engine.train_step(1, batches, 0.0, device_updates.append)
    run.engine.drain()
    resident = plain_model(copy.deepcopy(config), torch.bfloat16)
    resident.load_state_dict(start.state_dict())
    loss, gradients = plain_gradients(resident.to(device), batches)
    resident.set_attn_implementation(run.model.config.get_text_config()._attn_implementation)
    _, same_kernels = plain_gradients(resident, batches, forward)
    del resident
    _, exact = plain_gradients(start.to(device), batches)
    places = {
        s.full_name: (u, s, o)
        for u in run.model.units
        for s, o in zip(u.layout.parameters, u.layout.offsets)
    }
    ours = {
        n: run.host_states.tensor(u.name, "grad")[o : o + s.numel].view(s.shape).to(device)
        for n, (u, s, o) in places.items()
    }
    run.close()
    norm = float(torch.stack([g.norm() for g in gradients.values()]).norm())
    assert device_updates[0].loss == pytest.approx(loss, rel=2e-3)
    assert device_updates[0].grad_norm == pytest.approx(norm, rel=1e-2)
    assert distance(ours, same_kernels) < 5e-3
    assert distance(ours, exact) < 1.1 * distance(gradients, exact)


@pytest.mark.parametrize("kind", ["dense", "sliding", "mixture", "hybrid"])
def test_streamed_equals_resident_in_bf16(kind):
    backend = CudaBackend()
    try:
        streamed_against_resident(real_size(kind), backend, length=512)
    finally:
        gc.collect()
        torch.cuda.empty_cache()
