"""All memory of the device except activations is kept here: slots, gradient accumulators, staging
buffers, rings and update buffers.

Its size depends on the largest unit and on the plan's choices, never on the depth of the model.
"""

from __future__ import annotations

import torch
from torch import nn

from engine.config.optimizers import OPTIMIZERS
from engine.model.build.units import TORCH_DTYPES, StreamedModel, Unit
from engine.planning.layout.layout import Fp32Part
from engine.planning.layout.update_buffers import UpdateBuffer
from engine.planning.schedule.buffers import EMBED, HEAD, Buffer, BufferKind
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.shards import WHOLE, Shards, largest_updated
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.optimizers import device_optimizer


class Fp32Weights:
    """Beside a slot, a `Fp32Weights` holds the weights that a bf16 model computes with in fp32,
    such as the router of some mixtures of experts.

    The host has every weight as two planes, whatever the device computes with. The slot receives
    weight_high of all weights; weight_low follows for these few, and both are joined here.
    """

    def __init__(self, numel: int, device: torch.device):
        self.values = torch.zeros(numel, dtype=torch.float32, device=device)
        """Weights, float32 [numel]; the parameters of templates are views of them."""
        self.low = torch.zeros(numel, dtype=torch.int16, device=device)
        """The values of weight_low are copied into this int16 [numel]."""

    def fetch(self, part: Fp32Part, high: torch.Tensor, low: torch.Tensor) -> None:
        """Takes the weights of `part` from `high`, a whole plane on the device, and `low`, a whole
        plane on the host, both [numel of the unit]. It does not wait for the copy.
        """
        here = self.low[part.place : part.place + part.numel]
        here.copy_(low[part.start : part.stop], non_blocking=True)
        self.join(part, high[part.start : part.stop], here)

    def join(self, part: Fp32Part, high: torch.Tensor, low: torch.Tensor) -> None:
        """Sets the weights of `part` from the bf16 `high` and the int16 `low`, both [numel of the
        part] on the device.
        """
        # `data` has its own version counter, so autograd does not notice this write, as in a
        # prefetch. The sum is made in place, so that no memory is allocated beside the
        # slots.
        bits = self.values.data[part.place : part.place + part.numel].view(torch.int32)
        bits.copy_(high.view(torch.int16)).bitwise_left_shift_(16).add_(low)


