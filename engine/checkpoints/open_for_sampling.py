"""The weights of a run's checkpoint, opened for sampling or export: weight planes only, no moments,
no gradients.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.checkpoints.checkpoint import CheckpointInfo
from engine.checkpoints.restore import load_checkpoint, load_newest_checkpoint, newest_checkpoint
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.model.build import build_model
from engine.model.layout import WEIGHT_PLANES
from engine.model.pretrained_files import load_config, load_tokenizer
from engine.model.units import StreamedModel
from engine.plan.choices import PlanChoices
from engine.progress import Progress, untold
from engine.runs.folder import open_run
from engine.runtime.backend import Backend
from engine.runtime.host_store import HostStore
from engine.runtime.open_backend import open_backend
from engine.runtime.streaming_engine import EngineSettings, StreamingEngine


class OpenedModel:
    """A model with its weights in host planes."""

    def __init__(
        self,
        config: TrainConfig,
        model: StreamedModel,
        tokenizer: Any,
        store: HostStore,
        backend: Backend,
    ):
        self.config, self.model, self.tokenizer, self.store, self.backend = (
            config,
            model,
            tokenizer,
            store,
            backend,
        )
        self.checkpoint: CheckpointInfo | None = None
        """Which one its weights are of."""

    def load(self, root: Path, path: Path | None, progress: Progress) -> None:
        """The weights of the checkpoint at `path`, or of the newest under `root` that verifies."""
        given = (self.store, self.model.persistent_buffers(), WEIGHT_PLANES, progress)
        self.checkpoint = (
            load_newest_checkpoint(root, *given) if path is None else load_checkpoint(path, *given)
        )

    def engine(self) -> StreamingEngine:
        """An engine without an optimizer; blocks stay on the device when half of its free memory
        holds them.
        """
        blocks = self.model.blocks
        weights = sum(unit.layout.plane_bytes(self.model.dtype)["weight_high"] for unit in blocks)
        free = self.backend.memory()["free"]
        resident = len(blocks) if self.backend.device.type == "cpu" or weights < free / 2 else 0
        return StreamingEngine(
            self.model,
            self.store,
            self.backend,
            EngineSettings(
                PlanChoices(slots=2, prefetch_depth=1, resident_blocks=resident), tokens=1
            ),
        )


@contextlib.contextmanager
def open_checkpoint(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    checkpoint: int | None = None,
    progress: Progress = untold,
) -> Iterator[OpenedModel]:
    """Open checkpoint `checkpoint` of a run (the newest that verifies by default). Raises RunError
    when there is none.
    """
    folder = open_run(runs_dir, run_id)
    root = folder.checkpoints_path
    path = None if checkpoint is None else _checkpoint_path(root, run_id, checkpoint)
    if path is None and newest_checkpoint(root) is None:  # told before anything is built
        raise RunError(f"Run {run_id} has no checkpoint yet; save one first.")
    with open_model(folder.config) as opened:
        opened.load(root, path, progress)
        yield opened


@contextlib.contextmanager
def open_model(config: TrainConfig) -> Iterator[OpenedModel]:
    """A model with host planes for its weights, which are still to be written."""
    model = build_model(load_config(config.model.source), config.model)
    tokenizer = load_tokenizer(config.model.source)
    backend = open_backend(config.engine.device)
    on_device = backend.device.type != "cpu"
    store = HostStore(
        model.layouts,
        model.dtype,
        backend.register if on_device else None,
        backend.unregister if on_device else None,
    )
    try:
        store.allocate_weights()
        yield OpenedModel(config, model, tokenizer, store, backend)
    finally:
        backend.drain()
        store.close()
        backend.close()


def _checkpoint_path(root: Path, run_id: str, checkpoint: int) -> Path:
    path = root / f"step-{checkpoint}"
    if not path.is_dir():
        there = sorted(int(p.name[5:]) for p in root.glob("step-*") if p.name[5:].isdigit())
        raise RunError(
            f"Run {run_id} has no checkpoint of step {checkpoint}; it has "
            f"{', '.join(map(str, there)) or 'none'}."
        )
    return path
