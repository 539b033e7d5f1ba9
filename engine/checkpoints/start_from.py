"""A new run can start from the weights of an earlier run's checkpoint (`model.start_from`).

The fp32 masters are taken to the bit, also where the new run has another precision that can hold
them. The moments of AdamW begin anew, as do the steps and the order of the rows.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.checkpoints.checkpoint import MANIFEST, CheckpointInfo
from engine.checkpoints.restore import checkpoint_dtype, load_checkpoint, newest_checkpoint
from engine.errors import CheckpointError, ModelError
from engine.host.host_store import HostStore
from engine.planes.layout import WEIGHT_PLANES
from engine.progress import Progress, untold
from engine.runs.folder import BEST_FOLDER

if TYPE_CHECKING:
    from torch import Tensor


def newest_weights(place: str | os.PathLike[str]) -> Path:
    """Returns the folder of the checkpoint that `place` names: a checkpoint, a run, of which the
    newest one counts or, where it has none, the best weights that it kept, or the folder with
    these. Raises ModelError if there is none.
    """
    path = Path(place).expanduser()
    if (path / MANIFEST).is_file():
        return path
    try:
        places = (path / "checkpoints", path, path / BEST_FOLDER)
        found = next(filter(None, map(newest_checkpoint, places)), None)
    except CheckpointError as error:
        raise ModelError(f"model.start_from: {error}") from None
    if found is None:
        raise ModelError(
            f"model.start_from: there is no checkpoint in {path}; name the folder of a run that "
            "was saved, or of one of its checkpoints."
        )
    return found.path


def load_start(
    place: str | os.PathLike[str],
    store: HostStore,
    buffers: Mapping[str, Tensor],
    progress: Progress = untold,
) -> CheckpointInfo:
    """Fills the weight planes of `store` and the model's `buffers` from the checkpoint at `place`.

    Only the weight planes need to be allocated. Raises ModelError if there is no checkpoint, or if
    it is damaged or of another model.
    """
    path = newest_weights(place)
    try:
        dtype = checkpoint_dtype(path)
        if dtype == store.dtype:
            return load_checkpoint(path, store, buffers, WEIGHT_PLANES, progress)
        # The moments are allocated later, so there is room for both kinds of weights.
        other = HostStore(list(store.layouts.values()), dtype)
        try:
            other.allocate_weights()
            info = load_checkpoint(path, other, buffers, WEIGHT_PLANES, progress)
            for unit, layout in store.layouts.items():
                for spec in layout.parameters:
                    store.write(unit, spec.name, other.master(unit, spec.name))
            return info
        finally:
            other.close()
    except CheckpointError as error:
        raise ModelError(f"model.start_from: {error}") from None