class DeviceState:
    """Owns the buffers of one plan on one device.

    A slot is a flat buffer; templates (`engine.runtime.step.templates`) are block modules whose
    parameters are views of it. Overwriting a slot does not change an autograd version, so only the
    plan's waits protect a slot that is still in use.
    """

    def __init__(
        self,
        model: StreamedModel,
        plan: StepPlan,
        device: torch.device,
        ring_numel: int,
        states: HostStates,
        update_buffer: UpdateBuffer,
    ):
        """`ring_numel` is the number of elements of a ring buffer. `states` has the planes, and
        `update_buffer` the sizes of the buffer for a chunk of them that the device updates.
        """
        self._update_buffer = update_buffer
        self._has_rounded_states = OPTIMIZERS[states.optimizer].is_rounded
        self.device = device
        self.dtype = TORCH_DTYPES[model.dtype]
        self._shards = plan.shards
        self._units = {unit.name: unit for unit in model.units}
        self._resident_bytes = states.placement.device_bytes
        self._resident_memory = {slot: unit for unit, slot in plan.gpu_resident}
        self._make_slots(plan, states)
        self._shared = {buffer for buffer, _ in plan.arena}
        """Buffers in the memory of others."""
        if plan.embed_and_head_in_kept_gradients:
            self._shared |= {Buffer(BufferKind.STAGING, EMBED), Buffer(BufferKind.MAIN_GRAD, HEAD)}
        self._allocate_arena(plan)
        self.stagings = {
            name: self._zeros(self._shards.numel(self._largest(units)))
            for name, units in plan.stagings.items()
            if not plan.embed_and_head_in_kept_gradients
        }
        """Staging buffers: flat tensors that hold a rounded gradient until it is copied to the
        host.
        """
        in_main_grads = self._rounded_in_main_grads(plan)
        self.stagings |= in_main_grads
        self._shared |= in_main_grads.keys()
        if plan.embed_and_head_in_kept_gradients:
            self._place_embed_and_head_in_kept_gradients()
        self.rings = {
            name: torch.empty(ring_numel, dtype=self.dtype, device=device) for name in plan.rings
        }
        """Ring buffers: flat tensors through which block inputs are copied to the host or back."""
        self._cut_update_buffers(plan)
        self.optimizer = device_optimizer(states.optimizer, device)
        """Updates chunks on the device."""
        self.clip = torch.zeros(2, dtype=torch.float32, device=device)
        """The float32 [2] are the clip factor of the step and a flag: 1 if the step may be applied,
        else 0.
        """
        self.norms = torch.zeros(len(model.units) + 1, dtype=torch.float64, device=device)
        """The float64 [units + 1] are the squared gradient norm of each unit, followed by the
        loss. With several ranks they are those of this rank's shards.
        """
        self.totals = torch.zeros_like(self.norms)
        """Sums of `norms` over all ranks, where there are several."""
        self.one = torch.ones(1, dtype=torch.float32, device=device)
        """Ranks that only wait for each other exchange this float32 [1]."""

    # ------------------------------------------------------------------ buffers

    def _make_slots(self, plan: StepPlan, states: HostStates) -> None:
        self.slots = {
            name: self._zeros(max(map(self._slot_numel, units)))
            for name, units in plan.slots.items()
            if name not in self._resident_memory
        }
        """Slots: flat tensors [numel of the largest unit of each] that hold the weights of a unit.
        That of a unit that lives on the device is its plane of weights.
        """
        for slot, unit in self._resident_memory.items():
            self.slots[slot] = states.tensor(unit, "weight_high")
        self.keep_in_fp32: dict[Buffer, Fp32Weights] = {}
        """The weights that stay in fp32, for each slot whose units have any."""
        for slot, names in plan.slots.items():
            numel = max(self._units[each].layout.fp32_numel for each in names)
            if numel:
                self.keep_in_fp32[slot] = Fp32Weights(numel, self.device)
        self.join_fp32_of_resident(states)

    def _allocate_arena(self, plan: StepPlan) -> None:
        """Allocates the fp32 gradient accumulators. Those of the plan's arena are contiguous in
        memory, and update buffers share it, since at any time a step needs only one of the two.
        """
        sizes: dict[Buffer, int] = {}
        for name, units in plan.grads.items():
            is_shard = name.kind == BufferKind.MAIN_GRAD_SHARD
            of_unit = self._shards.numel if is_shard else self._shards.padded
            sizes[name] = of_unit(self._largest(units))
        self._arena = torch.zeros(plan.arena_bytes, dtype=torch.uint8, device=self.device)
        self.grads: dict[Buffer, torch.Tensor] = {}
        for name, start in plan.arena:
            self.grads[name] = self._arena[start : start + 4 * sizes[name]].view(torch.float32)
        for name, numel in sizes.items():
            if name not in self.grads:
                self.grads[name] = torch.zeros(numel, dtype=torch.float32, device=self.device)

    def _rounded_in_main_grads(self, plan: StepPlan) -> dict[Buffer, torch.Tensor]:
        """Returns the staging buffers that take the second half of the memory of an accumulator."""
        found = {}
        for unit in plan.rounded_in_main_grads:
            halves = self.grads[Buffer(BufferKind.MAIN_GRAD, unit)].view(self.dtype)
            found[Buffer(BufferKind.STAGING, unit)] = halves[halves.numel() // 2 :]
        return found

    def join_fp32_of_resident(self, states: HostStates) -> None:
        """Sets the fp32 weights beside the slots of units that live on the device, whose planes may
        have been filled anew. From then on updates do so.
        """
        for slot in self._resident_memory.keys() & self.keep_in_fp32.keys():
            unit = self._resident_memory[slot]
            high, low = states.tensor(unit, "weight_high"), states.tensor(unit, "weight_low")
            for part in self._units[unit].layout.fp32_parts:
                inside = slice(part.start, part.stop)
                self.keep_in_fp32[slot].join(part, high[inside], low[inside])

    def _place_embed_and_head_in_kept_gradients(self) -> None:
        """Makes the staging buffers of a plan in which embed and head use their memory. The slot
        begins where the gradient of embed is kept on the GPU, and the fp32 accumulator of the head
        where that of the first block is. The blocks follow each other.
        """
        embed, *blocks, head = (unit.layout for unit in self._units.values())
        self.stagings[Buffer(BufferKind.STAGING, EMBED)] = self.slots[slot_of(EMBED)][: embed.numel]
        self.stagings[Buffer(BufferKind.STAGING, HEAD)] = self._zeros(
            self._shards.numel(head.numel)
        )
        numels = [block.numel for block in blocks]
        self._kept_gradients = torch.zeros(sum(numels), dtype=self.dtype, device=self.device)
        for block, part in zip(blocks, self._kept_gradients.split(numels)):
            self.stagings[Buffer(BufferKind.STAGING, block.unit)] = part
        total = self._kept_gradients.view(torch.uint8)[: 4 * head.numel].view(torch.float32)
        self.grads[Buffer(BufferKind.MAIN_GRAD, HEAD)] = total

    def _cut_update_buffers(self, plan: StepPlan) -> None:
        """Places the update buffers in the arena, one after the other."""
        self.states: dict[Buffer, dict[str, torch.Tensor]] = {}
        size = self._update_buffer.bytes
        for number, buffer in enumerate(plan.update_buffers):
            self.states[buffer] = self._states(self._arena[number * size : (number + 1) * size])

    def _states(self, memory: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns one plane of each kind as views of a buffer's `memory`, a flat tensor of
        bytes.
        """
        planes, start = {}, 0
        for plane, size in self._update_buffer.planes:
            view = memory[start : start + size].view(self._plane_dtype(plane))
            # This makes a separate tensor on the same memory, because torch does not compile
            # functions that change views of different dtypes.
            planes[plane] = torch.from_dlpack(view) if size else view
            start += size
        return planes

    def _plane_dtype(self, plane: str) -> torch.dtype:
        if plane in ("weight_high", "grad"):
            return self.dtype
        if plane == "weight_low":
            return torch.int16
        return torch.uint8 if self._has_rounded_states else torch.float32

    def _largest(self, units: tuple[str, ...]) -> int:
        """Returns the elements of the largest gradient of `units`."""
        return max(self._units[unit].layout.numel for unit in units)

    def _slot_numel(self, unit: str) -> int:
        """Returns the elements that the weights of a unit take in a slot, with those of all
        shards.
        """
        layout = self._units[unit].layout
        return self._shards.slot_numel(layout.numel, layout.high_numel)

    def _zeros(self, numel: int) -> torch.Tensor:
        """Returns a flat buffer [numel] in the dtype of the model."""
        return torch.zeros(numel, dtype=self.dtype, device=self.device)

    def views(self, slot: Buffer, unit: Unit) -> list[nn.Parameter]:
        """Returns the unit's parameters as views of a slot, in layout order."""
        weights = self.slots[slot]
        keep_in_fp32 = iter(unit.layout.fp32_parts)
        views: list[nn.Parameter] = []
        for spec, offset in zip(unit.layout.parameters, unit.layout.offsets):
            if spec.keep_in_fp32:
                place = next(keep_in_fp32).place
                flat = self.keep_in_fp32[slot].values[place : place + spec.numel]
            else:
                flat = weights[offset : offset + spec.numel]
            views.append(nn.Parameter(flat.view(spec.shape), requires_grad=not spec.frozen))
        return views

    def fixed_bytes(self) -> int:
        """Returns the bytes of all buffers that the plan keeps on the device, the planes of units
        that live there included.
        """
        named = {**self.grads, **self.stagings}
        own = [tensor for buffer, tensor in named.items() if buffer not in self._shared]
        keep_in_fp32 = [
            part for each in self.keep_in_fp32.values() for part in (each.values, each.low)
        ]
        slots = [slot for buffer, slot in self.slots.items() if buffer not in self._resident_memory]
        tensors = [
            *slots,
            *keep_in_fp32,
            *own,
            self._arena,
            *self.rings.values(),
            self.norms,
            self.clip,
        ]
        buffers = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return buffers + self._resident_bytes


def update_buffer_of(states: HostStates, chunks: int, shards: Shards = WHOLE) -> UpdateBuffer:
    """Returns the sizes of a buffer in which the device updates a chunk of a unit. chunks: number
    of them in the largest shard of a block.
    """
    units = [layout.state_counts for layout in states.layouts.values()]
    largest = shards.numel(largest_block(states))
    return UpdateBuffer.of(states.dtype, states.optimizer, units, largest, chunks)


def largest_block(states: HostStates) -> int:
    """Returns the elements of the largest block, by which chunks are measured."""
    numel = {unit: layout.numel for unit, layout in states.layouts.items()}
    embed_and_head = [numel.pop(unit) for unit in (EMBED, HEAD) if unit in numel]
    return largest_updated(numel.values(), embed_and_head)
