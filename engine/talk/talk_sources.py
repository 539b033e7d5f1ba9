"""Weights that can be talked to, and how many of them fit in memory at once. No torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import cached_property

from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import FitError, ModelError
from engine.machine.cgroups import sample_host_memory
from engine.model.build import build_model
from engine.model.pretrained_files import load_config
from engine.model.units import StreamedModel
from engine.paths import resolve_source
from engine.runtime.host_store import WEIGHT_PLANES
from engine.runtime.open_backend import open_backend
from engine.words import MIB, in_gib

MARGIN_BYTES = 512 * MIB
"""Of RAM and of GPU memory that is left to everything else, such as the caches of the answers."""


@dataclass(frozen=True)
class Source:
    """Weights that can be loaded. kind: `base` (as the run of `config` began), `checkpoint` (`step` of run `run_id`, None for
    its newest) or `folder` (a Hugging Face folder, which `config` names)."""

    kind: str
    label: str = field(compare=False)
    config: TrainConfig
    runs_dir: str = ""
    run_id: str = ""
    step: int | None = None

    @cached_property
    def size(self) -> Size:
        """Raises ModelError where the model cannot be built."""
        return size_of(build_model(load_config(self.config.model.source), self.config.model),
                       self.kind != "checkpoint" and self.config.model.init == "pretrained")


@dataclass(frozen=True)
class Size:
    """Bytes: `host` of the weight planes, `loading` more while they are read, `device` of the buffers that an answer needs."""

    host: int
    loading: int
    device: int


def size_of(model: StreamedModel, is_read: bool) -> Size:
    """`is_read`: from a Hugging Face folder, which takes a copy on the way."""
    planes = [layout.plane_bytes(model.dtype) for layout in model.layouts]
    host = sum(size for plane in planes for name, size in plane.items() if name in WEIGHT_PLANES)
    high = [plane["weight_high"] for plane in planes]
    return Size(host, sum(high) if is_read else 0, high[0] + high[-1] + 2 * max(high[1:-1], default=0))


def base_of(config: TrainConfig) -> Source:
    """The model of a run as it was before the first step."""
    what = config.model.source if config.model.init == "pretrained" else f"{config.model.source}, random weights"
    return Source("base", f"Before training: {what}", config)


def checkpoint_of(runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int | None,
                  label: str) -> Source:
    return Source("checkpoint", label, config, os.fspath(runs_dir), run_id, step)


def folder_of(folder: str, label: str = "") -> Source:
    """A Hugging Face folder on this machine, such as an export, called by its own name without a `label`. Raises ModelError
    where there is none."""
    path = resolve_source(folder.strip()) if folder.strip() else None
    if path is None or not path.is_dir():
        raise ModelError(f"{folder.strip() or 'Nothing'} is not a folder on this machine; give a folder that was exported.")
    dtype = "float32" if str(getattr(load_config(str(path)), "dtype", "")).endswith("float32") else "bfloat16"
    config = TrainConfig(name=path.name, model=ModelConfig(source=str(path), dtype=dtype), data=DataConfig(source="none"))
    return Source("folder", label or path.name, config)


# ---------------------------------------------------------------------- what fits

TOGETHER, IN_TURN = "together", "in_turn"
_ADVICE, _NO_BASE = "close other programs or stop a run that is paused", ", or talk to the tuned model alone"


def how_they_fit(sources: list[Source], room: tuple[int, int | None] | None = None) -> str:
    """TOGETHER where the weights of all sources can be in memory at once, else IN_TURN. `room`: bytes of RAM and of GPU memory
    (None where none is used) that are free; measured if not given. Raises FitError with one sentence where one of them does
    not fit at all."""
    host, device = room or _room(any(source.config.engine.device != "cpu" for source in sources))
    for source in sources:
        size = source.size
        if size.host + size.loading + MARGIN_BYTES > host:
            raise FitError(f"{source.label} needs {in_gib(size.host + size.loading)} of RAM to answer and {in_gib(host)} is "
                           f"free; {_ADVICE}{_NO_BASE if source.kind == 'base' else ''}.")
        if device is not None and size.device + MARGIN_BYTES > device:
            raise FitError(f"{source.label} needs {in_gib(size.device)} of GPU memory to answer and {in_gib(device)} is free; "
                           f"{_ADVICE}{_NO_BASE if source.kind == 'base' else ''}.")
    held = peak = 0
    for source in sources:
        peak = max(peak, held + source.size.host + source.size.loading)
        held += source.size.host
    fits = peak + MARGIN_BYTES <= host
    if device is not None:
        fits = fits and sum(source.size.device for source in sources) + MARGIN_BYTES <= device
    return TOGETHER if fits else IN_TURN


def _room(on_device: bool) -> tuple[int, int | None]:
    from engine.runtime.cuda_backend import cuda_available

    if not on_device or not cuda_available():
        return sample_host_memory()[1], None
    backend = open_backend("cuda")
    try:
        return sample_host_memory()[1], backend.room()
    finally:
        backend.close()
