"""A Hugging Face configuration becomes a streamed model: built on the meta device, and split into
embed, blocks and head.

Nothing here reads weights. A model that cannot be streamed correctly is refused by name before
anything is allocated.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from typing import Any

from torch import nn

from engine.config.adapters import Adapters
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.errors import ConfigError, ModelError, RamstreamError, first_line
from engine.machine.short_memory import refuse_short_memory
from engine.model.build.block_trial import plain_attributes
from engine.model.build.library import empty_model, family_of, reads_more_than_text, transformers
from engine.model.build.packing_trial import packing_of
from engine.model.build.parameter_names import ParameterNames
from engine.model.build.probe import Probed, probe
from engine.model.build.skeleton import Skeleton, find_layers
from engine.model.build.units import TORCH_DTYPES, RouterLoss, StreamedModel, Unit
from engine.planning.layout.layout import ParameterSpec, lay_out
from engine.planning.shape.active_parameters import active_parameters, work_parameters
from engine.planning.shape.quantized_weights import quantized, unquantized

_FAILS_IN_BF16 = ("xlstm",)
"""The code of these families raises an error in bf16, in plain transformers too, for rows that are
longer than those of the trial.
"""
_BALANCED = (
    "ernie4_5_moe",
    "flex_olmo",
    "gpt_oss",
    "granitemoe",
    "jamba",
    "minimax",
    "mixtral",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
)
"""Families with one router a block, which returns its logits and scores, and the loss of
`engine.runtime.step.router_aux_loss`.
"""


def build_model(
    config: Any, model: ModelConfig, parts: Parts | Adapters | None = None
) -> StreamedModel:
    """Builds the skeleton on the meta device and splits it into units.

    `config` is a transformers configuration. parts: those that are trained, None for all. The probe
    runs the model once on two tokens with weights that occupy no memory, so it takes well under a
    second for any size. Raises ModelError for a model that cannot be streamed, and ConfigError
    where it lacks such a part.
    """
    refuse_family(config)
    if config.model_type in _FAILS_IN_BF16 and model.dtype == "bfloat16":
        raise ModelError(
            f"{config.model_type} cannot be computed in bfloat16, because its code in transformers "
            "multiplies bfloat16 by float32; set model.dtype to float32."
        )
    try:
        built = _build(config, model)
        if parts is not None:
            _refuse_parts_of_shared(built)
            layouts = built.layouts_with(parts, family_of(built.config.model_type))
            active = active_parameters(built.config, layouts)
            work = work_parameters(built.config, layouts, built.tied)
            built.train_parts(parts, layouts, (active, work))
        return built
    except RamstreamError:
        raise
    except ImportError as error:
        refuse_short_memory(error, "while the model's code was loaded")
        raise ModelError(
            f"{config.model_type} needs a package that is not installed "
            f"({first_line(error).rstrip('.:')}); install it and try again."
        ) from error
    except Exception as error:  # a family's own code raises errors of many kinds
        refuse_short_memory(error, "in the capture pass, which measures the model's shapes")
        other = "" if model.dtype == "float32" else "set model.dtype to float32 or "
        raise ModelError(
            f"{config.model_type} does not run under the capture pass ({first_line(error)}), so it "
            f"cannot be streamed; {other}choose another model."
        ) from error


def refuse_family(config: Any) -> None:
    """Raises ModelError for a model that, judging by its configuration alone, cannot be
    streamed.
    """
    mapping = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    family = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"{family} is an encoder-decoder model; Ramstream trains decoder-only models."
        )
    if type(config) not in mapping and not reads_more_than_text(config):
        raise ModelError(
            f"{family} has no causal language model in transformers; choose a decoder-only model."
        )
    if quantized(config) is not None and reads_more_than_text(config):
        raise ModelError(
            f"{family} is a quantized checkpoint of a model that reads more than text; its other "
            "weights are copied as they are stored, so give the unquantized model."
        )
    text = config.get_text_config()
    if getattr(text, "output_router_logits", False) and family not in _BALANCED:
        raise ModelError(
            f"{family} asks for a router loss over all layers (output_router_logits), which is not "
            "streamed for this family; set output_router_logits to false in its config.json to "
            "train without it."
        )
    not_streamed = {
        "layerdrop": "leaves whole blocks out at random",
        "z_loss_coefficient": "adds a loss on its logits",
    }
    for name, what in not_streamed.items():
        if getattr(text, name, None):
            raise ModelError(
                f"{family} {what} ({name}), which is not streamed; set {name} to 0 in its "
                "config.json to train without it."
            )


def _build(config: Any, model: ModelConfig) -> StreamedModel:
    config, stored_as = copy.deepcopy(config), quantized(config)
    unquantized(config)
    config.use_cache = False
    packing = packing_of(config, model.attention)
    module = _empty_module(config, model, packing.attention or "sdpa")
    # The trials must not draw dropout, because a run in another thread may be using torch's
    # generator.
    module.eval()
    layers = find_layers(module, config)
    _refuse_bidirectional(module, layers)
    _store_nothing_unread(layers)
    names = ParameterNames(module, TORCH_DTYPES[model.dtype])
    blocks = _block_units(module, layers, names)
    probed = probe(module, Skeleton(module, layers), blocks, names)
    units = [probed.embed, *blocks, probed.head]
    again = _shared_again(units)
    return StreamedModel(
        config=config,
        skeleton=probed.skeleton,
        units=units,
        tied=probed.tied,
        dtype=model.dtype,
        active_parameters=active_parameters(config, [unit.layout for unit in units], again),
        work_parameters=None,
        residual_streams=_streams(config, probed),
        state_items=probed.state_items,
        packing=packing.of(module),
        aliases=probed.aliases,
        non_text=probed.non_text,
        router_loss=_router_loss(module, blocks),
        quantized=stored_as,
        cross_layer_flow=probed.cross_layer_flow,
    )


def _refuse_parts_of_shared(built: StreamedModel) -> None:
    """Raises ConfigError for a model whose blocks share weights, which belong to no block."""
    if any(unit.shared for unit in built.blocks):
        raise ConfigError(
            "train.method",
            f"blocks of {built.config.model_type} share weights, so it is trained as a whole or "
            "not at all; set it to full.",
        )


def _shared_again(units: list[Unit]) -> list[ParameterSpec]:
    """Returns the parameters that blocks share, as often as blocks compute with them, but once."""
    known = {spec.name: spec for spec in units[0].layout.parameters}
    times = Counter(name for unit in units for name in unit.shared.values())
    return [known[name] for name, count in times.items() for _ in range(count - 1)]


def _streams(config: Any, probed: Probed) -> int:
    """Returns how many hidden states of the model's dtype are as large as a block's state."""
    width = probed.entering_width * probed.state_items
    return -(-width // config.get_text_config().hidden_size)


def _router_loss(module: Any, blocks: list[Unit]) -> RouterLoss | None:
    """Returns the loss over routers that the configuration asks for."""
    if not getattr(module.config.get_text_config(), "output_router_logits", False):
        return None
    routers = {
        unit.name: name
        for unit in blocks
        if unit.block is not None
        for name, part in unit.block.named_modules()
        if type(part).__name__.endswith("TopKRouter")
    }
    coefficient = module.router_aux_loss_coef
    return RouterLoss(coefficient, module.num_experts, module.num_experts_per_tok, routers)


def _empty_module(config: Any, model: ModelConfig, best_attention: str) -> nn.Module:
    """Returns the model on the meta device. It has the requested attention, or the best one for
    `auto`; if the family lacks that, it has the eager attention.
    """
    dtype = TORCH_DTYPES[model.dtype]
    attention = best_attention if model.attention == "auto" else model.attention
    try:
        return empty_model(config, dtype, attention)
    except ValueError as error:
        if model.attention != "auto":
            raise ModelError(
                f"model.attention: {config.model_type} cannot use {model.attention} "
                f"({first_line(error)})."
            ) from error
        return empty_model(config, dtype, "eager")


def _refuse_bidirectional(module: nn.Module, layers: nn.ModuleList) -> None:
    for part in layers.modules():
        if "Residual" in type(part).__name__:
            continue  # attends to the states of earlier blocks, which have no order of tokens
        if getattr(part, "is_causal", True) is False or getattr(part, "is_decoder", True) is False:
            raise ModelError(
                f"{type(module).__name__} sees the tokens after each token as an encoder does, so "
                "it cannot learn to predict them; choose a decoder-only model."
            )


def _store_nothing_unread(layers: nn.ModuleList) -> None:
    """Switches off that attention stores its keys and values for later blocks, if no block reads
    them. Such models (Gemma 4 without shared layers) store them for an assistant model; here they
    would only take memory, and a block that changes its arguments is refused.
    """
    if any(getattr(part, "is_kv_shared_layer", False) for part in layers.modules()):
        return
    for part in layers.modules():
        if getattr(part, "store_full_length_kv", False):
            setattr(part, "store_full_length_kv", False)  # noqa: B010  `part` is of any class


# ---------------------------------------------------------------------- blocks


def _block_units(module: nn.Module, layers: nn.ModuleList, names: ParameterNames) -> list[Unit]:
    place = next(name for name, part in module.named_modules() if part is layers)
    kinds: dict[tuple, int] = {}
    units = []
    for position, block in enumerate(layers):
        prefix = f"{place}.{position}."
        specs, shared = _block_specs(module, block, prefix, names)
        if not specs:
            raise ModelError(f"{place}.{position} has no parameters, so it cannot be streamed.")
        units.append(
            Unit(
                name=f"block {position}",
                layout=lay_out(f"block {position}", specs),
                block=block,
                kind=kinds.setdefault((*_kind_of(block), *shared.items()), len(kinds)),
                buffers=dict(block.named_buffers()),
                indices={
                    name: part.layer_idx
                    for name, part in block.named_modules()
                    if hasattr(part, "layer_idx")
                },
                shared=shared,
            )
        )
    _refuse_neighbors(module, units)
    return units


def _refuse_neighbors(module: nn.Module, units: list[Unit]) -> None:
    """Raises ModelError where two blocks in a row share a parameter. Plans that recompute two
    blocks together would add its gradients in another order, and so round them otherwise.
    """
    for unit, above in itertools.pairwise(units):
        for name in unit.shared.values():
            if name in above.shared.values():
                raise ModelError(
                    f"{type(module).__name__} shares {name} between {unit.name} and {above.name}, "
                    "which follow each other; that cannot be streamed, so choose another model."
                )


def _block_specs(
    module: nn.Module, block: nn.Module, prefix: str, names: ParameterNames
) -> tuple[list[ParameterSpec], dict[str, str]]:
    """Returns the specifications of a block's parameters, and those that other blocks share, each
    with its first name in the model. Raises ModelError for a parameter that another part of the
    model shares.
    """
    place = prefix.removesuffix(".").rpartition(".")[0]
    specs, shared = [], {}
    for name, parameter in block.named_parameters():
        full_name = prefix + name
        others = [other for other in names.of[id(parameter)] if not other.startswith(prefix)]
        if others and all(other.startswith(f"{place}.") for other in others):
            shared[name] = names.of[id(parameter)][0]
            continue
        if others:
            raise ModelError(
                f"{type(module).__name__} shares {full_name} with {others[0]}, which cannot be "
                "streamed; choose another model."
            )
        specs.append(names.spec(name, full_name, parameter))
    return specs, shared


def _kind_of(block: nn.Module) -> tuple:
    """Returns what must be equal for two blocks to use one template: class tree, parameter and
    buffer shapes, plain attributes.

    Shapes alone are not enough: whether attention is sliding or full, and whether embeddings are
    rotary, is stored in attributes. `layer_idx` is set for each unit, like its buffers.
    """
    parts = tuple(
        (name, type(part), tuple(plain_attributes(part))) for name, part in block.named_modules()
    )
    tensors = [*block.named_parameters(), *block.named_buffers()]
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors)
    return parts, shapes
