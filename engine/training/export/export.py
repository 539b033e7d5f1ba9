"""The trained model as a Hugging Face folder: safetensors, configuration, tokenizer and generation
settings.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from engine import safe_files
from engine.config.adapters import Adapters
from engine.config.data_settings import DataConfig
from engine.config.export_choice import (
    AS_CONFIGURED,
    GGUF,
    ExportChoice,
    GgufType,
    written_dtype,
)
from engine.config.settings import TrainConfig
from engine.data.tokens.trained_ends import ends_of_run, ids_of
from engine.errors import RunError
from engine.files import disk_free, open_to_others
from engine.machine.short_memory import refuse_short_memory
from engine.model.build.library import (
    empty_model,
    no_progress_bars,
    reported_progress,
    transformers,
    write_as_read,
)
from engine.model.build.pretrained_files import ids_of_end, load_generation_config
from engine.model.build.units import TORCH_DTYPES, StreamedModel
from engine.paths import program_command
from engine.progress import Progress, labeled, no_progress
from engine.runs.record.following import Follower, catch_up
from engine.runs.record.run_folder import open_run
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import latest, read_benchmarks
from engine.runs.summaries.evaluation_figures import figures_of
from engine.runs.summaries.evaluation_results import read_evaluations
from engine.runs.summaries.exports import NotedExport, note_export
from engine.runtime.host.host_states import HostStates
from engine.training.export.export_adapter import save_adapter
from engine.training.export.export_parts import parts_of, write_parts
from engine.training.export.export_size import planned_export, refuse_full_disk
from engine.training.export.gguf_file import GgufFile
from engine.training.export.gguf_known import NoGguf, gguf_file_name
from engine.training.export.gguf_tokenizer import Vocabulary
from engine.training.export.model_card import CARD, Exported, model_card
from engine.training.export.modelfile import MODELFILE, modelfile
from engine.training.export.same_tokens import same_tokens
from engine.training.export.serve_commands import ExportCommand, in_a_sentence
from engine.training.export.weight_files import WeightFiles
from engine.training.export.write_tokenizer import write_tokenizer
from engine.training.weights.earlier_run import stands_beside_source
from engine.training.weights.multimodal_weights import Source
from engine.training.weights.open_for_sampling import open_checkpoint

FILE_BYTES = 2_000_000_000
"""Size of a weight file at most, in bytes, but for a few bytes and for one large tensor. While a
file is being written, the program does nothing else and cannot be interrupted.
"""


@dataclass(frozen=True)
class TrainedModel:
    """A trained model: its units, their weights in host planes, and its tokenizer."""

    model: StreamedModel
    host_states: HostStates
    tokenizer: Any
    source: str
    """Source whose generation settings are copied."""
    dtype: str = "auto"
    """Dtype of the written weights; `auto` is the model's own."""
    card: str = ""
    """Model card of the folder; an empty one is not written."""
    adapters: Adapters | None = None
    """Adapters, which are then written alone; None where the whole model is."""
    ends: tuple[str, ...] = ()
    """Ids of the tokens that were trained to end an answer."""
    data: DataConfig | None = None
    """Data that were trained on, with whose tokens those of the export are compared."""

    @property
    def written_dtype(self) -> str:
        return written_dtype(self.dtype, self.model.dtype)

    @property
    def bytes(self) -> int:
        """Returns the bytes that the weights take in the folder."""
        item = TORCH_DTYPES[self.written_dtype].itemsize
        if self.adapters is not None:
            return self.model.trained_count * item
        specs = [spec for layout in self.model.layouts for spec in layout.parameters]
        count = sum(spec.numel for spec in specs if not spec.adapter)
        keep_in_fp32 = sum(spec.numel for spec in specs if spec.keep_in_fp32)
        non_text = 0 if self.whole is None else self.whole.non_text_bytes
        return count * item + keep_in_fp32 * (torch.float32.itemsize - item) + non_text

    @cached_property
    def whole(self) -> Source | None:
        """Folder of a model that also reads images or sound, whose other weights are copied; None
        for any other model, and where adapters alone are written.
        """
        if not self.model.non_text or self.adapters is not None:
            return None
        return Source.of(self.model, self.source)


