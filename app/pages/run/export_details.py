"""What the view Export shows of a run: where its model was exported to, what can be exported, and
how to use it.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any

from engine import safe_files
from engine.config.export_choice import GGUF_TYPES, ExportFrom
from engine.errors import RamstreamError
from engine.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from engine.paths import program_command
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.exports import OTHER_TOKENS, NotedExport, noted_exports
from engine.safe_files import FileFault
from engine.training.checkpoints.saved_on_disk import SavedSteps, saved_steps
from engine.training.export.export_size import export_sizes
from engine.training.export.gguf_forecast import GgufForecast, forecast
from engine.training.export.gguf_known import GGUF_LABELS, gguf_file_name
from engine.training.export.modelfile import MODELFILE
from engine.training.export.serve_commands import (
    ExportCommand,
    adapter_to_type,
    gguf_to_type,
    what_to_type,
)

_GREETING, _SHORT = "Hello!", 120
"""Prompt where the run has no shorter one of its own than so many characters."""


@dataclass(frozen=True)
class _Exported:
    """A folder with the exported model."""

    path: str
    label: str
    """Form, dtype and step."""
    is_adapter: bool
    place: Path
    within: Path
    """Folder from which the way to `place` and its files has no link."""
    file: str = ""
    """Name of the GGUF file in it, if it has one."""
    check: str = ""
    """Sentence on whether it reads the run's data as they were trained."""
    note: str = ""


def export_details(
    folder: RunFolder, snapshot: RunSnapshot, has_export_failed: bool
) -> dict[str, Any]:
    """Returns the `exports` of a run, the newest first, with the commands that use each, and why
    its own cannot be used (`fault`); which weights an export takes (`caption`), and the `folder` it
    is offered; the bytes that each form takes in each dtype (`sizes`), where they are known, and
    the names of GGUF files by dtype; the beginning of the command that exports, and other commands
    (`rows`); and the `question` that examples for programs ask. `login` says whether this machine
    has a token of the Hugging Face hub.
    """
    there = saved_steps(folder.checkpoints_path, folder.best_path)
    saved = there.exported(_export_from(folder))
    own, fault = _own_export(folder, there)
    exports = [*_other_exports(folder), *own]
    question = _question(snapshot)
    is_owed = has_export_failed and not folder.has_export
    own_path = str(folder.path.resolve() / folder.export_path.name)
    target = own_path if is_owed else _free_folder(folder)
    gguf = forecast(_base_of(folder))
    is_saved = saved is not None
    rows = []
    if is_saved or exports:
        rows.append({"label": "Serve without a browser", "text": _command(folder, "serve")})
    return {
        "exports": [_shown(folder, each, gguf, is_saved, question) for each in exports],
        "fault": fault,
        "caption": _caption(saved, there),
        "folder": target,
        "can_export": is_saved,
        "sizes": _sizes(folder),
        "gguf_names": {kind: gguf_file_name(settings_name(folder), kind) for kind in GGUF_TYPES},
        "can_serve": is_saved or folder.has_export or folder.is_running(),
        "has_adapters": _has_adapters(folder),
        "no_gguf": gguf.why_not,
        "command": _command(folder, "export"),
        "rows": rows,
        "question": question,
        "login": _has_login(),
    }


def export_folders(folder: RunFolder) -> list[str]:
    """Returns the folders to which the model of a run was exported and that are still there."""
    there = saved_steps(folder.checkpoints_path, folder.best_path)
    own, _ = _own_export(folder, there)
    return [each.path for each in (*_other_exports(folder), *own)]


def files_of(exported: Path) -> dict[str, int]:
    """Returns the regular files of an exported folder, with their bytes."""
    try:
        found = safe_files.entries(exported, exported)
    except OSError:
        return {}
    return {name: found[name].st_size for name in sorted(found) if S_ISREG(found[name].st_mode)}


def _sizes(folder: RunFolder) -> dict[str, dict[str, int]]:
    sizes = export_sizes(folder)
    return {} if sizes is None else sizes.of_all_forms


def _question(snapshot: RunSnapshot) -> str:
    """Returns a prompt that the run was asked, which its model may know to answer: the longest of
    the short ones, since a prompt such as "And 5?" goes on from earlier turns.
    """
    asked = [sample.get("prompt", "") for one in snapshot.exact_matches for sample in one.samples]
    asked += [pair["prompt"] for one in snapshot.prompt_answers for pair in one.answers]
    short = [text for text in asked if 0 < len(text) <= _SHORT and "\n" not in text]
    return max(short, key=len, default=_GREETING)


def _shown(
    folder: RunFolder, each: _Exported, gguf: GgufForecast, is_saved: bool, question: str
) -> dict[str, Any]:
    files = files_of(Path(each.path))
    return {
        "path": each.path,
        "shown_path": str(Path(each.path) / each.file),
        "label": each.label,
        "note": each.note,
        "check": each.check,
        "is_other": each.check.startswith(OTHER_TOKENS),
        "files": [{"name": name, "bytes": size} for name, size in files.items()],
        "uses": _uses(folder, each, gguf, is_saved, question),
        "template": _template_text(each, gguf),
    }


