"""The size of each source of weights, and whether all of them fit in memory at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import FitError, ModelError
from engine.machine.cgroups import sample_host_memory
from engine.model.build.build import build_model
from engine.model.build.pretrained_files import load_config
from engine.model.build.read_model import read_model
from engine.model.build.units import StreamedModel
from engine.paths import resolve_source
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.runtime.device.cuda_backend import cuda_available
from engine.runtime.device.open_backend import open_backend
from engine.text import MIB, in_gib
from engine.tools.chat.conversation import Source
from engine.training.weights.weights import reading_bytes

MARGIN_BYTES = 512 * MIB
"""Bytes of RAM and of GPU memory that are left for everything else, such as the caches of the
answers.
"""


@dataclass(frozen=True)
class Size:
    """Bytes that the weights take.

    `host` is the size of the weight planes, `loading` is what is needed in addition while they are
    read, and `device` is the size of the buffers that an answer needs.
    """

    host: int
    loading: int
    device: int


def size_of_source(source: Source) -> Size:
    """Returns the size of a source. Raises ModelError where the model cannot be built."""
    config = source.config
    model = build_model(read_model(config).config, config.model, config.train.parts)
    is_kept = source.kind in ("checkpoint", "best")
    is_read = not is_kept and source.config.model.init == "pretrained"
    return size_of(model, reading_bytes(model) if is_read else 0)


def size_of(model: StreamedModel, loading: int) -> Size:
    """Returns the size of a model. While its weights are read, they take `loading` bytes more."""
    planes = [layout.plane_bytes(model.dtype) for layout in model.layouts]
    host = 0
    for plane in planes:
        host += sum(size for name, size in plane.items() if name in WEIGHT_PLANES)
    # The embedding and the head have one buffer each; the blocks share two in turn.
    slots = [layout.slot_bytes(model.dtype) for layout in model.layouts]
    device = slots[0] + slots[-1] + 2 * max(slots[1:-1], default=0)
    return Size(host, loading, device)


def folder_of(folder: str, label: str = "") -> Source:
    """Returns a source for a Hugging Face folder on this machine, such as an export.

    Without a `label`, the source is named after the folder. Raises ModelError if the folder does
    not exist.
    """
    path = resolve_source(folder.strip()) if folder.strip() else None
    if path is None or not path.is_dir():
        raise ModelError(
            f"{folder.strip() or 'Nothing'} is not a folder on this machine; give a folder that "
            "was exported."
        )
    stored = str(getattr(load_config(str(path)), "dtype", ""))
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    if stored.endswith("float32"):
        dtype = "float32"
    config = TrainConfig(
        name=path.name,
        model=ModelConfig(source=str(path), dtype=dtype),
        data=DataConfig(source="none"),
    )
    return Source("folder", label or path.name, config)


# ---------------------------------------------------------------------- what fits

TOGETHER, IN_TURN = "together", "in_turn"
ADVICE = "close other programs or stop a run that is paused"
_NO_BASE = ", or leave the base model out"


def how_they_fit(sources: list[Source], free: tuple[int, int | None] | None = None) -> str:
    """Returns TOGETHER if all sources can be in memory at once, else IN_TURN.

    `free` holds the free bytes of RAM and of GPU memory (None if no GPU is used); without it, they
    are measured. Raises FitError if a source does not fit even alone.
    """
    if free is None:
        free = _free_memory(any(source.config.engine.device != "cpu" for source in sources))
    host, device = free
    sizes = []
    for source in sources:
        size = size_of_source(source)
        sizes.append(size)
        _refuse_what_does_not_fit(source, size, host, device)
    # Sources are loaded one after the other, so the peak may come while any of them is read.
    held = peak = 0
    for size in sizes:
        peak = max(peak, held + size.host + size.loading)
        held += size.host
    fits = peak + MARGIN_BYTES <= host
    if device is not None:
        fits = fits and sum(size.device for size in sizes) + MARGIN_BYTES <= device
    return TOGETHER if fits else IN_TURN


def _refuse_what_does_not_fit(source: Source, size: Size, host: int, device: int | None) -> None:
    """Raises FitError if a source alone takes more memory than is free."""
    advice = ADVICE + _NO_BASE if source.kind == "base" else ADVICE
    if size.host + size.loading + MARGIN_BYTES > host:
        raise FitError(
            f"{source.label} needs {in_gib(size.host + size.loading)} of RAM to answer and "
            f"{in_gib(host)} is free; {advice}."
        )
    if device is not None and size.device + MARGIN_BYTES > device:
        raise FitError(
            f"{source.label} needs {in_gib(size.device)} of GPU memory to answer and "
            f"{in_gib(device)} is free; {advice}."
        )


def _free_memory(on_device: bool) -> tuple[int, int | None]:
    if not on_device or not cuda_available():
        return sample_host_memory()[1], None
    backend = open_backend("cuda")
    try:
        return sample_host_memory()[1], backend.free_memory()
    finally:
        backend.close()