@dataclass(frozen=True)
class Written:
    """What an export has written."""

    bytes: int
    check: str = ""
    """Sentence on whether it reads the run's data as they were trained."""
    file: str = ""
    """Name of a GGUF file."""


@dataclass(frozen=True)
class ExportedRun:
    """Which weights of a run were exported."""

    step: int
    in_words: str
    notes: tuple[str, ...]
    """Sentences on checkpoints that could not be used, and on whether the export reads the run's
    data as they were trained.
    """


def export_run(
    runs_dir: str | os.PathLike[str],
    run_id: str,
    folder: str | os.PathLike[str],
    choice: ExportChoice = AS_CONFIGURED,
    progress: Progress = no_progress,
) -> ExportedRun:
    """Writes the model from a run's checkpoint to `folder`, and returns which weights it has.

    `choice` names the weights and the dtype. The folder must be empty or missing. An exception
    from `progress` cancels the export, and no files are left.
    """
    target = Path(os.path.realpath(Path(folder).expanduser()))
    # A pipe, a device and a link to itself are there too, and are none.
    if os.path.lexists(target) and not (target.is_dir() and not any(target.iterdir())):
        raise RunError(f"{target} is not an empty folder; name a new one for the export.")
    run = open_run(runs_dir, run_id)
    planned = planned_export(run, target, choice)
    if planned is not None:
        planned.refuse_full_disk(target)
    reading = labeled(progress, "Reading the checkpoint")
    checkpoint, weights = choice.checkpoint, choice.weights
    with open_checkpoint(runs_dir, run_id, checkpoint, reading, weights) as opened:
        config, dtype = opened.config, written_dtype(choice.dtype, opened.model.dtype)
        is_gguf = choice.form == GGUF
        adapters = None if is_gguf else adapters_alone(config, choice.form)
        snapshot = RunSnapshot()
        catch_up(snapshot, Follower(run.events_path))
        step, known = opened.checkpoint.step, read_benchmarks(run.path)
        measured = [
            one for one in latest(known.results) if one.step == step or one.weights == "base"
        ]
        figures = figures_of(read_evaluations(run.path), step)
        whole_class = opened.model.whole_class
        ends = ends_of_run(snapshot.data, config.data, opened.tokenizer)
        exported = Exported(step, dtype, measured, adapters is not None, whole_class, ends, figures)
        card = model_card(config, snapshot, exported)
        trained = TrainedModel(
            opened.model,
            opened.host_states,
            opened.tokenizer,
            config.model.source,
            _dtype_of_weights(choice),
            card,
            adapters,
            ends,
            config.data,
        )
        if is_gguf:
            try:
                written = write_gguf(trained, target, cast(GgufType, dtype), config.name, progress)
            except NoGguf as refused:
                again = ExportCommand(
                    program_command(), run_id, str(runs_dir), str(target), config.name
                )
                how = in_a_sentence(again, refused.has_parts)
                raise RunError(f"{refused} {how}") from None
        else:
            written = write_model(trained, target, progress, replaces=False)
        about = step, dtype, adapters is not None, time.time(), written.file, written.check
        note_export(Path(runs_dir), NotedExport(run_id, str(target), *about))
        used = opened.checkpoint
        return ExportedRun(step, used.in_words, (*used.skipped, *filter(None, [written.check])))


def _dtype_of_weights(choice: ExportChoice) -> str:
    """Returns the dtype in which weights are given to an export. A GGUF file rounds the model's
    own, of which fp32 alone has more.
    """
    return "auto" if choice.form == GGUF and choice.dtype != "float32" else choice.dtype


def adapters_alone(config: TrainConfig, form: str | None = None) -> Adapters | None:
    """Returns the adapters of a run that are exported alone; None where the whole model is. form:
    as in `ExportChoice`. Raises RunError if they are asked for, and there are none.
    """
    adapters = config.train.parts
    if isinstance(adapters, Adapters):
        is_apart = (form or config.output.export_form) == "adapter"
        if is_apart and not stands_beside_source(config):
            raise RunError(
                "The run's adapters stand beside other weights than those of "
                f"{config.model.source} and do not fit it; export the whole model."
            )
        return adapters if is_apart else None
    if form == "adapter":
        raise RunError(
            "The run has trained no adapters (train.method is not lora); export the whole model."
        )
    return None


