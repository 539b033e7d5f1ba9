"""The model, taken home: a Hugging Face folder with safetensors, configuration, tokenizer and
generation settings.
"""

from __future__ import annotations

import contextlib
import copy
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from engine.checkpoints.checkpoint import CheckpointInfo
from engine.checkpoints.open_for_sampling import open_checkpoint
from engine.errors import RunError
from engine.files import disk_free
from engine.model.library import empty_model, no_progress_bars, told_progress, transformers
from engine.model.pretrained_files import load_generation_config
from engine.model.units import TORCH_DTYPES, StreamedModel
from engine.progress import Progress, saying, untold
from engine.runtime.host_store import HostStore

FILE_SIZE = "2GB"
"""Of a file of weights at most: while one is written, nothing else of the program is done and
nobody can end it.
"""


def export_run(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    folder: str | os.PathLike[str],
    checkpoint: int | None = None,
    progress: Progress = untold,
) -> CheckpointInfo:
    """Write the model of a run's checkpoint (the newest that verifies by default) to `folder`,
    which must not hold anything yet; the checkpoint that it was. What `progress` raises gives up,
    and leaves nothing.
    """
    target = Path(folder).expanduser().resolve()
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise RunError(f"{target} is not an empty folder; name a new one for the export.")
    with open_checkpoint(
        runs_dir, run_id, checkpoint, saying(progress, "Reading the checkpoint")
    ) as opened:
        write_model(
            opened.model,
            opened.store,
            opened.tokenizer,
            opened.config.model.source,
            target,
            progress,
        )
        return opened.checkpoint


def write_model(
    model: StreamedModel,
    store: HostStore,
    tokenizer: Any,
    source: str,
    folder: Path,
    progress: Progress = untold,
) -> int:
    """Write beside `folder`, then rename into place; bytes written. Weights are views of the
    planes: no second copy. `progress` is called before each file of weights, and what it raises
    gives up: nothing is left then.

    In bfloat16 the fp32 masters are rounded to the bf16 that the model computed with.
    """
    folder = Path(folder).expanduser().absolute()
    needed = (
        sum(layout.parameter_count for layout in model.layouts) * TORCH_DTYPES[model.dtype].itemsize
    )
    if disk_free(folder) < needed:
        raise RunError(
            f"The export needs {needed:,} bytes at {folder} and {disk_free(folder):,} are free; "
            "free some disk space or choose another folder."
        )
    config = copy.deepcopy(model.config)
    config.use_cache = True
    whole = empty_model(config, TORCH_DTYPES[model.dtype])
    for unit in model.units:
        for spec in unit.layout.parameters:
            owner, _, attribute = spec.full_name.rpartition(".")
            whole.get_submodule(owner)._parameters[attribute] = nn.Parameter(
                store.view(unit.name, spec.name), requires_grad=False
            )
    whole.tie_weights()
    own = dict(model.skeleton.model.named_buffers())
    for name, buffer in whole.named_buffers():
        if name in own:
            buffer.copy_(own[name])
    whole.generation_config = load_generation_config(
        source
    ) or transformers().GenerationConfig.from_model_config(config)  # as transformers does
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    made = [parent for parent in folder.parents if not parent.exists()]

    def written(share: float) -> None:
        progress(round(share * needed), needed, "Writing the model")

    try:
        written(0.0)
        with no_progress_bars(), told_progress(written):
            whole.save_pretrained(partial, max_shard_size=FILE_SIZE)
        tokenizer.save_pretrained(partial)
        written(1.0)
        if folder.is_dir():
            shutil.rmtree(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        os.replace(partial, folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        for parent in made:
            with contextlib.suppress(OSError):  # not there yet, or somebody else's by now
                parent.rmdir()
        if isinstance(error, (OSError, SafetensorError)):
            what = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise RunError(
                f"The model cannot be written to {folder} ({what}); free some disk space or choose "
                "another folder."
            ) from error
        raise
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
