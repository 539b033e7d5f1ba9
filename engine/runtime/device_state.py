"""Everything that lives on the device besides activations: slots, templates, gradient sums, staging
and rings.

Its size depends on the largest unit and on the plan's choices, never on the depth of the model.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from engine.model.layout import PLANE_ITEM_BYTES
from engine.model.units import TORCH_DTYPES, StreamedModel, Unit
from engine.plan.assign_slots import slot_of
from engine.plan.buffers import EMBED, HEAD, Buffer, BufferKind
from engine.plan.ops import StepPlan
from engine.runtime.compiled import CompiledBlock


class DeviceState:
    """Buffers of one plan on one device.

    A slot is a flat buffer; templates are block modules whose parameters are views into it.
    Overwriting a slot bumps no autograd version, so nothing but the plan's waits protects a slot
    that is still in use.
    """

    def __init__(
        self, model: StreamedModel, plan: StepPlan, device: torch.device, boundary_numel: int = 0
    ):
        self.model, self.device = model, device
        self.dtype, self._compiles = TORCH_DTYPES[model.dtype], plan.compiled
        self._units = {unit.name: unit for unit in model.units}
        self.slots = {name: self._zeros(units, self.dtype) for name, units in plan.slots.items()}
        buffer_bytes = plan.piece_numel * sum(PLANE_ITEM_BYTES[model.dtype].values())
        sums = {
            name: max(self._units[unit].layout.numel for unit in units)
            for name, units in plan.grads.items()
        }
        self._shared = set(plan.arena)
        shared = [Buffer(BufferKind.SUM, unit) for unit in plan.arena]
        self._spare, self._piece_numel = plan.spare_buffers, plan.piece_numel
        own = len(plan.update_buffers) - len(self._spare)
        self._arena = torch.zeros(
            max(4 * sum(sums[name] for name in shared), own * buffer_bytes),
            dtype=torch.uint8,
            device=device,
        )
        self.grads, start = {}, 0
        for name in shared:
            self.grads[name] = self._arena[start : start + 4 * sums[name]].view(torch.float32)
            start += 4 * sums[name]
        self.grads |= {
            name: torch.zeros(numel, dtype=torch.float32, device=device)
            for name, numel in sums.items()
            if name not in self.grads
        }
        self.stagings = {
            name: self._zeros(units, self.dtype) for name, units in plan.stagings.items()
        }
        self.rings = {
            name: torch.empty(boundary_numel, dtype=self.dtype, device=device)
            for name in plan.rings
        }
        self.states = {
            buffer: self._states(
                self._arena[k * buffer_bytes : (k + 1) * buffer_bytes], plan.piece_numel
            )
            for k, buffer in enumerate(plan.update_buffers[len(self._spare) :])
        }
        """In each update buffer that is there, one piece of each plane."""
        self.clip = torch.zeros(2, dtype=torch.float32, device=device)
        """Clip factor of the step, and 1 where it may be applied."""
        self.norms = torch.zeros(len(model.units) + 1, dtype=torch.float32, device=device)
        """Squared gradient norm of each unit, and the loss last."""
        self._training: bool | None = None
        self._templates: dict[tuple[Buffer, int], nn.Module] = {}
        self._parameters: dict[tuple[Buffer, int], list[nn.Parameter]] = {}
        self.compiled: dict[tuple[Buffer, int], CompiledBlock] = {}
        """The templates compiled, where the plan says so."""
        self._place_skeleton()
        for slot, units in plan.slots.items():
            for name in units:
                unit = self._units[name]
                if unit.block is not None and (slot, unit.kind) not in self._templates:
                    self._make_template(slot, unit)

    def _states(self, memory: torch.Tensor, numel: int) -> dict[str, torch.Tensor]:
        """One plane of each kind of `numel` elements in a buffer's `memory`, a flat tensor of
        bytes.
        """
        planes, start = {}, 0
        for plane, item in PLANE_ITEM_BYTES[self.model.dtype].items():
            view = memory[start : start + item * numel].view(self._plane_dtype(plane))
            # A tensor of its own on the same memory: torch does not compile what changes views of
            # different dtypes.
            planes[plane] = torch.from_dlpack(view) if numel else view
            start += item * numel
        return planes

    def _plane_dtype(self, plane: str) -> torch.dtype:
        return {"weight_high": self.dtype, "weight_low": torch.int16, "grad": self.dtype}.get(
            plane, torch.float32
        )

    def lend(self) -> None:
        """Make the spare buffers, from memory that activations have left: on COMPUTE, whose
        allocator knows when that is. Its segments must be growing ones
        (`engine.runtime.cuda_backend`), so that what activations of other sizes left is one piece.
        """
        for buffer in self._spare:
            self.states[buffer] = {
                plane: torch.empty(
                    self._piece_numel, dtype=self._plane_dtype(plane), device=self.device
                )
                for plane in PLANE_ITEM_BYTES[self.model.dtype]
            }

    def reclaim(self) -> None:
        """Give them back; nothing may use them any more."""
        for buffer in self._spare:
            self.states.pop(buffer, None)

    def _zeros(self, units: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
        numel = max(self._units[unit].layout.numel for unit in units)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _place_skeleton(self) -> None:
        """Bind the embed and head parameters to their slots, and bring every buffer to the device."""
        skeleton = self.model.skeleton
        inside = {id(m) for block in skeleton.blocks for m in block.modules()}
        for module in skeleton.model.modules():
            if id(module) not in inside:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        module._buffers[name] = buffer.to(self.device)
        self.outer_parameters: dict[str, list[nn.Parameter]] = {}
        for name in (EMBED, HEAD):
            unit = self._units[name]
            parameters = self._views(slot_of(name), unit)
            for spec, parameter in zip(unit.layout.parameters, parameters):
                for module, attribute in unit.bindings[spec.name]:
                    module._parameters[attribute] = parameter
            self.outer_parameters[name] = parameters
        for unit in self.model.blocks:
            unit.move_buffers(self.device)

    def _views(self, slot: Buffer, unit: Unit) -> list[nn.Parameter]:
        weights = self.slots[slot]
        return [
            nn.Parameter(weights[offset : offset + spec.numel].view(spec.shape))
            for spec, offset in zip(unit.layout.parameters, unit.layout.offsets)
        ]

    def _make_template(self, slot: Buffer, unit: Unit) -> None:
        config = getattr(unit.block, "config", None) or self.model.config
        template = copy.deepcopy(unit.block, {id(config): config})
        template.__dict__.pop("forward", None)
        template.train()
        parameters = self._views(slot, unit)
        for spec, parameter in zip(unit.layout.parameters, parameters):
            owner, _, attribute = spec.name.rpartition(".")
            template.get_submodule(owner)._parameters[attribute] = parameter
        self._templates[slot, unit.kind] = template
        if self._compiles:
            self.compiled[slot, unit.kind] = CompiledBlock(template)
        self._parameters[slot, unit.kind] = parameters

    def template(self, slot: Buffer, unit: Unit) -> nn.Module:
        """The block module over `slot`, with this unit's buffers and layer numbers bound."""
        template = self._templates[slot, unit.kind]
        for name, buffer in unit.buffers.items():
            owner, _, attribute = name.rpartition(".")
            template.get_submodule(owner)._buffers[attribute] = buffer
        for name, index in unit.indices.items():
            template.get_submodule(name).layer_idx = index
        return template

    def parameters(self, slot: Buffer, unit: Unit) -> list[nn.Parameter]:
        """Parameters of the unit's template over `slot`, in layout order."""
        return self._parameters[slot, unit.kind]

    def set_training(self, training: bool) -> None:
        """Dropout on or off, in the templates and around them."""
        if (
            training == self._training
        ):  # a pass of sampling is one token, and this walks through every module
            return
        self._training = training
        for template in self._templates.values():
            template.train(training)
        self.model.skeleton.model.train(training)

    @property
    def compiling(self) -> tuple[float, list[str]]:
        """Seconds that compiling the blocks has taken so far, and why some run as they are."""
        problems = [block.problem for block in self.compiled.values() if block.problem]
        return sum(block.seconds for block in self.compiled.values()), list(dict.fromkeys(problems))

    def fixed_bytes(self) -> int:
        """Bytes of all buffers held here."""
        own = [grad for buffer, grad in self.grads.items() if buffer.unit not in self._shared]
        tensors = [
            *self.slots.values(),
            *own,
            self._arena,
            *self.stagings.values(),
            *self.rings.values(),
            self.norms,
            self.clip,
        ]
        return sum(t.numel() * t.element_size() for t in tensors)
