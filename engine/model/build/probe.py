"""The probe runs a model once on two tokens, with weights that occupy no memory.

It finds which parameters outside the blocks belong to the embed unit and which to the head unit,
and what passes between the blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import nn

from engine.errors import ModelError
from engine.model.blocks.cross_layer_inputs import CrossLayerFlow
from engine.model.blocks.hidden_layout import HiddenLayout
from engine.model.build.block_trial import HollowProducts, Trial
from engine.model.build.library import reads_more_than_text
from engine.model.build.parameter_names import ParameterNames
from engine.model.build.skeleton import Capture, Skeleton, parameters_reached
from engine.model.build.units import Unit
from engine.planning.layout.layout import lay_out
from engine.planning.schedule.buffers import EMBED, HEAD


@dataclass
class _EmbedAndHead:
    """Parameters outside the blocks, bound to weights that occupy no memory."""

    kept: list[str]
    """Parameters of the model that the family keeps from being trained."""
    shared: frozenset[str]
    """Parameters that blocks share. They have their first names here."""
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    bindings: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Modules and attributes to which each parameter is bound."""
    aliases: dict[str, str] = field(default_factory=dict)
    """First name of each tied parameter, by its second name."""

    def add(self, group: list[str], hollow: nn.Parameter, modules: dict[str, nn.Module]) -> None:
        """Binds `hollow` to all names of a parameter, the owning one first. Blocks are not run
        here, so what they share stays as it is.
        """
        first, *others = group
        self.parameters[first] = hollow
        self.aliases.update(dict.fromkeys(others, first))
        bound = self.bindings.setdefault(first, [])
        for name in group:
            owner, _, attribute = name.rpartition(".")
            if first not in self.shared:
                modules[owner]._parameters[attribute] = hollow
            bound.append((modules[owner], attribute))

    def unit(self, name: str, chosen: list[str], names: ParameterNames) -> Unit:
        """Returns a unit of the `chosen` parameters."""
        specs = [names.spec(each, each, self.parameters[each]) for each in chosen]
        bindings = {each: self.bindings[each] for each in chosen}
        return Unit(name, lay_out(name, specs), bindings=bindings)


@dataclass(frozen=True)
class Probed:
    """Units outside the blocks, and what passes between blocks."""

    skeleton: Skeleton
    embed: Unit
    head: Unit
    tied: bool
    aliases: dict[str, str]
    non_text: dict[str, int]
    """Number of elements of the parameters through which no text passes."""
    entering_width: int
    """Number of elements per token of the first block's input."""
    state_items: int
    """Bytes of an element of the hidden state, in weights: two where a family
    keeps it in float32 beside bfloat16 weights.
    """
    cross_layer_flow: CrossLayerFlow | None
    """What passes between blocks in addition to the hidden state; None for nothing."""


