"""The modules that compute on the slots of a `DeviceState`: a template for each slot and kind of
block, and the model's own modules around the blocks.
"""

from __future__ import annotations

import copy

import torch
from torch import nn

from engine.model.blocks.tiled_module import tile_sequence
from engine.model.build.units import StreamedModel, Unit
from engine.planning.schedule.buffers import EMBED, HEAD, Buffer
from engine.planning.schedule.schedule import StepPlan
from engine.runtime.device.compiled import CompiledBlock
from engine.runtime.step.device_state import DeviceState
from engine.runtime.step.router_aux_loss import RouterAuxLoss


class Templates:
    """Block modules whose parameters are views of the slots of `state`, for one plan. The
    parameters of embed and head in `model` itself become views of theirs, and its buffers move to
    the device.
    """

    def __init__(self, model: StreamedModel, plan: StepPlan, state: DeviceState):
        self._model = model
        self._state = state
        self._units = {unit.name: unit for unit in model.units}
        self._compiles, self._tile_tokens = plan.compiles_blocks, plan.tile_tokens
        self.balance: RouterAuxLoss | None = None
        """Auxiliary loss of the routers, of a model that asks for it."""
        if model.router_loss is not None:
            self.balance = RouterAuxLoss(model.router_loss)
        self._training: bool | None = None
        self._templates: dict[tuple[Buffer, int], nn.Module] = {}
        self._parameters: dict[tuple[Buffer, int], list[nn.Parameter]] = {}
        self.compiled: dict[tuple[Buffer, int], CompiledBlock] = {}
        """Where the plan says so, it holds the compiled templates by (slot, kind of block)."""
        self._compiled_alone: dict[tuple[Buffer, int], CompiledBlock] = {}
        self._place_skeleton(plan)
        for slot, units in plan.slots.items():
            for name in units:
                unit = self._units[name]
                if unit.block is not None and (slot, unit.kind) not in self._templates:
                    self._make_template(slot, unit)

    def _place_skeleton(self, plan: StepPlan) -> None:
        """Binds the parameters of embed and head to their slots, and moves the model's buffers to
        the device.
        """
        skeleton = self._model.skeleton
        in_blocks = {id(module) for block in skeleton.blocks for module in block.modules()}
        for module in skeleton.model.modules():
            if id(module) in in_blocks:
                continue
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._state.device)
        self.embed_and_head_parameters: dict[str, list[nn.Parameter]] = {}
        for unit_name in (EMBED, HEAD):
            unit = self._units[unit_name]
            slot = next(slot for slot, units in plan.slots.items() if unit_name in units)
            parameters = self._state.views(slot, unit)
            for spec, parameter in zip(unit.layout.parameters, parameters):
                for module, attribute in unit.bindings[spec.name]:
                    if id(module) not in in_blocks:
                        module._parameters[attribute] = parameter
            self.embed_and_head_parameters[unit_name] = parameters
        for unit in self._model.blocks:
            unit.move_buffers(self._state.device)

    def _make_template(self, slot: Buffer, unit: Unit) -> None:
        """Makes a copy of a block whose parameters are views of a slot."""
        assert unit.block is not None  # only blocks have templates
        # All templates share one configuration object, as the blocks of a model do.
        config = getattr(unit.block, "config", None) or self._model.config
        template = copy.deepcopy(unit.block, {id(config): config})
        # The `forward` on the block instance only records (`engine.model.build.skeleton`); that of
        # the class computes.
        template.__dict__.pop("forward", None)
        template.train()
        if self._tile_tokens:
            tile_sequence(template, self._model.tiled_parts(unit), self._tile_tokens)
        parameters = [*self._state.views(slot, unit), *self._shared_by(unit)]
        names = [*(spec.name for spec in unit.layout.parameters), *unit.shared]
        for name, parameter in zip(names, parameters, strict=True):
            owner, _, attribute = name.rpartition(".")
            template.get_submodule(owner)._parameters[attribute] = parameter
        if self.balance is not None:
            self.balance.watch(template, unit.name)
        self._templates[slot, unit.kind] = template
        if self._compiles:
            self.compiled[slot, unit.kind] = CompiledBlock(template)
        self._parameters[slot, unit.kind] = _trained(parameters)

    def _shared_by(self, unit: Unit) -> list[nn.Parameter]:
        """Returns the parameters that the unit shares with other blocks, in its order."""
        names = [spec.name for spec in self._units[EMBED].layout.parameters]
        return [
            self.embed_and_head_parameters[EMBED][names.index(each)]
            for each in unit.shared.values()
        ]

    def template(self, slot: Buffer, unit: Unit) -> nn.Module:
        """Returns the block module over `slot`, with this unit's buffers and layer numbers bound.
        They stay bound until the next call for the same slot and kind of block.
        """
        template = self._templates[slot, unit.kind]
        for name, buffer in unit.buffers.items():
            owner, _, attribute = name.rpartition(".")
            template.get_submodule(owner)._buffers[attribute] = buffer
        for name, index in unit.indices.items():
            # Torch's type hints allow only tensors and modules as attributes of a module.
            template.get_submodule(name).layer_idx = index  # type: ignore[assignment]
        return template

    def compiled_alone(self, slot: Buffer, unit: Unit) -> CompiledBlock:
        """Returns the compiled template for passes without gradients. Should compiling it fail,
        training continues with its own kernels.
        """
        key = (slot, unit.kind)
        if key not in self._compiled_alone:
            self._compiled_alone[key] = CompiledBlock(self._templates[key])
        return self._compiled_alone[key]

    def parameters(self, slot: Buffer, unit: Unit) -> list[nn.Parameter]:
        """Returns the parameters of the unit's template over `slot` that are trained, in layout
        order, and then those that it shares with other blocks.
        """
        return self._parameters[slot, unit.kind]

    def trained_embed_or_head(self, unit: str) -> list[nn.Parameter]:
        """Returns the parameters of embed or head that are trained, in layout order."""
        return _trained(self.embed_and_head_parameters[unit])

    def set_training(self, training: bool) -> None:
        """Switches dropout on or off, in the templates and around them."""
        # This visits every module, which is slow for sampling, where a pass is a single token.
        if training == self._training:
            return
        self._training = training
        for template in self._templates.values():
            template.train(training)
        self._model.skeleton.model.train(training)

    def close(self) -> None:
        """Frees the slots of the model outside the blocks, which no longer refers to them."""
        for name, parameters in self.embed_and_head_parameters.items():
            unit = self._units[name]
            for spec, parameter in zip(unit.layout.parameters, parameters):
                empty = nn.Parameter(torch.empty_like(parameter, device="meta"))
                for module, attribute in unit.bindings[spec.name]:
                    if module._parameters[attribute] is parameter:  # a later engine may have bound
                        module._parameters[attribute] = empty

    @property
    def compiling(self) -> tuple[float, list[str]]:
        """Seconds spent on compiling blocks so far, and the reasons for which some blocks run
        uncompiled.
        """
        blocks = [*self.compiled.values(), *self._compiled_alone.values()]
        seconds = sum(block.seconds for block in blocks)
        problems = [block.problem for block in blocks if block.problem]
        return seconds, list(dict.fromkeys(problems))


def _trained(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]
