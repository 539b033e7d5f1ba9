"""Whether the weights with which a new run begins are on this machine, as far as their files show.

`check`, the form and a run ask this before anything is built, read or allocated. It needs no torch
where a run begins with the weights of its model.
"""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.model.hub.local_weights import refuse_no_model, refuse_no_weights
from engine.model.hub.missing_files import lacks_files, refuse_missing_files
from engine.model.lora.peft_folder import is_peft_folder
from engine.paths import resolve_source


def needs_own_weights(config: TrainConfig) -> bool:
    """Returns whether the run begins with the weights that `model.init` names: an adapter is no
    whole model.
    """
    place = config.model.start_from
    return place is None or is_peft_folder(place)


def downloads_weights(config: TrainConfig) -> bool:
    """Returns whether a run begins with weights of the hub that are not on this machine."""
    weights = config.model.init == "pretrained" and needs_own_weights(config)
    return weights and lacks_files(config.model.source, weights=True)


def refuse_out_of_reach(config: TrainConfig, waits: bool = True) -> None:
    """Raises ModelError, in one sentence, for a model of the hub that is not on this machine while
    the hub cannot be reached. `waits`: as for `refuse_missing_files`.
    """
    weights = config.model.init == "pretrained" and needs_own_weights(config)
    refuse_missing_files(config.model.source, weights, waits)


def refuse_unusable(config: TrainConfig) -> None:
    """Raises ModelError, in one sentence, for a model on this machine that lacks what a new run
    begins with, and for a `model.start_from` that is empty or an adapter of other settings.
    """
    source = config.model.source.strip()
    path = resolve_source(source)
    refuse_no_model(source, path)
    if config.model.init == "pretrained" and needs_own_weights(config):
        refuse_no_weights(source, path)
    if config.model.start_from is not None:
        # These functions bring torch.
        from engine.training.weights.start_weights import refuse_start

        refuse_start(config)
