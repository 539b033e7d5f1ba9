"""These functions tell how the weights of a checkpoint are quantized: stored in fewer bits, with
scales beside them. Where each value follows from the files alone, they are dequantized on loading.
All other methods are refused by name. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from engine.errors import ModelError

FIELD = "quantization_config"
"""Name under which a configuration says how its weights are quantized."""


class Method(StrEnum):
    """Weights that are quantized with these methods are dequantized on loading. The values are the
    names in configurations.
    """

    FP8 = "fp8"
    MXFP4 = "mxfp4"

    @property
    def words(self) -> str:
        if self is Method.FP8:
            return "fp8, with a scale for each block"
        return "MXFP4, with a scale for every 32 values"


@dataclass(frozen=True)
class Quantized:
    """A checkpoint is quantized with this method."""

    method: Method
    block: tuple[int, int] | None = None
    """Rows and columns of a weight that share a scale of fp8; None where all do."""


def quantized(config: Any) -> Quantized | None:
    """Returns how the weights of a transformers configuration are quantized, and None where they
    are not. Raises ModelError for what cannot be dequantized.
    """
    found = getattr(config, FIELD, None) or getattr(config.get_text_config(), FIELD, None)
    if found is None:
        return None
    settings = found if isinstance(found, Mapping) else found.to_dict()
    method = settings.get("quant_method")
    if method == Method.MXFP4:
        return Quantized(Method.MXFP4)
    if method != Method.FP8:
        raise ModelError(
            f"{config.model_type} is a quantized checkpoint ({_named(settings)}); Ramstream trains "
            "at full precision, so give the unquantized model."
        )
    for name, plain in (("scale_fmt", "float"), ("expert_dtype", "fp8")):
        if settings.get(name, plain) != plain:
            raise ModelError(
                f"{config.model_type} is a quantized checkpoint whose {name} is "
                f"{settings[name]}, which is not dequantized; give the unquantized model."
            )
    return Quantized(Method.FP8, _block(config.model_type, settings))


def unquantized(config: Any) -> None:
    """Makes a configuration that of the same model with weights of full precision."""
    for part in (config, config.get_text_config()):
        if hasattr(part, FIELD):
            delattr(part, FIELD)


def _named(settings: Mapping[str, Any]) -> str:
    method = settings.get("quant_method")
    return method if isinstance(method, str) else "of an unknown method"


def _block(family: str, settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the rows and columns that share a scale. Raises ModelError for other settings."""
    sizes = settings.get("weight_block_size", (128, 128))
    if sizes is None:
        return None
    are_whole = isinstance(sizes, (list, tuple)) and all(type(size) is int for size in sizes)
    if not are_whole or len(sizes) != 2 or min(sizes) < 1:
        raise ModelError(
            f"{family} is a quantized checkpoint whose weight_block_size is {sizes}; it must be "
            "two numbers of at least 1."
        )
    return tuple(sizes)
