"""An `ExportChoice` says which weights of a run are exported, and in which dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

ExportDtype = Literal["auto", "bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = ("auto", "bfloat16", "float32")


@dataclass(frozen=True)
class ExportChoice:
    """An `ExportChoice` is made for one export. Raises ConfigError for a dtype that is unknown."""

    checkpoint: int | None = None
    """The checkpoint of this step is exported; None means the newest one that verifies."""
    dtype: str = "auto"
    """The weights are written in this dtype; `auto` means the model's own."""

    def __post_init__(self) -> None:
        if self.dtype not in EXPORT_DTYPES:
            known = ", ".join(EXPORT_DTYPES)
            raise ConfigError("output.export_dtype", f"{self.dtype!r} is unknown; give {known}.")


NEWEST = ExportChoice()
"""The newest checkpoint is exported in the model's own dtype."""


def written_dtype(asked: str, of_model: str) -> str:
    """Returns the dtype of an export, of a model that computes in `of_model`."""
    return of_model if asked == "auto" else asked