def write_model(
    trained: TrainedModel, folder: Path, progress: Progress = no_progress, replaces: bool = True
) -> Written:
    """Writes a model into a temporary folder next to `folder`, and renames it into place.

    In the model's own dtype, weights are views of the planes, without a second copy: the values
    that the model computed with. If some of them live on the device, they are copied from there, a
    few units at a time. In another dtype they are copied from the masters in this way: to float32
    without any rounding, and from float32 to bfloat16 by torch, which rounds ties to even.
    `progress` is called before each weight file or after each part. An exception from it cancels
    the export, and no files are left. Raises RunError when the disk has too little space or cannot
    be written to.

    replaces: a folder that is there is removed, such as an earlier export of the run; otherwise
    only an empty one.
    """

    def fill(partial: Path, written: Callable[[float], None]) -> str:
        if trained.adapters is not None:
            named = trained.source, trained.written_dtype, partial
            save_adapter(trained.model, trained.host_states, trained.adapters, named)
            _generation_config(trained).save_pretrained(partial)
        else:
            with no_progress_bars():
                _save(trained, _empty_copy(trained), partial, written)
        served = write_tokenizer(trained.tokenizer, partial)
        if trained.whole is not None:
            trained.whole.copy_files(partial, trained.written_dtype)
            settings = _generation_config(trained)
            # The file of the source stays as it is where it says the same.
            if ids_of_end(settings) != ids_of_end(load_generation_config(trained.source)):
                settings.save_pretrained(partial)
        if trained.adapters is None:
            text = modelfile(trained.tokenizer, trained.ends)
            safe_files.write_whole(partial / MODELFILE, text, partial, durable=False)
        if trained.card:
            safe_files.write_whole(partial / CARD, trained.card, partial, durable=False)
        return _check(trained, served, None)

    folder = Path(folder).expanduser().absolute()
    check = _write_folder(folder, trained.bytes, progress, replaces, fill)
    return Written(_bytes_in(folder), check)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _check(trained: TrainedModel, served: Any, file: Vocabulary | None) -> str:
    if trained.data is None:
        return ""
    return same_tokens(trained.data, trained.tokenizer, served, file)


def write_gguf(
    trained: TrainedModel, folder: Path, kind: GgufType, name: str, progress: Progress = no_progress
) -> Written:
    """Writes a model as a GGUF file into `folder`, which must be empty or missing, with a Modelfile
    for Ollama. name: of the run.

    Adapters are merged. Otherwise it is as for `write_model`.
    """
    file = GgufFile(trained.model, trained.tokenizer, trained.ends, kind)
    file_name = gguf_file_name(name, kind)

    def fill(partial: Path, written: Callable[[float], None]) -> str:
        parts = parts_of(trained.model, trained.host_states, _empty_copy(trained))
        file.write(partial / file_name, name, parts, written)
        text = modelfile(trained.tokenizer, trained.ends, f"./{file_name}")
        safe_files.write_whole(partial / MODELFILE, text, partial, durable=False)
        return _check(trained, None, file.vocabulary)

    check = _write_folder(folder, file.bytes, progress, False, fill)
    return Written(_bytes_in(folder), check, file_name)


def _write_folder(
    folder: Path,
    needed: int,
    progress: Progress,
    replaces: bool,
    fill: Callable[[Path, Callable[[float], None]], str],
) -> str:
    """Lets `fill` write `needed` bytes into a temporary folder next to `folder`, renames it into
    place, and returns what `fill` has returned.
    """
    refuse_full_disk(folder, needed, disk_free(folder))
    partial = folder.with_name(f".{folder.name}.partial")
    made = [parent for parent in folder.parents if not parent.exists()]

    def written(share: float) -> None:
        progress(round(share * needed), needed, "Writing the model")

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Libraries write into it by its name. It may be left from before, or be a link.
        safe_files.remove_tree(partial, folder.parent)
        partial.mkdir()
        written(0.0)
        check = fill(partial, written)
        open_to_others(partial)
        written(1.0)
        _put_in_place(partial, folder, replaces)
        return check
    except BaseException as error:
        with contextlib.suppress(OSError):
            safe_files.remove_tree(partial, folder.parent)
        for parent in made:
            with contextlib.suppress(OSError):  # not made yet, or no longer empty
                parent.rmdir()
        refuse_short_memory(error, "while the model was written")
        if isinstance(error, (OSError, SafetensorError)):
            what = str(getattr(error, "strerror", None) or error).rstrip(".")
            raise RunError(
                f"The model cannot be written to {folder} ({what}); free some disk space or choose "
                "another folder."
            ) from error
        raise


