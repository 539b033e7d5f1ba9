"""What is known of the run whose weights a new run begins with (`model.start_from`), and whether
adapters stand beside the weights of `model.source`. Nothing is loaded.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.adapters import TARGET_PARAMETERS, Adapters
from engine.config.rope_settings import ROPE_SCALING
from engine.config.settings import TrainConfig
from engine.errors import CheckpointError, ConfigError, ModelError
from engine.model.lora.peft_folder import is_peft_folder
from engine.paths import lasting_source
from engine.runs.record.run_folder import RunFolder
from engine.training.checkpoints.restore import verified_manifest
from engine.training.weights.start_from import newest_weights


@dataclass(frozen=True)
class EarlierRun:
    """The run whose weights a new one begins with."""

    path: Path
    """Folder of its checkpoint."""
    adapters: Adapters | None
    """Adapters that it trained; None where it trained none, or this is unknown."""
    config: TrainConfig | None
    """Its settings; None where the checkpoint is in no run's folder."""
    tokens: tuple[str, ...] = ()
    """Tokens that it added to the tokenizer of its model."""
    source: str = ""
    """Name of the model that it trained; empty where this is unknown."""
    rope_scaling: str = "none"
    """Its scaling of the rotary embeddings."""

    @classmethod
    def read(cls, place: str | os.PathLike[str]) -> EarlierRun:
        """Reads what is known of a checkpoint and its run. place: as in `newest_weights`. Raises
        ModelError where there is no checkpoint, or a damaged one.
        """
        path = newest_weights(place)
        try:
            state = verified_manifest(path).state
        except CheckpointError as error:
            raise ModelError(f"model.start_from: {error}") from None
        config = None
        with contextlib.suppress(ConfigError):
            config = RunFolder(path.absolute().parent.parent).config
        # A resume that was refused may have changed config.yaml. The best weights have no other.
        settings = state.get("settings")
        if settings:
            tokens = tuple(settings.get("data.add_tokens", ()))
            scaling = settings.get(ROPE_SCALING, "none")
            source = settings.get("model.source", "")
            return cls(path, _adapters(settings), config, tokens, source, scaling)
        if config is None:
            return cls(path, None, None)
        parts = config.train.parts
        adapters = parts if isinstance(parts, Adapters) else None
        model, tokens = config.model, config.data.add_tokens
        return cls(path, adapters, config, tokens, model.source, model.rope_scaling)

    def refuse_other(self, adapters: Adapters | None) -> None:
        """Raises ModelError where the run's adapters mean something else with these settings. None:
        no adapters are trained.
        """
        if self.adapters is None or adapters is None:
            return
        for name in ("rank", "alpha", "rslora"):
            there, here = getattr(self.adapters, name), getattr(adapters, name)
            if there != here:
                trained, own = (str(value).lower() for value in (there, here))
                raise ModelError(
                    f"model.start_from: the adapters in {self.path} were trained with "
                    f"train.lora_{name} {trained}, and here it is {own}; set train.lora_{name} to "
                    f"{trained}."
                )
        there, here = self.adapters.target_parameters, adapters.target_parameters
        if there and here and set(there) != set(here):
            raise ModelError(
                f"model.start_from: the adapters in {self.path} are those of the stacked experts "
                f"{', '.join(there)}; set {TARGET_PARAMETERS} to these."
            )

    def is_of(self, source: str) -> bool:
        """Returns whether the run trained the model of this name."""
        return lasting_source(self.source) == lasting_source(source)

    def refuse_missing_changes(self, config: TrainConfig) -> None:
        """Raises ModelError where these settings lack what the run added to the same model: tokens
        of its tokenizer, or longer rows.
        """
        if not self.is_of(config.model.source):
            return
        if config.data.add_tokens[: len(self.tokens)] != self.tokens:
            raise ModelError(
                f"model.start_from: the weights in {self.path} have rows for the tokens "
                f"{', '.join(self.tokens)} that their run added; begin data.add_tokens with these, "
                "in this order."
            )
        if self.rope_scaling != "none" and config.model.rope_scaling == "none":
            raise ModelError(
                f"model.start_from: the weights in {self.path} were trained with {ROPE_SCALING} "
                f"{self.rope_scaling}, and here it is none; set it to {self.rope_scaling}."
            )


def _adapters(settings: Mapping[str, Any]) -> Adapters | None:
    """Returns the adapters of settings by dotted name, as a checkpoint keeps them."""
    if settings.get("train.method") != "lora":
        return None
    return Adapters(
        settings["train.lora_rank"],
        settings["train.lora_alpha"],
        settings["train.lora_dropout"],
        settings["train.lora_rslora"],
        tuple(settings["train.lora_targets"]),
        tuple(settings["train.lora_save_modules"]),
        tuple(settings.get("train.lora_target_parameters", ())),
    )


def stands_beside_source(config: TrainConfig) -> bool:
    """Returns whether the untrained weights of a run with adapters are those of `model.source`, so
    that its adapters fit the model of that name.
    """
    place = config.model.start_from
    if place is None or is_peft_folder(place):
        return config.model.init == "pretrained"
    try:
        earlier = EarlierRun.read(place)
    except ModelError:
        # It is gone. Of a run that exports adapters alone, this was known before its first step.
        return config.exports_adapter
    before, parts = earlier.config, config.train.parts
    if before is None or earlier.adapters is None or not isinstance(parts, Adapters):
        return False
    # Modules that were trained whole must be written again.
    saved = set(earlier.adapters.save_modules) == set(parts.save_modules)
    named = lasting_source(before.model.source) == lasting_source(config.model.source)
    return saved and named and stands_beside_source(before)
