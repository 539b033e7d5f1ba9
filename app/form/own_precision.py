"""The precision in which the weights of a model are stored, from its configuration."""

from __future__ import annotations

from engine.model.hub.model_files import read_object
from engine.paths import resolve_source


def own_precision(source: str) -> str:
    """Returns `model.dtype` for a model: `float32` if the configuration in its folder has it as the
    dtype of the weights, and otherwise `bfloat16`. A model that is not in a folder of this machine
    is taken to be stored in 16 bits, as nearly all models of the hub are.
    """
    folder = resolve_source(source)
    if folder is None:
        return "bfloat16"
    try:
        config = read_object(folder / "config.json")
        text = config.get("text_config") or {}
        dtype = config.get("dtype") or config.get("torch_dtype") or text.get("dtype")
    except (OSError, AttributeError):
        return "bfloat16"
    return "float32" if str(dtype).removeprefix("torch.") == "float32" else "bfloat16"