def _put_in_place(partial: Path, folder: Path, replaces: bool) -> None:
    """Gives a complete export its name. A link, or anything else that is no folder, stays, and
    OSError is raised.
    """
    if safe_files.is_folder(folder, folder.parent):
        if replaces:
            safe_files.remove_tree(folder, folder.parent)
        else:
            folder.rmdir()  # somebody may have filled it meanwhile
    partial.replace(folder)


def _empty_copy(trained: TrainedModel) -> Any:
    """Returns a transformers model on the meta device, in the dtype of the export, with the buffers
    and generation settings of the trained model.
    """
    model = trained.model
    config = copy.deepcopy(model.config)
    config.use_cache = True
    whole: Any = empty_model(config, TORCH_DTYPES[trained.written_dtype])
    own = dict(model.skeleton.model.named_buffers())
    for name, buffer in whole.named_buffers():
        if name in own:
            buffer.copy_(own[name])
    whole.generation_config = _generation_config(trained)
    return whole


def _generation_config(trained: TrainedModel) -> Any:
    """Returns the generation settings of the source. An answer ends with the tokens of the model
    and with those that were trained to end one: servers and `generate` know no others.
    """
    config = trained.model.config
    settings = load_generation_config(trained.source)
    if settings is None:  # as transformers does
        settings = transformers().GenerationConfig.from_model_config(config)
    own = ids_of_end(settings) or ids_of_end(config.get_text_config())
    ends = list(dict.fromkeys([*own, *ids_of(trained.tokenizer, trained.ends)]))
    if ends != ids_of_end(settings):
        settings.update(eos_token_id=ends if len(ends) > 1 else ends[0])
    return settings


def _save(
    trained: TrainedModel, whole: Any, folder: Path, written: Callable[[float], None]
) -> None:
    """Writes the weights and the configuration into `folder`."""
    model, states = trained.model, trained.host_states
    is_merged = any(spec.adapter for layout in model.layouts for spec in layout.parameters)
    if trained.whole is not None:
        _save_async(trained.whole, trained, whole, folder, written)
        return
    if trained.written_dtype != model.dtype or states.placement.gpu_resident or is_merged:
        parts = parts_of(model, states, whole)
        write_parts(whole, parts, folder, FILE_BYTES, written).finish()
        return
    for unit in model.units:
        for spec in unit.layout.parameters:
            owner, _, attribute = spec.full_name.rpartition(".")
            # The few weights that stay in fp32 are copied.
            values = states.parameters.master if spec.keep_in_fp32 else states.parameters.view
            whole.get_submodule(owner)._parameters[attribute] = nn.Parameter(
                values(unit.name, spec.name), requires_grad=False
            )
    whole.tie_weights()
    with reported_progress(written):
        whole.save_pretrained(folder, max_shard_size=FILE_BYTES)
    files = WeightFiles(folder, FILE_BYTES)
    for file in sorted(folder.glob("*.safetensors")):
        files.take(file, undivided=True)
    files.finish()


def _save_async(
    source: Source,
    trained: TrainedModel,
    whole: Any,
    folder: Path,
    written: Callable[[float], None],
) -> None:
    """Writes the trained weights in the layout of `source`, and beside them what was not trained,
    unchanged.
    """
    write_as_read(whole, source.conversions)
    share = 1 - source.non_text_bytes / trained.bytes

    def written_so_far(of_trained: float) -> None:
        written(share * of_trained)

    parts = parts_of(trained.model, trained.host_states, whole)
    files = write_parts(whole, parts, folder, FILE_BYTES, written_so_far)
    source.refuse_other_layout(files.names)
    for file in source.write_non_text_weights(folder, FILE_BYTES):
        files.take(file)
        written(share)
    files.finish()
