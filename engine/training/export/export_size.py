"""How large an export will be and where it goes, before any weight is read: the manifest of a
checkpoint has the shapes of all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct

from engine import safe_files
from engine.config.export_choice import (
    EXPORT_DTYPES,
    GGUF,
    GGUF_TYPES,
    ExportChoice,
    written_dtype,
)
from engine.errors import RamstreamError, RunError
from engine.files import disk_free
from engine.planning.layout.adapter_layout import FACTORS
from engine.runs.record.run_folder import RunFolder
from engine.text import in_gib
from engine.training.checkpoints.checkpoint import folders_by_step
from engine.training.checkpoints.manifest import MANIFEST, MOST_BYTES, run_of
from engine.training.export.gguf_known import gguf_file_name, gguf_item_bytes

Shape = Sequence[int]
_ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class ExportSizes:
    """The bytes of the weights of a run in each form."""

    dtype: str
    """The model's own."""
    whole: list[Shape]
    trained: list[Shape]

    def of(self, form: str, dtype: str) -> int:
        """Returns the bytes of an export. form: model, adapter or gguf."""
        kind = written_dtype(dtype, self.dtype)
        if form == GGUF:
            return gguf_bytes(self.whole, kind)
        shapes = self.trained if form == "adapter" else self.whole
        return sum(map(math.prod, shapes)) * _ITEM_BYTES[kind]

    @property
    def of_all_forms(self) -> dict[str, dict[str, int]]:
        dtypes: dict[str, Sequence[str]] = {
            "model": EXPORT_DTYPES,
            "adapter": EXPORT_DTYPES,
            GGUF: GGUF_TYPES,
        }
        return {form: self._of_form(form, kinds) for form, kinds in dtypes.items()}

    def _of_form(self, form: str, dtypes: Sequence[str]) -> dict[str, int]:
        return {dtype: self.of(form, dtype) for dtype in dtypes}


def gguf_bytes(shapes: Iterable[Shape], kind: str) -> int:
    """Returns the bytes of tensors of these shapes in a GGUF file."""
    return round(sum(math.prod(shape) * gguf_item_bytes(shape, kind) for shape in shapes))


class _Parameter(Struct):
    full_name: str
    shape: tuple[int, ...]
    frozen: bool = False


class _Unit(Struct):
    parameters: tuple[_Parameter, ...]


class _Manifest(Struct):
    dtype: str
    units: tuple[_Unit, ...]


def export_sizes(run: RunFolder) -> ExportSizes | None:
    """Returns the sizes of the exports of a run; None if it has saved nothing, or nothing that can
    be read.
    """
    try:
        saved = {**folders_by_step(run.best_path), **folders_by_step(run.checkpoints_path)}
        if not saved:
            return None
        path = saved[max(saved)]
        manifest = safe_files.read_json(path / MANIFEST, run_of(path), _Manifest, MOST_BYTES)
    except OSError:
        return None
    if manifest.dtype not in _ITEM_BYTES:
        return None
    parameters = [each for unit in manifest.units for each in unit.parameters]
    return ExportSizes(
        manifest.dtype,
        [each.shape for each in parameters if not _is_adapter(each.full_name)],
        [each.shape for each in parameters if not each.frozen],
    )


def _is_adapter(full_name: str) -> bool:
    return any(part in FACTORS for part in full_name.split("."))


@dataclass(frozen=True)
class PlannedExport:
    """What an export will write."""

    bytes: int
    free: int
    """Bytes that may be written there."""
    file: str = ""
    """Name of a GGUF file."""

    @property
    def sentence(self) -> str:
        file = f"{self.file}: " if self.file else ""
        return f"{file}{in_gib(self.bytes)} of weights, {in_gib(self.free)} free."

    def refuse_full_disk(self, folder: Path) -> None:
        """Raises RunError if the disk has no room for it."""
        refuse_full_disk(folder, self.bytes, self.free)


def planned_export(run: RunFolder, folder: Path, choice: ExportChoice) -> PlannedExport | None:
    """Returns what an export to `folder` will write; None if that is not known before."""
    sizes = export_sizes(run)
    try:
        config = run.config
    except RamstreamError:
        return None
    if sizes is None:
        return None
    form = choice.form or ("model" if config.train.method != "lora" else config.output.export_form)
    dtype = written_dtype(choice.dtype, sizes.dtype)
    file = gguf_file_name(config.name, dtype) if form == GGUF else ""
    return PlannedExport(sizes.of(form, dtype), disk_free(folder), file)


def refuse_full_disk(folder: Path, needed: int, free: int) -> None:
    """Raises RunError if fewer bytes are free at `folder` than an export needs."""
    if free < needed:
        raise RunError(
            f"The export needs {in_gib(needed)} at {folder}, and {in_gib(free)} are free; free "
            "some disk space or choose another folder."
        )