def _uses(
    folder: RunFolder, loaded: _Exported, gguf: GgufForecast, is_saved: bool, question: str
) -> list[dict[str, str]]:
    """Returns the commands that use an export. is_saved: the run can be exported once more.
    question: what the examples ask.
    """
    runs = str(folder.path.resolve().parent)
    again = program_command(), folder.id, runs, _free_folder(folder), settings_name(folder)
    export = ExportCommand(*again) if is_saved else None
    name = _ollama_name(folder)
    if loaded.file:
        typed = gguf_to_type(loaded.path, loaded.file, name, export)
    elif loaded.is_adapter:
        typed = adapter_to_type(loaded.path, name, _base_of(folder), export, question)
    else:
        as_file = None if gguf.why_not else export
        typed = what_to_type(loaded.path, name, gguf.is_read, as_file, question)
    return [{"label": label, "text": text} for label, text in typed]


def _caption(saved: int | None, there: SavedSteps) -> str:
    if saved is None:
        return "No checkpoint is saved, so there is nothing to export."
    which = "best model" if saved == there.best else "newest checkpoint"
    return f"Exports the {which}, step {saved:,}."


def _own_export(folder: RunFolder, there: SavedSteps) -> tuple[list[_Exported], str]:
    """Returns the export in the run's folder, if there is one, and why it cannot be used."""
    if not folder.has_export:
        return [], ""
    path = folder.path.resolve() / folder.export_path.name
    try:
        folder.checked_export()
    except OSError as error:
        reason = str(error) if isinstance(error, FileFault) else f"{error.strerror}: {path}."
        return [], f"The run's own export cannot be used: {reason}"
    step = there.exported(_export_from(folder))
    is_adapter = safe_files.is_file(folder.export_path / ADAPTER_CONFIG, folder.root)
    label = "Adapters" if is_adapter else "Folder"
    if step is not None:
        label += f", {'best model, ' if step == there.best else ''}step {step:,}"
    checks = {each.path: each.check for each in noted_exports(folder.root, folder.id)}
    check, note = checks.get(str(path), ""), "Only your account can read it."
    place = folder.export_path, folder.root
    return [_Exported(str(path), label, is_adapter, *place, check=check, note=note)], ""


def _other_exports(folder: RunFolder) -> list[_Exported]:
    found = []
    own = str(folder.path.resolve() / folder.export_path.name)
    for noted in noted_exports(folder.root, folder.id):
        if noted.path == own:
            continue
        label = f"{_kind(noted)}, step {noted.step:,}"
        place = Path(noted.path)
        found.append(
            _Exported(noted.path, label, noted.is_adapter, place, place, noted.file, noted.check)
        )
    return found


def _kind(noted: NotedExport) -> str:
    if noted.file:
        return f"GGUF file, {GGUF_LABELS.get(noted.dtype, noted.dtype)}"
    return f"{'Adapters' if noted.is_adapter else 'Folder'}, {noted.dtype}"


def _free_folder(folder: RunFolder) -> str:
    """Returns a folder for the next export, which is not there yet: beside the folder of runs."""
    exports = folder.path.resolve().parent.parent / "exports"
    target, number = exports / folder.id, 2
    while target.exists():
        target, number = exports / f"{folder.id}-{number}", number + 1
    return str(target)


def _has_login() -> bool:
    """Returns whether there is a token of the hub. Whether the hub takes it is not asked."""
    from huggingface_hub.utils import get_token  # this import takes long

    return bool(get_token())


def _has_adapters(folder: RunFolder) -> bool:
    try:
        return folder.config.train.method == "lora"
    except RamstreamError:
        return False


def _command(folder: RunFolder, name: str) -> str:
    command = shlex.join([name, folder.id, "--runs-dir", str(folder.path.resolve().parent)])
    return f"{program_command()} {command}"


def _base_of(folder: RunFolder) -> str:
    """Returns the model to which the adapters of a run belong."""
    try:
        return folder.config.model.source
    except RamstreamError:
        return "BASE_MODEL"


def _export_from(folder: RunFolder) -> ExportFrom:
    try:
        return folder.config.output.export_from
    except RamstreamError:
        return "last"


def _ollama_name(folder: RunFolder) -> str:
    """Returns a name for the model in Ollama, which takes small letters, digits and dashes."""
    parts = re.findall(r"[a-z0-9]+", settings_name(folder).lower())
    return "-".join(parts) or "my-model"


def _template_text(each: _Exported, gguf: GgufForecast) -> str:
    """Returns a text on the template in the Modelfile of an export."""
    if not gguf.is_read:
        return ""
    try:
        content = safe_files.read_bytes(each.place / MODELFILE, each.within)
    except FileFault as error:
        return f"Its Modelfile cannot be read: {error.strerror}."
    except OSError:
        if each.is_adapter:
            return "An adapter has no Modelfile; export the whole model for Ollama."
        return "Its Modelfile is gone; export the model again for Ollama."
    text = content.decode("utf-8", "replace")
    if "\nTEMPLATE " in text:
        return "Includes an Ollama Modelfile, checked against the chat template."
    why = re.search(r"^# There is no TEMPLATE here: (.*)$", text, re.MULTILINE)
    return f"Its Modelfile has no TEMPLATE: {why[1] if why else 'it was changed by hand.'}"


def settings_name(folder: RunFolder) -> str:
    """Returns the name in the settings of a run, or its id where they cannot be read."""
    try:
        return folder.config.name
    except RamstreamError:
        return folder.id
