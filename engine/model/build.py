"""From a Hugging Face source to units: the model's shape on the meta device, split into embed,
blocks and head.

Nothing here reads weights. What cannot be streamed correctly is refused by name before anything is
allocated.
"""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from engine.config.settings import ModelConfig
from engine.errors import ModelError, RamstreamError, first_line
from engine.model.block_trial import HollowProducts, Trial, plain_attributes
from engine.model.layout import ParameterSpec, lay_out
from engine.model.library import empty_model, transformers
from engine.model.packing_trial import packing_of
from engine.model.skeleton import Skeleton, parameters_reached
from engine.model.units import TORCH_DTYPES, StreamedModel, Unit
from engine.plan.buffers import EMBED, HEAD


def build_model(config: Any, model: ModelConfig) -> StreamedModel:
    """Build the skeleton on the meta device and split it into units. Raises ModelError for what
    cannot be streamed.

    `config`: a transformers configuration. The probe runs the model once on two tokens with weights
    that occupy no memory, so it takes well under a second for any size.
    """
    refuse_family(config)
    try:
        return _build(config, model)
    except RamstreamError:
        raise
    except (
        Exception
    ) as error:  # a family's own code raises many kinds, and was not asked for anything unusual
        other = "" if model.dtype == "float32" else "set model.dtype to float32 or "
        raise ModelError(
            f"{config.model_type} does not run under the capture pass ({first_line(error)}), so it "
            f"cannot be streamed; {other}choose another model."
        ) from error


def refuse_family(config: Any) -> None:
    """Raises ModelError for what a configuration alone shows to be impossible."""
    mapping = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{family} is an encoder-decoder model; Ramstream trains decoder-only models."
        )
    if type(config) not in mapping:
        raise ModelError(
            f"{family} has no causal language model in transformers; choose a decoder-only model."
        )
    if mapping[type(config)].__name__.endswith("ForConditionalGeneration"):
        raise ModelError(
            f"{family} also reads images or sound; Ramstream trains on text alone, so give the "
            "model's text part or choose a text model."
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{family} is a quantised checkpoint; Ramstream trains at full precision, so give "
            "the unquantised model."
        )
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False):
        raise ModelError(
            f"{family} asks for a router loss over all layers (output_router_logits), which is not "
            "streamed yet; set output_router_logits to false in its config.json to train without "
            "it."
        )
    for name, what in (
        ("layerdrop", "leaves whole blocks out at random"),
        ("z_loss_coefficient", "adds a loss on its logits"),
    ):
        if getattr(text, name, None):
            raise ModelError(
                f"{family} {what} ({name}), which is not streamed; set {name} to 0 in its "
                "config.json to train without it."
            )


def _build(config: Any, model: ModelConfig) -> StreamedModel:
    config = copy.deepcopy(config)
    config.use_cache = False
    packing = packing_of(config, model.attention)
    attention = (packing.attention or "sdpa") if model.attention == "auto" else model.attention
    dtype = TORCH_DTYPES[model.dtype]
    try:
        module = empty_model(config, dtype, attention)
    except ValueError as error:
        if model.attention != "auto":
            raise ModelError(
                f"model.attention: {config.model_type} cannot use {model.attention} "
                f"({first_line(error)})."
            ) from error
        module = empty_model(config, dtype, "eager")
    # what is tried here draws no dropout: a run in another thread may be using torch's generator
    module.eval()
    layers = find_layers(module, config)
    _refuse_bidirectional(module, layers)
    decay_names = _decay_names(module)
    names = _parameter_names(module)
    units = _block_units(module, layers, names, decay_names)
    skeleton = Skeleton(module, layers)
    outer, tied, aliases = _probe(module, skeleton, units, names, decay_names, dtype)
    return StreamedModel(
        config=config,
        skeleton=skeleton,
        units=[outer[0], *units, outer[1]],
        tied=tied,
        dtype=model.dtype,
        active_parameters=_active_parameters(config, outer[0], units, outer[1]),
        packing=packing.of(module),
        aliases=aliases,
    )


def _refuse_bidirectional(module: nn.Module, layers: nn.ModuleList) -> None:
    for part in layers.modules():
        if getattr(part, "is_causal", True) is False or getattr(part, "is_decoder", True) is False:
            raise ModelError(
                f"{type(module).__name__} sees the tokens after each token as an encoder does, so "
                "it cannot learn to predict them; choose a decoder-only model."
            )


