"""A folder with an adapter, as PEFT writes and reads it: adapter_config.json and
adapter_model.safetensors. No torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, structs

from engine import safe_files
from engine.config.adapters import Adapters
from engine.errors import ModelError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_UNKNOWN = {
    "use_dora": "DoRA",
    "lora_bias": "biases of its own",
    "rank_pattern": "ranks that differ between layers",
    "alpha_pattern": "alphas that differ between layers",
    "layer_replication": "layers that are there twice",
    "trainable_token_indices": "tokens that are trained alone",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal factors",
    "alora_invocation_tokens": "tokens that invoke it",
}
"""Settings with which PEFT computes something else."""


_MOST_BYTES = 1 << 20
"""Largest number of bytes of an adapter_config.json."""
_Name = Annotated[str, Meta(max_length=1000)]


class _Settings(Struct):
    """What is used of an adapter_config.json, typed. Nothing of it is taken as a pattern."""

    peft_type: _Name | None = None
    r: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    lora_alpha: Annotated[float, Meta(ge=0, le=1e9)] | None = None
    use_rslora: bool | None = None
    bias: _Name | None = None
    target_parameters: Annotated[list[_Name], Meta(max_length=1000)] | None = None
    use_dora: Any = None
    lora_bias: Any = None
    rank_pattern: Any = None
    alpha_pattern: Any = None
    layer_replication: Any = None
    trainable_token_indices: Any = None
    use_qalora: Any = None
    use_bdlora: Any = None
    alora_invocation_tokens: Any = None


def peft_key(full_name: str) -> str:
    """Returns the name that a parameter has in a file of PEFT."""
    return _PREFIX + full_name


def is_peft_folder(place: str | os.PathLike[str]) -> bool:
    """Returns whether there is an adapter in a folder."""
    return (Path(place).expanduser() / CONFIG).is_file()


@dataclass(frozen=True)
class PeftFolder:
    """An adapter that was trained elsewhere."""

    path: Path
    settings: Mapping[str, Any]
    """Settings of its adapter_config.json."""

    @classmethod
    def read(cls, place: str | os.PathLike[str]) -> PeftFolder:
        """Reads the settings. Raises ModelError where they, or the weights, are not there."""
        path = Path(place).expanduser()
        # A person has named the folder. In the hub's cache, files are links.
        file = Path(os.path.realpath(path / CONFIG))
        try:
            typed = safe_files.read_json(file, file.parent, _Settings, _MOST_BYTES)
        except OSError as error:
            raise ModelError(
                f"model.start_from: {path / CONFIG} cannot be read ({error.strerror})."
            ) from None
        settings = {
            name: value for name, value in structs.asdict(typed).items() if value is not None
        }
        if not (path / WEIGHTS).is_file():
            raise ModelError(
                f"model.start_from: there is no {WEIGHTS} in {path}; save the adapter as "
                "safetensors, or give another folder."
            )
        return cls(path, settings)

    def refuse_other(self, adapters: Adapters | None) -> None:
        """Raises ModelError where the adapter is not of these settings. None: no adapters are
        trained.
        """
        if adapters is None:
            raise ModelError(
                f"model.start_from: {self.path} holds an adapter; set train.method to lora, or "
                "start from a whole model into which it is merged."
            )
        kind = self.settings.get("peft_type")
        if kind != "LORA":
            raise ModelError(
                f"model.start_from: the adapter in {self.path} is of the kind {kind}, and only "
                "LORA can be trained here."
            )
        other = next((what for name, what in _UNKNOWN.items() if self.settings.get(name)), None)
        if self.settings.get("bias", "none") != "none":
            other = "biases that are trained"
        if other is not None:
            raise ModelError(
                f"model.start_from: the adapter in {self.path} has {other}, which cannot be "
                "trained here; start from another one."
            )
        self._compare("r", "train.lora_rank", adapters.rank)
        self._compare("lora_alpha", "train.lora_alpha", adapters.alpha)
        self._compare("use_rslora", "train.lora_rslora", adapters.rslora)

    def _compare(self, name: str, setting: str, here: float) -> None:
        there = self.settings.get(name, False)
        if not isinstance(there, (int, float)) or not math.isclose(there, here):
            adapter_value, own_value = (str(value).lower() for value in (there, here))
            raise ModelError(
                f"model.start_from: {name} of the adapter in {self.path} is {adapter_value} and "
                f"{setting} is {own_value}; set {setting} to {adapter_value}."
            )


@dataclass(frozen=True)
class Base:
    """The model to which an adapter belongs."""

    source: str
    targets: Sequence[str]
    """Names of the layers that have an adapter."""
    target_parameters: Sequence[str]
    """Names of the parameters that have adapters of their own."""
    saved: Sequence[str]
    """Full names of the modules that are trained as a whole."""
    is_transposed: bool
    """Whether the weights of the layers are [features in, features out]."""


def peft_settings(adapters: Adapters, base: Base) -> dict[str, Any]:
    """Returns the content of an adapter_config.json."""
    alpha = int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": base.source,
        "bias": "none",
        "fan_in_fan_out": base.is_transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "layers_pattern": None,
        "layers_to_transform": None,
        "lora_alpha": alpha,
        "lora_dropout": adapters.dropout,
        "modules_to_save": list(base.saved) or None,
        "peft_type": "LORA",
        "r": adapters.rank,
        "rank_pattern": {},
        "revision": None,
        "target_modules": list(base.targets),
        "target_parameters": list(base.target_parameters) or None,
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": adapters.rslora,
    }


def target_modules(adapted: Collection[str], all_modules: Collection[str]) -> list[str]:
    """Returns what names these layers to PEFT: the ends of their names, or their full names where
    other modules have the same ends.
    """
    ends = {name.rpartition(".")[2] for name in adapted}
    meant = {name for name in all_modules if name.rpartition(".")[2] in ends}
    return sorted(ends if meant == set(adapted) else adapted)
