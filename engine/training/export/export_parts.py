"""Exports in another dtype than that of the planes, or of units that live on the device. They are
written chunk by chunk, since a copy of the whole model would take more memory than training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from engine import safe_files
from engine.model.build.units import TORCH_DTYPES, StreamedModel
from engine.model.hub.hub_cache import INDEX
from engine.runtime.host.host_states import HostStates
from engine.training.export.weight_files import WeightFiles
from engine.training.weights.adapter_weights import merged

_PART_BYTES = 256 << 20
"""A part has the weights of whole units. It ends with the unit that makes it larger than this."""
_PART = ".part"


def parts_of(
    model: StreamedModel, states: HostStates, whole: Any
) -> Iterator[tuple[dict[str, Tensor], float]]:
    """Yields the weights and persistent buffers of a model by name, some units at a time, each with
    the fraction of the parameters that is done with it.

    Adapters are merged into the weights of their layers, in fp32.

    The weights have the dtypes of `whole`, a transformers model on the meta device: they are those
    that the model computes with, or in another dtype copies of the masters. Its buffers keep their
    dtypes.
    """
    weights: dict[str, Tensor] = {}
    done = 0
    for unit in model.units:
        for spec in unit.layout.parameters:
            if not spec.adapter:
                dtype = whole.get_parameter(spec.full_name).dtype
                values = merged(states, unit, spec)
                if values is None:
                    is_own = dtype == TORCH_DTYPES[model.dtype]
                    values = (states.parameters.weight if is_own else states.parameters.master)(
                        unit.name, spec.name
                    )
                weights[spec.full_name] = values.to(dtype)
        done += unit.layout.parameter_count
        is_last = unit is model.units[-1]
        if is_last:
            kept = whole.state_dict()
            weights.update({name: kept[name] for name in model.persistent_buffers()})
        if is_last or sum(tensor.nbytes for tensor in weights.values()) > _PART_BYTES:
            yield weights, done / model.parameter_count
            weights = {}


def write_parts(
    whole: Any,
    parts: Iterable[tuple[dict[str, Tensor], float]],
    folder: Path,
    most_bytes: int,
    written: Callable[[float], None],
) -> WeightFiles:
    """Writes the weights in `parts`, and the configuration of the transformers model `whole`, into
    `folder`. `written` is called with the fraction that is done after each chunk. Returns the
    weight files, each of at most `most_bytes`, which are not finished: others may join them.

    transformers writes each chunk as if it were a model, which undoes what reading has changed,
    such as the stacking of experts. Everything that belongs together there is in one unit.
    """
    files = WeightFiles(folder, most_bytes)
    for number, (weights, share) in enumerate(parts):
        part = folder / _PART
        whole.save_pretrained(part, state_dict=weights, max_shard_size=most_bytes)
        for file in sorted(part.iterdir()):
            if file.suffix == ".safetensors":
                files.take(file.replace(folder / f"{_PART}-{number}-{file.name}"))
            elif file.name != INDEX:
                file.replace(folder / file.name)
        safe_files.remove_tree(part, folder)
        written(share)
    return files
