"""A trained model as one GGUF file, which llama.cpp, Ollama and LM Studio read.

The format is that of the package `gguf` (github.com/ggml-org/llama.cpp), which also rounds weights
to Q8_0: blocks of 32 values share a factor in fp16, and each is a whole number of 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from engine.config.export_choice import GgufType
from engine.errors import RunError
from engine.model.build.units import StreamedModel
from engine.training.export.export_size import gguf_bytes
from engine.training.export.gguf_family import Family, family_of, is_router
from engine.training.export.gguf_known import GGUF_LABELS, NoGguf, stored_type
from engine.training.export.gguf_tokenizer import Vocabulary, vocabulary


class GgufFile:
    """A GGUF file of a model, in one of its types. Raises RunError for a model or a tokenizer that
    llama.cpp would not run as it was trained.
    """

    def __init__(self, model: StreamedModel, tokenizer: Any, ends: tuple[str, ...], kind: GgufType):
        if model.non_text:
            raise NoGguf(
                "A GGUF file has the text part of a model alone, and this one also reads images or "
                "sound.",
                has_parts=True,
            )
        self._model = model
        self._kind = kind
        self._family: Family = family_of(model.config)
        self.vocabulary: Vocabulary = vocabulary(tokenizer, model.config.vocab_size, ends)

    @property
    def bytes(self) -> int:
        """Returns the bytes that the weights take in the file."""
        return gguf_bytes((shape for _, shape in self._shapes()), self._kind)

    def write(
        self,
        path: Path,
        title: str,
        parts: Iterable[tuple[dict[str, Tensor], float]],
        written: Callable[[float], None],
    ) -> None:
        """Writes the file. `parts` are the weights by name, each with the fraction that is done
        with it, in the order of the model's units; `written` is called with that.
        """
        import gguf

        writer = gguf.GGUFWriter(path, self._family.name)
        self._family.write(writer, title)
        self.vocabulary.write(writer)
        writer.add_file_type(_file_type(self._kind))
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        more = self._family.more()
        for name, shape in self._shapes():
            self._announce(writer, self._family.tensors(name, torch.empty(shape, device="meta")))
        self._announce(writer, [(name, values.to("meta")) for name, values in more.items()])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        try:
            for weights, share in parts:
                for full_name, values in weights.items():
                    for name, part in self._family.tensors(full_name, values):
                        writer.write_tensor_data(self._stored(name, part))
                written(share)
            for name, values in more.items():
                writer.write_tensor_data(self._stored(name, values))
        finally:
            writer.close()

    def _shapes(self) -> Iterable[tuple[str, tuple[int, ...]]]:
        """Yields the names of the weights with their shapes, in the order in which they come."""
        for unit in self._model.units:
            for spec in unit.layout.parameters:
                if not spec.adapter:
                    yield spec.full_name, tuple(spec.shape)

    def _announce(self, writer: Any, tensors: list[tuple[str, Tensor]]) -> None:
        for name, empty in tensors:
            array = self._stored(name, empty)
            kind = _raw_type(self._kind_of(name, empty))
            writer.add_tensor_info(name, array.shape, array.dtype, array.nbytes, raw_dtype=kind)

    def _kind_of(self, name: str, values: Tensor) -> GgufType:
        if is_router(name):
            return "float32"
        return cast(GgufType, stored_type(tuple(values.shape), self._kind))

    def _stored(self, name: str, values: Tensor) -> np.ndarray:
        """Returns the values of a tensor as the file has them, empty for one on the meta device."""
        kind = self._kind_of(name, values)
        if values.is_meta:
            return _empty(tuple(values.shape), kind)
        if kind == "bfloat16":
            return values.to(torch.bfloat16).contiguous().view(torch.uint8).numpy()
        if kind == "float16":
            return _halves(values)
        singles = values.to(torch.float32).contiguous().numpy()
        if kind == "float32":
            return singles
        from gguf.quants import quantize

        return quantize(singles, _raw_type(kind))


def _halves(values: Tensor) -> np.ndarray:
    halves = values.to(torch.float16)
    if not torch.isfinite(halves).all():
        raise RunError(
            "Weights of this model are too large for float16; choose bfloat16 or q8_0 for the file."
        )
    return halves.contiguous().numpy()


def _empty(shape: tuple[int, ...], kind: GgufType) -> np.ndarray:
    """Returns an array without memory of its own, of the shape and dtype that `kind` is kept in."""
    from gguf.quants import quant_shape_to_byte_shape

    if kind in ("float32", "float16"):
        return np.broadcast_to(np.zeros((), kind), shape)
    return np.broadcast_to(
        np.zeros((), np.uint8), quant_shape_to_byte_shape(shape, _raw_type(kind))
    )


def _raw_type(kind: GgufType) -> Any:
    import gguf

    return gguf.GGMLQuantizationType[GGUF_LABELS[kind]]


def _file_type(kind: GgufType) -> Any:
    import gguf

    name = "ALL_F32" if kind == "float32" else f"MOSTLY_{GGUF_LABELS[kind]}"
    return gguf.LlamaFileType[name]