def find_layers(module: nn.Module, config: Any) -> nn.ModuleList:
    """The ModuleList of decoder blocks: the one with most parameters, among those as long as the
    configuration says.
    """
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    lists = [m for m in module.modules() if isinstance(m, nn.ModuleList)]
    lists = [m for m in lists if len(m) == count] or lists
    if not lists:
        raise ModelError(
            f"{type(module).__name__} has no list of decoder blocks, so it cannot be streamed."
        )
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def _parameter_names(module: nn.Module) -> dict[int, list[str]]:
    """Id of each parameter to all of its names, the owning one first."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _decay_names(module: nn.Module) -> set[str]:
    """Parameters that AdamW decays, by transformers' rule: not in a LayerNorm, not named as a bias
    or a norm.
    """
    forbidden = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return set(
        transformers().trainer_pt_utils.get_parameter_names(module, [nn.LayerNorm], forbidden)
    )


def _spec(
    name: str, full_name: str, parameter: torch.Tensor, decay_names: set[str]
) -> ParameterSpec:
    return ParameterSpec(name, full_name, tuple(parameter.shape), full_name in decay_names)


def _block_units(
    module: nn.Module, layers: nn.ModuleList, names: dict[int, list[str]], decay_names: set[str]
) -> list[Unit]:
    prefix = next(name for name, m in module.named_modules() if m is layers)
    units, kinds = [], {}
    for position, block in enumerate(layers):
        specs = []
        for name, parameter in block.named_parameters():
            full_name = f"{prefix}.{position}.{name}"
            others = [n for n in names[id(parameter)] if not n.startswith(f"{prefix}.{position}.")]
            if others:
                raise ModelError(
                    f"{type(module).__name__} shares {full_name} with {others[0]}, which cannot be "
                    "streamed; choose another model."
                )
            specs.append(_spec(name, full_name, parameter, decay_names))
        if not specs:
            raise ModelError(f"{prefix}.{position} has no parameters, so it cannot be streamed.")
        kind = kinds.setdefault(_kind_of(block), len(kinds))
        units.append(
            Unit(
                f"block {position}",
                lay_out(f"block {position}", specs),
                block,
                kind,
                dict(block.named_buffers()),
                {
                    name: module.layer_idx
                    for name, module in block.named_modules()
                    if hasattr(module, "layer_idx")
                },
            )
        )
    return units


def _kind_of(block: nn.Module) -> tuple:
    """What two blocks must share to use one template: class tree, parameter and buffer shapes,
    plain attributes.

    Shapes alone are not enough: sliding or full attention and rotary or none live in attributes.
    `layer_idx` is set for each unit, as its buffers are.
    """
    parts = [
        (name, type(module), tuple(plain_attributes(module)))
        for name, module in block.named_modules()
    ]
    shapes = tuple(
        (n, tuple(t.shape), t.dtype) for n, t in [*block.named_parameters(), *block.named_buffers()]
    )
    return tuple(parts), shapes


def _probe(
    module: nn.Module,
    skeleton: Skeleton,
    blocks: list[Unit],
    names: dict[int, list[str]],
    decay_names: set[str],
    dtype: torch.dtype,
) -> tuple[tuple[Unit, Unit], bool, dict[str, str]]:
    """Run the capture pass, one block of each kind and the tail on two tokens with weights that
    occupy no memory.

    Finds which parameters the embed unit and the head unit own, and what each block returns;
    refuses block arguments that carry gradients or state from one block to another.
    """
    in_blocks = {f"{s.full_name}" for u in blocks for s in u.layout.parameters}
    outer: dict[str, nn.Parameter] = {}
    where: dict[str, list[tuple[nn.Module, str]]] = {}
    aliases: dict[str, str] = {}
    modules = dict(module.named_modules())
    for group in names.values():
        if group[0] in in_blocks:
            continue
        meta = module.get_parameter(group[0])
        if not meta.requires_grad:
            raise ModelError(
                f"{type(module).__name__} keeps {group[0]} from being trained, which is not "
                "streamed; choose another model."
            )
        hollow = nn.Parameter(torch.zeros((), dtype=dtype).expand(meta.shape))
        outer[group[0]] = hollow
        aliases.update(dict.fromkeys(group[1:], group[0]))
        for name in group:
            owner, _, attribute = name.rpartition(".")
            modules[owner]._parameters[attribute] = hollow
            where.setdefault(group[0], []).append((modules[owner], attribute))
    ids = torch.zeros(1, 2, dtype=torch.long)
    with torch.enable_grad(), HollowProducts():
        trial = Trial(module, blocks, dtype)
        captured = skeleton.ask_blocks(ids, trial)
        if captured.hidden.dim() != 3 or captured.hidden.shape[:2] != ids.shape:
            raise ModelError(
                f"{type(module).__name__} gives its blocks {tuple(captured.hidden.shape)} for a "
                "row of two tokens instead of one state a token, which cannot be streamed; choose "
                "another model."
            )
        embed_ids = parameters_reached(captured.hidden)
        width = captured.hidden.shape[-1]
        hidden = torch.zeros(2, width, dtype=captured.hidden.dtype, requires_grad=True)
        head_ids = parameters_reached(skeleton.probe_tail(hidden))
    for unit in blocks:
        untrained = trial.untrained[unit.kind]
        specs = [
            replace(s, decay=s.decay and s.name not in untrained) for s in unit.layout.parameters
        ]
        unit.lay_out_as(lay_out(unit.name, specs))
    embed = {n: p for n, p in outer.items() if id(p) in embed_ids}
    head = {n: p for n, p in outer.items() if id(p) in head_ids and n not in embed}
    unused = [n for n in outer if n not in embed and n not in head]
    if unused:
        raise ModelError(
            f"{type(module).__name__} has parameters that take no part in its forward pass "
            f"({', '.join(unused[:3])}), so it cannot be trained by streaming."
        )
    tied = any(id(p) in head_ids for p in embed.values())

    def unit(name: str, parameters: dict[str, nn.Parameter]) -> Unit:
        specs = [_spec(n, n, p, decay_names) for n, p in parameters.items()]
        return Unit(name, lay_out(name, specs), bindings={n: where[n] for n in parameters})

    return (unit(EMBED, embed), unit(HEAD, head)), tied, aliases


def _active_parameters(config: Any, embed: Unit, blocks: list[Unit], head: Unit) -> int:
    """All parameters, with expert stacks (as many rows as experts, and three dimensions or biases
    of such) counted by the experts a token uses.
    """
    text = config.get_text_config()
    experts = next(
        (
            getattr(text, n)
            for n in ("num_local_experts", "num_experts", "n_routed_experts")
            if getattr(text, n, None)
        ),
        None,
    )
    chosen = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    total = 0
    for unit in [embed, *blocks, head]:
        for spec in unit.layout.parameters:
            stacked = len(spec.shape) == 3 or re.search(r"(^|\.)experts\.\w*bias$", spec.name)
            routed = experts and chosen and stacked and spec.shape[0] == experts
            total += spec.numel * chosen // experts if routed else spec.numel
    return total
