"""Streamed training of any family against plain training, with transformers' own code."""

from __future__ import annotations

import pytest
import torch

from engine.model.build.measure_shape import shape_of
from engine.planning.fit.buffer_sizes import fixed_items, offloaded_input_bytes
from engine.planning.schedule.choices import PlanChoices
from tests.support.families import TEXT_FAMILIES
from tests.support.optimizers import torch_optimizer
from tests.support.packed_rows import NOT_PACKED, PACKED
from tests.support.tiny import plain_loss, plain_model, random_batches, streamed

AMPLIFIES = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
"""Attention that is not scaled turns the rounding of one step into far more in the next: plain
training starts each step from the streamed weights, once they are compared.
"""
STEPS = 5
RATE = 1e-3
INSTALLED = TEXT_FAMILIES
SUPPORTED = [family for family in INSTALLED if family in {*PACKED, *NOT_PACKED}]


def law_one(
    config,
    resync: bool = False,
    tokens: int = 10,
    rows: int = 2,
    steps: int = STEPS,
    made=random_batches,
    loss_of=plain_loss,
    plain: torch.nn.Module | None = None,
) -> None:
    """Train `config` streamed and plainly, two micro-batches a step: losses, gradients and
    parameters agree, and what is allocated is what was said. `resync`: plain training goes on from
    the streamed weights after each step. `made` makes micro-batches, and `loss_of` is the loss of
    plain training on them. `plain` has weights of its own, and trains those that need a gradient.
    """
    plain = plain or plain_model(config)
    choices = PlanChoices().changed(
        micro_batches=2, offloaded_block_inputs=True, blocks_kept_in_slots=1
    )
    run = streamed(plain, choices, tokens=rows * tokens, config=config)
    try:
        assert_allocated_as_said(run, choices, rows * tokens)
        # A family whose code has no way to tie the two does not say so either.
        assert run.model.tied == getattr(config.get_text_config(), "tie_word_embeddings", False)
        names = {
            s.full_name: (u.name, s, o)
            for u in run.model.units
            for s, o in zip(u.layout.parameters, u.layout.offsets)
        }
        # tests/engine/model/blocks says how exact those of Gemma 3n and Gemma 4 can be.
        amplifies = resync and run.model.cross_layer_flow is not None
        named = plain.named_parameters()
        parameters = {name: p for name, p in named if p.requires_grad or name in names}
        assert set(names) == set(parameters)
        decayed = {name for name, (_, spec, _) in names.items() if spec.decay}
        optimizer = torch_optimizer(parameters, decayed, rate=RATE)
        for step in range(1, steps + 1):
            batches = made(2, rows, tokens, seed=step)
            device_updates = []
            run.engine.train_step(step, batches, RATE, device_updates.append)
            run.engine.drain()
            loss = loss_of(plain, batches)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
            assert device_updates[0].loss == pytest.approx(loss.item(), rel=2e-5)
            assert device_updates[0].grad_norm == pytest.approx(float(norm), rel=1e-4)
            for name, parameter in parameters.items():
                unit, spec, offset = names[name]
                mine = run.host_states.tensor(unit, "grad")[offset : offset + spec.numel].view(
                    spec.shape
                )
                true = torch.zeros_like(mine) if parameter.grad is None else parameter.grad
                error = (mine - true).norm() / norm
                # After the first step the two sets of weights differ by rounding, which training
                # amplifies.
                assert error < (1e-6 if step == 1 and not amplifies else 2e-5), (
                    f"step {step}: gradient of {name} is off by {error:.1e} of the global norm"
                )
                if parameter.grad is not None:
                    parameter.grad.mul_(min(1.0, 1.0 / (float(norm) + 1e-6)))
            optimizer.step()
            optimizer.zero_grad()
            if resync or step == steps:
                for name, parameter in parameters.items():
                    unit, spec, _ = names[name]
                    master = run.host_states.parameters.master(unit, spec.name)
                    torch.testing.assert_close(
                        master,
                        parameter.detach(),
                        rtol=1e-4,
                        atol=2e-5,
                        msg=lambda m: f"{name}: {m}",
                    )
                    parameter.data.copy_(master)
    finally:
        run.close()


def assert_allocated_as_said(run, choices: PlanChoices, tokens: int) -> None:
    """Law 5, to the byte: planes and block inputs on the host, buffers on the device."""
    shape = shape_of(run.model)
    assert (
        run.host_states.ram.nbytes
        == shape.states.host_bytes
        == sum(shape.states.plane_bytes().values())
    )
    planes = [
        run.host_states.tensor(unit.name, plane)
        for unit in run.model.units
        for plane in run.host_states.planes
    ]
    assert sum(plane.numel() * plane.element_size() for plane in planes) == shape.states.host_bytes
    assert run.engine.block_input_bytes == offloaded_input_bytes(shape, choices, tokens)
    shown = fixed_items(shape, choices, tokens * shape.hidden_width)
    assert run.engine.state.fixed_bytes() == sum(item.bytes for item in shown)
