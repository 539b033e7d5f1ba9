"""What a plan takes on the device, as it is predicted, and what the engine allocates for it."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engine.model.build.measure_shape import shape_of
from engine.model.build.units import StreamedModel
from engine.planning.fit.buffer_sizes import fixed_items, update_buffer
from engine.planning.schedule.build import build_step_plan
from engine.planning.schedule.choices import PlanChoices, PlaneSizes
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.device_state import DeviceState

TOKENS = 24


def filled_states(model: StreamedModel) -> HostStates:
    """Returns host states with the planes of a model."""
    states = HostStates(model.layouts, model.dtype, threads=1)
    states.allocate_weights()
    states.allocate_states()
    return states


def agreeing_plans(model: StreamedModel, states: HostStates, plans: Iterable[PlanChoices]) -> int:
    """Asserts that the fixed buffers of each of `plans` that the model takes are predicted to the
    byte, and returns how many it takes. states: has its planes, divided as `plans` say.
    """
    shape, names = shape_of(model), [unit.name for unit in model.blocks]
    numel = {unit.name: unit.numel for unit in shape.units}
    tried = 0
    for choices in plans:
        has_frozen_update = set(choices.updates.device_updated_units) & set(shape.frozen_units)
        if (
            has_frozen_update
            or choices.activations.blocks_without_recompute > len(names) - shape.forward_blocks
        ):
            continue
        buffer = update_buffer(shape, choices)
        sizes = PlaneSizes(
            numel=numel,
            chunk_numel=buffer.numel,
            buffer_bytes=buffer.bytes,
            item_bytes=shape.item_bytes,
            frozen=shape.frozen_units,
        )
        plan = build_step_plan(names, model.tied, choices, sizes)
        states.placement.arrange(choices.placement.gpu_resident(names), CpuBackend())
        width = TOKENS * shape.hidden_size
        state = DeviceState(model, plan, torch.device("cpu"), width, states, buffer)
        predicted = sum(item.bytes for item in fixed_items(shape, choices, width))
        assert state.fixed_bytes() == predicted, choices
        tried += 1
    return tried
