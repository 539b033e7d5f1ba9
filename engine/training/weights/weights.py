"""The weight planes, filled from a pretrained checkpoint or with the random weights that the
model's own initialization code draws.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.errors import ModelError, first_line
from engine.machine.short_memory import refuse_short_memory
from engine.model.build.library import auto_class, errors_only, no_progress_bars, reported_progress
from engine.model.build.pretrained_files import load_config, with_vocabulary
from engine.model.build.units import StreamedModel, Unit
from engine.model.hub.dequantize import with_quantized
from engine.model.hub.hub_cache import cached_weights
from engine.model.hub.local_weights import refuse_no_weights
from engine.model.hub.tensor_files import files_with_weights, reading_dtype
from engine.model.hub.torch_pickle import is_pickled
from engine.paths import resolve_source
from engine.planning.shape.read_ahead import most_read_ahead_bytes, read_ahead_numel
from engine.progress import Progress, no_progress
from engine.runtime.host.host_states import HostStates
from engine.training.weights.resize_embeddings import ResizedEmbeddings
from engine.training.weights.stream_loader import StreamingLoader


def reading_bytes(model: StreamedModel) -> int:
    """Returns the bytes that reading a checkpoint takes at most, beside the planes."""
    counts = [layout.parameter_count for layout in model.layouts]
    has_experts = model.active_parameters < model.parameter_count
    return most_read_ahead_bytes(read_ahead_numel(counts, has_experts))


def load_pretrained(
    model: StreamedModel,
    source: str,
    states: HostStates,
    progress: Progress = no_progress,
    seed: int = 0,
) -> None:
    """Copies a Hugging Face checkpoint (safetensors, or else pytorch_model.bin; local folder or hub
    id) into the weight planes, tensor by tensor. Files that `engine.model.hub.hub.fetch` has
    downloaded are read from the hub's cache, without a network request.

    Weights in fp32 and fp16 fill both planes of the masters, so that no bit of them is lost. Beside
    the planes, host memory holds `reading_bytes`: one tensor at a time, or the experts of a block.
    `progress` counts the bytes that were read. seed: draws the rows of tokens that the weights
    lack. An exception from `progress` ends the loading. Raises ModelError when weights are missing,
    have another shape, or come with pickled code.
    """
    path = resolve_source(source) or cached_weights(source)
    refuse_no_weights(source, path)
    dtype = reading_dtype(path)
    size = model.parameter_count * dtype.itemsize
    rows = _new_rows(model, source, seed)
    loader = StreamingLoader(model, states, rows)
    how = model.quantized
    with loader.while_reading(None if how is None else partial(with_quantized, how=how)):
        reading = _Reading(str(path or source), dtype, _is_safe(path), size, progress, rows)
        loaded = _read_pretrained(model, source, reading)
    loader.load_rest(loaded)
    progress(size, size)
    found = dict(loaded.named_buffers())
    for name, buffer in model.persistent_buffers().items():
        if name in found and found[name].shape == buffer.shape:
            buffer.copy_(found[name])


def _new_rows(model: StreamedModel, source: str, seed: int) -> ResizedEmbeddings | None:
    """Returns the rows that the weights of `source` lack; None where they lack none."""
    before = load_config(source).get_text_config().vocab_size
    after = model.config.get_text_config().vocab_size
    return ResizedEmbeddings(before, after, seed) if before < after else None


def _is_safe(folder: Path | None) -> bool:
    return not any(is_pickled(file) for file in files_with_weights(folder))


@dataclass(frozen=True)
class _Reading:
    """How a checkpoint is read."""

    path: str
    """Folder or Hugging Face id for the library."""
    dtype: torch.dtype
    is_safe: bool
    """The files are safetensors; otherwise `torch.save` wrote them."""
    size: int
    """Bytes of the weights in that dtype."""
    progress: Progress
    rows: ResizedEmbeddings | None
    """Rows that the model has beside those of the weights."""


def _read_pretrained(model: StreamedModel, source: str, reading: _Reading) -> Any:
    """Reads a Hugging Face checkpoint into a transformers model."""
    refusal: list[Exception] = []

    def report(share: float) -> None:
        try:
            reading.progress(round(share * reading.size), reading.size)
        except Exception as error:
            refusal.append(error)
            raise

    # A configuration without quantization keeps the library from undoing it in its own way.
    own = {}
    if model.quantized is not None:
        tokens = model.config.get_text_config().vocab_size
        if reading.rows is not None:
            tokens = reading.rows.before
        own["config"] = with_vocabulary(model.config, tokens)
    try:
        with no_progress_bars(), errors_only(), reported_progress(report):
            loaded, info = auto_class(model.config).from_pretrained(
                reading.path,
                dtype=reading.dtype,
                use_safetensors=reading.is_safe,
                weights_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are reported below, by name
                **own,
            )
    except ModelError:
        raise
    except Exception as error:
        # The library raises many kinds of errors, and wraps some. An exception from `progress` is
        # re-raised unchanged; every other error means that these weights cannot be used.
        if refusal:
            raise refusal[0] from None
        refuse_short_memory(error, "while the weights were read")
        raise ModelError(
            f"model.source: the weights of {source} cannot be loaded ({first_line(error)}); give a "
            "folder or Hugging Face id with safetensors weights or pytorch_model.bin, or set "
            "model.init to random."
        ) from error
    missing = sorted(set(info["missing_keys"]) - set(model.aliases))
    mismatched = sorted(key for key, *_ in info["mismatched_keys"])
    lacking = missing + mismatched
    if lacking:
        raise ModelError(
            f"model.source: the weights of {source} do not fill the model ({lacking[0]} is missing "
            "or of another shape); give the folder that belongs to this configuration."
        )
    return loaded


def initialize(
    model: StreamedModel,
    states: HostStates,
    seed: int,
    device: torch.device,
    progress: Progress = no_progress,
) -> None:
    """Writes random weights, unit by unit, drawn by the model's own `_init_weights`.

    They are drawn on `device`, which is faster than the host. The state of torch's generators is
    restored afterwards.
    """
    total = model.parameter_count
    done = 0
    devices = [device] if device.type != "cpu" else []
    with (
        torch.random.fork_rng(devices=devices, device_type=device.type),
        torch.no_grad(),
    ):
        torch.manual_seed(seed)
        for unit in model.units:
            for name, tensor in _fresh(model, unit, device).items():
                states.parameters.write(unit.name, name, tensor)
            done += unit.layout.parameter_count
            progress(done, total)


def _fresh(model: StreamedModel, unit: Unit, device: torch.device) -> dict[str, torch.Tensor]:
    """Returns new weights of a unit, by their names within it."""
    init = model.skeleton.model._init_weights
    if unit.block is not None:
        config = getattr(unit.block, "config", None) or model.config
        # The memo makes the copy share the configuration, which may be large.
        block = copy.deepcopy(unit.block, {id(config): config}).to_empty(device=device)
        block.__dict__.pop("forward", None)  # the recorder of the capture pass
        _initialize_tree(block, init)
        own = {spec.name for spec in unit.layout.parameters}
        return {name: each for name, each in block.named_parameters() if name in own}
    fresh: dict[str, torch.Tensor] = {}
    for spec in unit.layout.parameters:
        owner, attribute = unit.bindings[spec.name][0]
        # A copy of the module with parameters of its own and without its child modules.
        alone = copy.copy(owner)
        alone.__dict__.pop("_is_hf_initialized", None)
        alone._modules = {}
        alone._parameters = {
            name: _zeros_like(parameter, device) for name, parameter in owner._parameters.items()
        }
        init(alone)
        fresh[spec.name] = getattr(alone, attribute)
    return fresh


def _zeros_like(parameter: nn.Parameter | None, device: torch.device) -> nn.Parameter | None:
    if parameter is None:  # such as the missing bias of a linear layer
        return None
    return nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=device))


def _initialize_tree(module: nn.Module, init: Callable[[nn.Module], None]) -> None:
    """Initializes all modules, children first, as transformers does.

    Parameters that no rule initializes are set to zero, since their memory is uninitialized.
    """
    for parameter in module.parameters():
        parameter.zero_()
    for child in reversed(list(module.modules())):
        child.__dict__.pop("_is_hf_initialized", None)
        init(child)
