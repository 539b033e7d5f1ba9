"""The first weights of a new run: those of its model, of an earlier run, or of an adapter."""

from __future__ import annotations

from functools import partial

import torch

from engine.config.adapters import Adapters
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.model.build.units import StreamedModel
from engine.model.lora.peft_folder import PeftFolder, is_peft_folder
from engine.progress import Progress
from engine.runtime.host.host_states import HostStates
from engine.training.weights.adapter_weights import initialize_adapters, load_adapters
from engine.training.weights.earlier_run import EarlierRun, stands_beside_source
from engine.training.weights.resize_embeddings import ResizedEmbeddings
from engine.training.weights.start_from import load_start
from engine.training.weights.weights import initialize, load_pretrained


def refuse_start(config: TrainConfig) -> None:
    """Raises ModelError where there is nothing at `model.start_from`, or an adapter that does not
    fit these settings. Nothing is loaded.
    """
    place, parts = config.model.start_from or "", config.train.parts
    adapters = parts if isinstance(parts, Adapters) else None
    if is_peft_folder(place):
        PeftFolder.read(place).refuse_other(adapters)
    else:
        earlier = EarlierRun.read(place)
        earlier.refuse_other(adapters)
        earlier.refuse_missing_changes(config)
    if config.exports_adapter and not stands_beside_source(config):
        raise ConfigError(
            "output.export_form",
            f"adapters beside the weights that model.start_from gives do not fit "
            f"{config.model.source}; set it to model.",
        )


def tokens_at_start(config: TrainConfig) -> tuple[str, ...]:
    """Returns the added tokens whose rows a new run takes over from an earlier one."""
    place = config.model.start_from
    if place is None or is_peft_folder(place):
        return ()
    earlier = EarlierRun.read(place)
    return earlier.tokens if earlier.is_of(config.model.source) else ()


def fill_start(
    config: TrainConfig,
    model: StreamedModel,
    states: HostStates,
    how: tuple[torch.device, Progress],
) -> list[str]:
    """Fills the weight planes of a new run. Returns sentences on weights that are not the model's
    own, and on weights that have no adapters. how: the device on which random weights are drawn,
    and the progress.
    """
    device, progress = how
    place, seed = config.model.start_from, config.train.seed
    if place is not None and not is_peft_folder(place):
        initialize_adapters(model, states, seed)  # the earlier run may have had none
        rows = None
        if config.data.add_tokens:
            vocabulary = model.config.get_text_config().vocab_size
            rows = partial(ResizedEmbeddings, after=vocabulary, seed=seed)
        start = load_start(place, states, model.persistent_buffers(), progress, rows)
        return [f"The weights are those of {start.path}.", *_left_out(model)]
    if config.model.init == "random":
        initialize(model, states, seed, device, progress)
    else:
        load_pretrained(model, config.model.source, states, progress, seed)
    sentences = [*_dequantized(config, model), *_left_out(model)]
    initialize_adapters(model, states, seed)
    if place is None:
        return sentences
    folder = PeftFolder.read(place)
    load_adapters(folder, model, states)
    return [f"The adapters are those of {folder.path}.", *sentences]


def _dequantized(config: TrainConfig, model: StreamedModel) -> list[str]:
    """Returns a sentence on weights that were dequantized, where they were."""
    if model.quantized is None or config.model.init == "random":
        return []
    return [
        f"The weights of {config.model.source} are stored in {model.quantized.method.words}. They "
        "were dequantized on loading."
    ]


def _left_out(model: StreamedModel) -> list[str]:
    """Returns a sentence on the weights of a model with adapters that can have none."""
    specs = [spec for layout in model.layouts for spec in layout.parameters]
    is_stacked = any(spec.frozen and len(spec.shape) == 3 for spec in specs)
    if not is_stacked or not any(spec.adapter for spec in specs):
        return []
    return ["The experts of this model are stacked in one weight, so they have no adapters."]
