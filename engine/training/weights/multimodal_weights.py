"""A model that also reads images or sound has weights that no text passes through. They are not
trained and never loaded. An export copies them from the files of the model's source, bit by bit,
with every file that stands beside them: configuration, processor, tokenizer and chat template.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine import safe_files
from engine.errors import ModelError, RunError, first_line
from engine.model.build.library import names_in_model
from engine.model.build.units import StreamedModel
from engine.model.hub.hub_cache import cached_weights
from engine.model.hub.model_files import CONFIG, refuse_links_elsewhere
from engine.model.hub.tensor_files import StoredTensor, files_with_weights, read_tensor, tensors_in
from engine.paths import resolve_source

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
"""Endings of files that hold weights, or list them."""
_WRITTEN_ANEW = ("readme.md", "modelfile")
_WITH_DTYPE = ("dtype", "torch_dtype")
"""Fields of a configuration that may name the dtype of its weights."""


@dataclass(frozen=True)
class Source:
    """A folder with a whole model that reads more than text."""

    folder: Path
    model: StreamedModel

    @classmethod
    def of(cls, model: StreamedModel, source: str) -> Source:
        """Returns the folder of `source` on this machine. Raises ModelError if there is none, or
        if it lacks weights that an export would copy from it.
        """
        path = resolve_source(source)
        folder = cached_weights(source) if path is None else path
        if folder is None or not folder.is_dir():
            raise ModelError(
                f"model.source: {source} is not on this machine, and its weights that are not "
                "trained are copied from there into the export; bring it back to its place."
            )
        found = cls(folder, model)
        try:
            found.copied()
            there = {own for names in found.names.values() for own in names}
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.source: the weights in {folder} cannot be read ({first_line(error)}), and "
                "those that are not trained are copied from there into the export; get the files "
                "again."
            ) from error
        lacking = sorted(model.non_text.keys() - there)
        if lacking:
            raise ModelError(
                f"model.source: {folder} lacks {lacking[0]}, which is not trained and is copied "
                "from there into the export; give a folder that holds the whole model."
            )
        return found

    @cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """Tensors of the files, by name."""
        found: dict[str, StoredTensor] = {}
        for file in files_with_weights(self.folder):
            found |= tensors_in(file)
        return found

    @cached_property
    def _named(self) -> tuple[dict[str, tuple[str, ...]], list[Any]]:
        return names_in_model(self.model.skeleton.model, self._stored)

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Names of the tensors in the model, by those in the files."""
        return self._named[0]

    @property
    def conversions(self) -> list[Any]:
        """Changes of names and layout that the library makes when it reads these files."""
        return self._named[1]

    @cached_property
    def non_text(self) -> list[str]:
        """Names, in the files, of the tensors that belong to no unit. Those that the model does not
        know are among them, such as the weights of a draft model.
        """
        own = self._trained | self.model.aliases.keys()
        return [name for name in self._stored if own.isdisjoint(self.names[name])]

    @property
    def _trained(self) -> set[str]:
        """Names, in the model, of the tensors that an export writes anew."""
        specs = [spec for layout in self.model.layouts for spec in layout.parameters]
        return {spec.full_name for spec in specs} | self.model.persistent_buffers().keys()

    def refuse_other_layout(self, written: Collection[str]) -> None:
        """Raises RunError if `written`, the names of the tensors that were written anew, are not
        the names that the files of the source have for them.
        """
        trained = self._trained
        wanted = {name for name in self._stored if not trained.isdisjoint(self.names[name])}
        for name in sorted(wanted.symmetric_difference(written)):
            raise RunError(
                f"The model cannot be written in the layout of {self.folder} ({name} is in one of "
                "the two alone); export it with another version of transformers."
            )

    @property
    def non_text_bytes(self) -> int:
        return sum(self._stored[name].bytes for name in self.non_text)

    def write_non_text_weights(self, folder: Path, file_bytes: int) -> Iterator[Path]:
        """Writes the weights of the non-text towers into files in `folder`, each of at most
        `file_bytes` or with one tensor, and yields the files.
        """
        tensors: dict[str, torch.Tensor] = {}
        count = 0
        for at, name in enumerate(self.non_text):
            tensors[name] = read_tensor(self._stored[name].file, name)
            following = self.non_text[at + 1 : at + 2]
            size = sum(self._stored[each].bytes for each in (*tensors, *following))
            if not following or size > file_bytes:
                file = folder / f".untouched-{count}"
                save_file(tensors, file, metadata={"format": "pt"})
                tensors = {}
                count += 1
                yield file

    def copied(self) -> list[Path]:
        """Returns the files that an export copies from the folder. Raises ModelError where one is
        a link to a file elsewhere.
        """
        found = []
        for file in self.folder.iterdir():
            is_other = file.name.endswith(_WEIGHTS) or file.name.lower() in _WRITTEN_ANEW
            if file.is_file() and not is_other and not file.name.startswith("."):
                found.append(file)
        refuse_links_elsewhere(self.folder, found)
        return found

    def copy_files(self, folder: Path, dtype: str) -> None:
        """Copies every file but the weights into `folder`, over those that are there. The
        configuration names `dtype` as that of the weights.
        """
        for file in self.copied():
            shutil.copyfile(file, folder / file.name)
        config = folder / CONFIG
        text = config.read_text(encoding="utf-8")
        changed = _in_dtype(json.loads(text), dtype)
        if changed != json.loads(text):
            safe_files.write_whole(
                config, json.dumps(changed, indent=2) + "\n", folder, durable=False
            )


def _in_dtype(config: Any, dtype: str) -> Any:
    """Returns a configuration whose weights are in `dtype`."""
    if not isinstance(config, dict):
        return config
    changed = {name: _in_dtype(value, dtype) for name, value in config.items()}
    return changed | {name: dtype for name in _WITH_DTYPE if config.get(name) is not None}
