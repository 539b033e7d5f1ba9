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
from engine.runs.summaries.exports import OTHER_TOKENS, NotedExport, noted_exports
from engine.safe_files import FileFault
from engine.training.checkpoints.saved_on_disk import SavedSteps, saved_steps
from engine.training.export.export_size import export_sizes
from engine.training.export.gguf_forecast import GgufForecast, forecast
from engine.training.export.gguf_known import gguf_file_name
from engine.training.export.modelfile import MODELFILE
from engine.training.export.serve_commands import (
    ExportCommand,
    adapter_to_type,
    gguf_to_type,
    what_to_type,
)


@dataclass(frozen=True)
class _Exported:
    """A folder with the exported model."""

    path: str
    about: str
    is_adapter: bool
    file: str = ""
    """Name of the GGUF file in it, if it has one."""
    check: str = ""
    """Sentence on whether it reads the run's data as they were trained."""

    @property
    def as_dict(self) -> dict[str, Any]:
        files = files_of(Path(self.path))
        return {
            "path": self.path,
            "about": self.about,
            "check": self.check,
            "is_other": self.check.startswith(OTHER_TOKENS),
            "files": [{"name": name, "bytes": size} for name, size in files.items()],
        }


def export_details(folder: RunFolder, has_export_failed: bool) -> dict[str, Any]:
    """Returns the `exports` of a run, the newest first, with why its own cannot be used (`fault`);
    which weights an export takes (`caption`), and the `folder` it is offered; the bytes that each
    form takes in each dtype (`sizes`), where they are known, and the names of GGUF files by dtype;
    commands that use the newest export (`uses`), of which there are none before, and others
    (`rows`). `login` says whether this machine has a token of the Hugging Face hub.
    """
    there = saved_steps(folder.checkpoints_path, folder.best_path)
    saved = there.exported(_export_from(folder))
    own, fault = _own_export(folder, there)
    exports = [*_other_exports(folder), *own]
    is_owed = has_export_failed and not folder.has_export
    own_path = str(folder.path.resolve() / folder.export_path.name)
    target = own_path if is_owed else _free_folder(folder)
    gguf = forecast(_base_of(folder))
    rows = []
    if saved is not None:
        runs = str(folder.path.resolve().parent)
        command = shlex.join(["export", folder.id, target, "--runs-dir", runs])
        rows.append({"label": "Export without a browser", "text": f"{program_command()} {command}"})
    if saved is not None or exports:
        rows.append({"label": "Serve without a browser", "text": _serve_command(folder)})
    return {
        "exports": [each.as_dict for each in exports],
        "fault": fault,
        "caption": _caption(saved, there),
        "folder": target,
        "can_export": saved is not None,
        "sizes": _sizes(folder),
        "gguf_names": {kind: gguf_file_name(settings_name(folder), kind) for kind in GGUF_TYPES},
        "can_serve": saved is not None or folder.has_export or folder.is_running(),
        "has_adapters": _has_adapters(folder),
        "no_gguf": gguf.why_not,
        "uses": _uses(folder, exports[0], gguf, saved is not None) if exports else [],
        "rows": rows,
        "pushed": exports[0].path if exports else "",
        "login": _has_login(),
        "template": "" if exports != own or not own else _template_text(folder, own[0], gguf),
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


def _uses(
    folder: RunFolder, loaded: _Exported, gguf: GgufForecast, is_saved: bool
) -> list[dict[str, str]]:
    """Returns the commands that use an export. is_saved: the run can be exported once more."""
    runs = str(folder.path.resolve().parent)
    again = program_command(), folder.id, runs, _free_folder(folder), settings_name(folder)
    export = ExportCommand(*again) if is_saved else None
    name = _ollama_name(folder)
    if loaded.file:
        typed = gguf_to_type(loaded.path, loaded.file, name, export)
    elif loaded.is_adapter:
        typed = adapter_to_type(loaded.path, name, _base_of(folder), export)
    else:
        as_file = None if gguf.why_not else export
        typed = what_to_type(loaded.path, name, gguf.is_read, as_file)
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
    which = "Best model" if step is not None and step == there.best else "Model"
    words = which if step is None else f"{which} (step {step:,})"
    is_adapter = safe_files.is_file(folder.export_path / ADAPTER_CONFIG, folder.root)
    about = f"{words}; only your account can read it"
    checks = {each.path: each.check for each in noted_exports(folder.root, folder.id)}
    return [_Exported(str(path), about, is_adapter, check=checks.get(str(path), ""))], ""


def _other_exports(folder: RunFolder) -> list[_Exported]:
    found = []
    own = str(folder.path.resolve() / folder.export_path.name)
    for noted in noted_exports(folder.root, folder.id):
        if noted.path == own:
            continue
        about = f"Step {noted.step:,}, {_kind(noted)}, {noted.dtype}"
        found.append(_Exported(noted.path, about, noted.is_adapter, noted.file, noted.check))
    return found


def _kind(noted: NotedExport) -> str:
    if noted.file:
        return "GGUF file"
    return "adapters" if noted.is_adapter else "model"


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


def _serve_command(folder: RunFolder) -> str:
    command = shlex.join(["serve", folder.id, "--runs-dir", str(folder.path.resolve().parent)])
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


def _template_text(folder: RunFolder, own: _Exported, gguf: GgufForecast) -> str:
    """Returns a text on the template in the Modelfile of a run's own export."""
    if not gguf.is_read:
        return ""
    try:
        content = safe_files.read_bytes(folder.export_path / MODELFILE, folder.root)
    except FileFault as error:
        return f"Its Modelfile cannot be read: {error.strerror}."
    except OSError:
        if own.is_adapter:
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
