"""Weights of a run's checkpoint, opened for sampling or export. Only the weight planes are
allocated, without moments and gradients.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.config.settings import TrainConfig
from engine.errors import CheckpointError, RunError
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.model.build.units import StreamedModel
from engine.planning.fit.sampling_memory import blocks_kept
from engine.planning.layout.layout import WEIGHT_PLANES
from engine.planning.schedule.choices import Placement, PlanChoices, Streaming
from engine.progress import Progress, no_progress
from engine.runs.record.run_folder import open_run
from engine.runtime.device.backend import Backend
from engine.runtime.device.open_backend import open_backend
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.checkpoints.checkpoint import CheckpointInfo
from engine.training.checkpoints.restore import (
    load_checkpoint,
    load_newest_checkpoint,
    newest_checkpoint,
)
from engine.training.checkpoints.saved_on_disk import saved_steps


class OpenedModel:
    """An opened model: host planes for its weights, and a backend that it can run on."""

    def __init__(
        self,
        config: TrainConfig,
        model: StreamedModel,
        tokenizer: Any,
        states: HostStates,
        backend: Backend,
    ):
        self.config = config
        self.model = model
        self.tokenizer = tokenizer
        self.host_states = states
        self.backend = backend
        self._checkpoint: CheckpointInfo | None = None

    @property
    def checkpoint(self) -> CheckpointInfo:
        """Checkpoint from which the weights were loaded."""
        assert self._checkpoint is not None, "no checkpoint was loaded"
        return self._checkpoint

    def load(self, root: Path, path: Path | None, progress: Progress) -> None:
        """Loads the weights from the checkpoint at `path`, or from the newest one that verifies if
        `path` is None.
        """
        buffers = self.model.persistent_buffers()
        if path is None:
            found = load_newest_checkpoint(root, self.host_states, buffers, WEIGHT_PLANES, progress)
        else:
            found = load_checkpoint(path, self.host_states, buffers, WEIGHT_PLANES, progress)
        if found is None:
            raise CheckpointError(f"The checkpoints in {root} vanished while they were being read.")
        self._checkpoint = found

    def engine(self, many_rows: bool = False) -> StreamingEngine:
        """Returns an engine without an optimizer, as `sampling_engine` makes it."""
        return sampling_engine(self.model, self.host_states, self.backend, many_rows)


def sampling_engine(
    model: StreamedModel, states: HostStates, backend: Backend, many_rows: bool = False
) -> StreamingEngine:
    """Returns an engine without an optimizer over weights in `states`.

    Blocks stay on the device, once they were fetched, as `blocks_kept` says. The rest of its memory
    is for caches and activations. many_rows: whether many answers are drawn at once.
    """
    sizes = [unit.layout.slot_bytes(model.dtype) for unit in model.units]
    blocks = sizes[1:-1]
    resident = len(blocks)
    if backend.device.type != "cpu":
        ends = sizes[0] + sizes[-1]
        resident = blocks_kept(backend.free_memory(), ends, blocks, many_rows)
    return StreamingEngine(
        model,
        states,
        backend,
        EngineSettings(
            PlanChoices(
                placement=Placement(blocks_kept_in_slots=resident),
                streaming=Streaming(slots=2, prefetch_depth=1),
            ),
            tokens=1,
        ),
    )


@contextlib.contextmanager
def open_checkpoint(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    checkpoint: int | None = None,
    progress: Progress = no_progress,
    weights: str | None = "last",
) -> Iterator[OpenedModel]:
    """Opens the checkpoint of step `checkpoint` of a run. Without a step, it opens the newest that
    verifies, or the best weights that the run has kept, according to `ExportChoice.weights`.

    Raises RunError if the run has no such checkpoint.
    """
    folder = open_run(runs_dir, run_id)
    if weights is None and checkpoint is None:
        saved = saved_steps(folder.checkpoints_path, folder.best_path)
        chosen = saved.exported(folder.config.output.export_from)
        is_best = chosen is not None and chosen == saved.best
        weights = "best" if is_best else "last"
    root = folder.best_path if weights == "best" else folder.checkpoints_path
    path = None if checkpoint is None else _checkpoint_path(root, run_id, checkpoint)
    # Building the model takes long, so a missing checkpoint is reported first.
    if path is None and newest_checkpoint(root) is None:
        if weights == "best":
            raise RunError(
                f"Run {run_id} has kept no best weights (output.keep_best, output.eval_every); "
                "take the last."
            )
        if saved_steps(root, folder.best_path).best is not None:
            raise RunError(
                f"Run {run_id} has no checkpoint; take its best weights, which are kept."
            )
        raise RunError(f"Run {run_id} has no checkpoint yet; save one first.")
    with open_model(folder.config) as opened:
        opened.load(root, path, progress)
        yield opened


@contextlib.contextmanager
def open_model(config: TrainConfig) -> Iterator[OpenedModel]:
    """Opens a model with host planes for its weights. The caller writes the weights."""
    read = read_model(config)
    model = build_model(read.config, config.model, config.train.parts)
    backend = open_backend(config.engine.device)
    on_device = backend.device.type != "cpu"
    states = HostStates(
        model.layouts,
        model.dtype,
        backend.register if on_device else None,
        backend.unregister if on_device else None,
    )
    try:
        states.allocate_weights()
        yield OpenedModel(config, model, read.tokenizer, states, backend)
    finally:
        # The device must not read planes after their memory is freed.
        backend.drain()
        states.close()
        backend.close()


def _checkpoint_path(root: Path, run_id: str, checkpoint: int) -> Path:
    path = root / f"step-{checkpoint}"
    if not path.is_dir():
        steps = [folder.name.removeprefix("step-") for folder in root.glob("step-*")]
        there = sorted(int(step) for step in steps if step.isdigit())
        raise RunError(
            f"Run {run_id} has no checkpoint of step {checkpoint}; it has "
            f"{', '.join(map(str, there)) or 'none'}."
        )
    return path