def probe(
    module: nn.Module,
    skeleton: Skeleton,
    blocks: list[Unit],
    names: ParameterNames,
) -> Probed:
    """Runs the capture pass, one block of each kind and the tail on two tokens, with weights that
    occupy no memory.

    Finds which parameters the embed unit and the head unit own, and what each block returns and
    hands on. Refuses models that pass state between blocks in a way that is not streamed.
    """
    embed_and_head = _bind_hollow(module, blocks, names)
    with torch.enable_grad(), HollowProducts():
        trial = Trial(module, blocks)
        captured = _enter(module, skeleton, trial)
        entering, cross_layer_flow = captured.hidden, trial.cross_layer_flow()
        embed_ids = parameters_reached(entering).union(*map(parameters_reached, trial.trained))
        skeleton.expect_extras(trial.placeholders())
        if not cross_layer_flow.is_empty:
            again = skeleton.capture(torch.zeros(1, 2, dtype=torch.long), None)
            trial.refuse_computed(again.arguments, cross_layer_flow)
        hidden = torch.zeros(2, entering.shape[-1], dtype=entering.dtype, requires_grad=True)
        head_ids = parameters_reached(skeleton.probe_tail(hidden))
    untrained = trial.untrained(cross_layer_flow)
    for unit in blocks:
        _spare_from_decay(unit, untrained[unit.kind])
        unit.note_trial(trial.unrun[unit.kind], untrained[unit.kind])
    ids = {name: id(parameter) for name, parameter in embed_and_head.parameters.items()}
    embed = [name for name in ids if ids[name] in embed_ids or name in embed_and_head.shared]
    head = [name for name in ids if ids[name] in head_ids and name not in embed]
    unused = [name for name in ids if name not in embed and name not in head]
    if unused and not reads_more_than_text(module.config):
        raise ModelError(
            f"{type(module).__name__} has parameters that take no part in its forward pass "
            f"({', '.join(unused[:3])}), so it cannot be trained by streaming."
        )
    kept = [name for name in embed_and_head.kept if name in embed or name in head]
    _refuse_kept_from_training(module, kept)
    return Probed(
        skeleton,
        embed=embed_and_head.unit(EMBED, embed, names),
        head=embed_and_head.unit(HEAD, head, names),
        tied=any(ids[name] in head_ids for name in embed),
        aliases={
            name: first for name, first in embed_and_head.aliases.items() if first not in unused
        },
        non_text={name: embed_and_head.parameters[name].numel() for name in unused},
        entering_width=entering.shape[-1],
        state_items=-(-trial.state_bytes // names.dtype.itemsize),
        cross_layer_flow=None if cross_layer_flow.is_empty else cross_layer_flow,
    )


def _bind_hollow(module: nn.Module, blocks: list[Unit], names: ParameterNames) -> _EmbedAndHead:
    """Binds every parameter outside the blocks to a zero expanded to the parameter's shape."""
    in_blocks = {spec.full_name for unit in blocks for spec in unit.layout.parameters}
    modules = dict(module.named_modules())
    embed_and_head = _EmbedAndHead(
        [name for name, each in module.named_parameters() if not each.requires_grad],
        frozenset(name for unit in blocks for name in unit.shared.values()),
    )
    for group in names.of.values():
        if group[0] in in_blocks:
            continue
        meta = module.get_parameter(group[0])
        hollow = nn.Parameter(torch.zeros((), dtype=meta.dtype).expand(meta.shape))
        embed_and_head.add(group, hollow, modules)
    if not reads_more_than_text(module.config):
        _refuse_kept_from_training(
            module, [name for name in embed_and_head.kept if name not in in_blocks]
        )
    return embed_and_head


def _refuse_kept_from_training(module: nn.Module, names: list[str]) -> None:
    if names:
        raise ModelError(
            f"{type(module).__name__} keeps {names[0]} from being trained, which is not "
            "streamed; choose another model."
        )


def _enter(module: nn.Module, skeleton: Skeleton, trial: Trial) -> Capture:
    """Tries all blocks, and returns the capture pass. Its hidden state is [1, 2, width]. If the
    family gives its blocks a state of another shape, the skeleton gets its form.
    """
    ids = torch.zeros(1, 2, dtype=torch.long)
    captured = skeleton.ask_blocks(ids, trial)
    state = captured.hidden
    if state.dim() == 3 and state.shape[:2] == ids.shape:
        return captured
    rows, tokens = 3, 5
    skeleton.expect_extras(trial.placeholders())
    other = skeleton.capture(torch.zeros(rows, tokens, dtype=torch.long), None).hidden
    hidden_layout = HiddenLayout.between(tuple(state.shape), tuple(other.shape), (rows, tokens))
    if hidden_layout is None:
        raise ModelError(
            f"{type(module).__name__} gives its blocks {tuple(state.shape)} for a "
            "row of two tokens instead of one state a token, which cannot be streamed; choose "
            "another model."
        )
    skeleton.expect_hidden_layout(hidden_layout)
    return Capture(hidden_layout.flat(state), captured.arguments)


def _spare_from_decay(unit: Unit, untrained: set[str]) -> None:
    """Replaces the unit's layout by one without weight decay for parameters that are not trained.

    Plain training gives them no gradient and so leaves them unchanged; weight decay must do so,
    too.
    """
    specs = [
        replace(spec, decay=spec.decay and spec.name not in untrained)
        for spec in unit.layout.parameters
    ]
    unit.lay_out_as(lay_out(unit.name, specs))
