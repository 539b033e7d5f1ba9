"""Weights that can be talked to: their size, and whether all of them fit in memory at once."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.data_settings import DataConfig
from engine.config.settings import ModelConfig, TrainConfig
from engine.errors import FitError, ModelError
from engine.machine.cgroups import sample_host_memory
from engine.model.build import build_model
from engine.model.layout import WEIGHT_PLANES
from engine.model.pretrained_files import load_config
from engine.model.units import StreamedModel
from engine.paths import resolve_source
from engine.runtime.cuda_backend import cuda_available
from engine.runtime.open_backend import open_backend
from engine.talk.conversation import Source
from engine.words import MIB, in_gib

MARGIN_BYTES = 512 * MIB
"""Of RAM and of GPU memory that is left to everything else, such as the caches of the answers."""


@dataclass(frozen=True)
class Size:
    """Bytes: `host` of the weight planes, `loading` more while they are read, `device` of the
    buffers that an answer needs.
    """

    host: int
    loading: int
    device: int


def size_of_source(source: Source) -> Size:
    """Raises ModelError where the model cannot be built."""
    return size_of(
        build_model(load_config(source.config.model.source), source.config.model),
        source.kind != "checkpoint" and source.config.model.init == "pretrained",
    )


def size_of(model: StreamedModel, is_read: bool) -> Size:
    """`is_read`: from a Hugging Face folder, which takes a copy on the way."""
    planes = [layout.plane_bytes(model.dtype) for layout in model.layouts]
    host = sum(size for plane in planes for name, size in plane.items() if name in WEIGHT_PLANES)
    high = [plane["weight_high"] for plane in planes]
    return Size(
        host, sum(high) if is_read else 0, high[0] + high[-1] + 2 * max(high[1:-1], default=0)
    )


def folder_of(folder: str, label: str = "") -> Source:
    """A Hugging Face folder on this machine, such as an export, called by its own name without a
    `label`. Raises ModelError where there is none.
    """
    path = resolve_source(folder.strip()) if folder.strip() else None
    if path is None or not path.is_dir():
        raise ModelError(
            f"{folder.strip() or 'Nothing'} is not a folder on this machine; give a folder that "
            "was exported."
        )
    dtype = (
        "float32"
        if str(getattr(load_config(str(path)), "dtype", "")).endswith("float32")
        else "bfloat16"
    )
    config = TrainConfig(
        name=path.name,
        model=ModelConfig(source=str(path), dtype=dtype),
        data=DataConfig(source="none"),
    )
    return Source("folder", label or path.name, config)


# ---------------------------------------------------------------------- what fits

TOGETHER, IN_TURN = "together", "in_turn"
ADVICE, _NO_BASE = (
    "close other programs or stop a run that is paused",
    ", or talk to the tuned model alone",
)


def how_they_fit(sources: list[Source], free: tuple[int, int | None] | None = None) -> str:
    """TOGETHER where the weights of all sources can be in memory at once, else IN_TURN. `free`:
    bytes of RAM and of GPU memory (None where none is used) that are free; measured if not given.
    Raises FitError with one sentence where one of them does not fit at all.
    """
    host, device = free or _free_memory(
        any(source.config.engine.device != "cpu" for source in sources)
    )
    sizes = []
    for source in sources:
        size = size_of_source(source)
        sizes.append(size)
        if size.host + size.loading + MARGIN_BYTES > host:
            raise FitError(
                f"{source.label} needs {in_gib(size.host + size.loading)} of RAM to answer and "
                f"{in_gib(host)} is free; {ADVICE}{_NO_BASE if source.kind == 'base' else ''}."
            )
        if device is not None and size.device + MARGIN_BYTES > device:
            raise FitError(
                f"{source.label} needs {in_gib(size.device)} of GPU memory to answer and "
                f"{in_gib(device)} is free; {ADVICE}{_NO_BASE if source.kind == 'base' else ''}."
            )
    held = peak = 0
    for size in sizes:
        peak = max(peak, held + size.host + size.loading)
        held += size.host
    fits = peak + MARGIN_BYTES <= host
    if device is not None:
        fits = fits and sum(size.device for size in sizes) + MARGIN_BYTES <= device
    return TOGETHER if fits else IN_TURN


def _free_memory(on_device: bool) -> tuple[int, int | None]:
    if not on_device or not cuda_available():
        return sample_host_memory()[1], None
    backend = open_backend("cuda")
    try:
        return sample_host_memory()[1], backend.free_memory()
    finally:
        backend.close()
