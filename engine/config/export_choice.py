"""Which weights of a run are exported, in which dtype and in which form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.errors import ConfigError

ExportDtype = Literal["auto", "bfloat16", "float32"]
EXPORT_DTYPES: tuple[ExportDtype, ...] = ("auto", "bfloat16", "float32")
ExportFrom = Literal["best", "last"]
EXPORT_FROM: tuple[ExportFrom, ...] = ("best", "last")
ExportForm = Literal["model", "adapter"]
EXPORT_FORMS: tuple[ExportForm, ...] = ("model", "adapter")
"""Forms of a folder of Hugging Face, which a run may write at its end."""
GGUF = "gguf"
"""Form of one file that llama.cpp, Ollama and LM Studio read."""
GgufType = Literal["q8_0", "bfloat16", "float16", "float32"]
GGUF_TYPES: tuple[GgufType, ...] = ("q8_0", "bfloat16", "float16", "float32")


@dataclass(frozen=True)
class ExportChoice:
    """What one export writes. Raises ConfigError for a dtype or weights that are unknown, and for a
    checkpoint beside `weights`.
    """

    checkpoint: int | None = None
    """Step of the checkpoint that is exported; None leaves that to `weights`."""
    dtype: str = "auto"
    """Dtype of the written weights; `auto` is the model's own. A GGUF file may also have float16
    and q8_0.
    """
    weights: str | None = None
    """`best` exports the best weights that the run has kept, `last` the newest checkpoint that
    verifies. None means what the run's `output.export_from` says, or those that are there.
    """
    form: str | None = None
    """Of a run that trained adapters, `model` exports the whole model, into which they are merged,
    and `adapter` exports them alone. None is the run's `output.export_form`. `gguf` writes the
    whole model as one file.
    """

    def __post_init__(self) -> None:
        dtypes = (*EXPORT_DTYPES, *GGUF_TYPES) if self.form == GGUF else EXPORT_DTYPES
        if self.dtype not in dtypes:
            known = ", ".join(dict.fromkeys(dtypes))
            raise ConfigError("output.export_dtype", f"{self.dtype!r} is unknown; give {known}.")
        if self.form is not None and self.form not in (*EXPORT_FORMS, GGUF):
            known = " or ".join((*EXPORT_FORMS, GGUF))
            raise ConfigError("output.export_form", f"{self.form!r} is unknown; give {known}.")
        if self.weights is None:
            return
        if self.weights not in EXPORT_FROM:
            known = " or ".join(EXPORT_FROM)
            raise ConfigError("output.export_from", f"{self.weights!r} is unknown; give {known}.")
        if self.checkpoint is not None:
            raise ConfigError(
                "output.export_from",
                f"the checkpoint of step {self.checkpoint} and the {self.weights} weights are both "
                "asked for; give one of them.",
            )


AS_CONFIGURED = ExportChoice()
"""Exports the weights that the run's settings name, in the model's own dtype."""


def written_dtype(asked: str, of_model: str) -> str:
    """Returns the dtype of an export, of a model that computes in `of_model`."""
    return of_model if asked == "auto" else asked
