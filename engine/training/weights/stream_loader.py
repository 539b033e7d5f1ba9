"""Weights that are written into the planes while transformers is still reading them, one tensor
after another. So the whole model is never in memory beside its planes.

transformers gives no access to a tensor that it has read, but torch calls a hook for every
parameter that a module is given. The hook of this file writes the parameter into its plane and
frees its memory. Nothing is read before its turn: a tensor is a view of its file, in the dtype in
which it is stored, and only experts that the library merges are copied on the way.
`engine.planning.shape.model_shape.read_ahead_numel` bounds what that takes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from engine.model.build.library import Prepared, weights_read_by
from engine.model.build.units import StreamedModel
from engine.planning.layout.layout import ParameterSpec
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer.fp32_chunks import chunk_buffer
from engine.training.weights.mmap_reader import MmapReader
from engine.training.weights.resize_embeddings import ResizedEmbeddings


class StreamingLoader:
    """Writes the parameters of one model into the planes of `states`. rows: rows that the model has
    beside those of the weights; None where it has no others.
    """

    def __init__(
        self, model: StreamedModel, states: HostStates, rows: ResizedEmbeddings | None = None
    ):
        self._states = states
        self._rows = rows
        self._reading = MmapReader()
        # With a new buffer for each tensor, the allocator would keep the holes of all of them.
        self._buffer = chunk_buffer()
        self._waiting: dict[str, tuple[str, ParameterSpec]] = {
            spec.full_name: (unit.name, spec)
            for unit in model.units
            for spec in unit.layout.parameters
            if not spec.adapter
        }
        self._owners: dict[int, tuple[nn.Module, str, nn.Module]] = {}
        """The parent of each module, the module's name there, and the module itself, by the
        module's id. A module that is kept leaves its id to no other.
        """

    @contextmanager
    def while_reading(self, prepared: Prepared | None = None) -> Iterator[None]:
        """A context in which each parameter that this thread reads is written and freed. prepared:
        changes what is stored before the library reads it (`weights_read_by`).
        """
        thread = threading.get_ident()

        def joins(parent: nn.Module, name: str, child: nn.Module | None) -> None:
            if child is not None and threading.get_ident() == thread:
                self._owners.setdefault(id(child), (parent, name, child))

        def is_set(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
            if parameter is not None and threading.get_ident() == thread:
                self._load_tensor(module, name, parameter)

        hooks = [
            register_module_module_registration_hook(joins),
            register_module_parameter_registration_hook(is_set),
        ]
        try:
            with weights_read_by(self._reading.read, prepared):
                yield
        finally:
            for hook in hooks:
                hook.remove()
            self._owners.clear()

    def _load_tensor(self, module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        # The library marks what it has read. Without the mark are parameters of the model as it is
        # built, and those that the checkpoint lacks.
        if parameter.is_meta or not getattr(parameter, "_is_hf_initialized", False):
            return
        full_name = self._full_name(module, name)
        if full_name not in self._waiting:
            return
        # A wrong shape is reported by `load_rest`, outside of the library.
        shape = self._waiting[full_name][1].shape
        if tuple(parameter.shape) == shape or self._grows(parameter, shape):
            address = parameter.data_ptr()
            self._write(full_name, parameter)
            self._reading.drop(address)

    def _grows(self, parameter: torch.Tensor, shape: tuple[int, ...]) -> bool:
        """Returns whether a parameter gets new rows, and has `shape` with them."""
        return self._rows is not None and self._rows.are_for(parameter.shape, shape)

    def _full_name(self, module: nn.Module, name: str) -> str:
        """Returns the name of a parameter in the whole model."""
        names = [name]
        while id(module) in self._owners:
            module, own_name, _ = self._owners[id(module)]
            names.append(own_name)
        return ".".join(reversed(names))

    def load_rest(self, loaded: Any) -> None:
        """Writes the parameters that were not written while `loaded`, a transformers model, was
        read: tied weights that the checkpoint has under their other name alone.

        Raises ModelError for a parameter of another shape.
        """
        parameters = dict(loaded.named_parameters())
        for full_name in list(self._waiting):
            self._write(full_name, parameters[full_name])

    def _write(self, full_name: str, parameter: nn.Parameter) -> None:
        unit, spec = self._waiting[full_name]
        with torch.no_grad():
            values: torch.Tensor = parameter
            if self._rows is not None and self._grows(parameter, spec.shape):
                values = self._rows.grown(parameter.data, unit)
            self._states.parameters.write(unit, spec.name, values, self._buffer)
            del values
            del self._waiting[full_name]
            # The shape stays, since the library compares it, but the memory is freed.
            parameter.data = parameter.data.new_empty(1).expand(parameter.shape)
