"""Details of one run for its views Settings and Export: its name and note, its exact settings,
command lines for them, and how its model is exported.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

from app.pages.run.benchmark_rows import benchmark_table
from app.session.detached import STDERR_FILE, STDOUT_FILE, last_lines
from engine import safe_files
from engine.config.export_choice import ExportFrom
from engine.config.tree import MOST_BYTES
from engine.errors import RamstreamError
from engine.model.lora.peft_folder import CONFIG as ADAPTER_CONFIG
from engine.paths import program_command
from engine.runs.record.run_folder import CONFIG_FILE, RunFolder
from engine.runs.summaries.about import NAME_LIMIT, NOTE_LIMIT, read_about
from engine.runs.summaries.benchmark_results import read_benchmarks
from engine.runs.summaries.listing import summarize
from engine.safe_files import FileFault
from engine.training.checkpoints.saved_on_disk import saved_steps
from engine.training.export.modelfile import MODELFILE
from engine.training.export.serve_commands import adapter_to_type, what_to_type

PRINTED_LINES = 40
"""Number of lines that are shown of each of the two files with a detached run's output."""


def run_details(folder: RunFolder) -> dict[str, Any]:
    """Returns the details of a run. If one part cannot be read, the others are still returned.

    They are its name and note, with the limits of both; `config` as stored in the run folder, or
    `config_problem`; `commands` as label and text; and `printed`, the last lines of its output if
    it ran in a process of its own. `export` has which weights can be exported, where to, with which
    commands, and the benchmarks of the weights.
    """
    about = read_about(folder.path)
    summary = summarize(folder)
    config = ""
    problem = ""
    try:
        content = safe_files.read_bytes(folder.path / CONFIG_FILE, folder.root, MOST_BYTES)
        config = content.decode("utf-8", "replace")
    except OSError as error:
        problem = f"{CONFIG_FILE} cannot be read ({error.strerror})."
    return {
        "id": folder.id,
        "path": str(folder.path.resolve()),
        "name": about.name,
        "note": about.note,
        "tags": ", ".join(about.tags),
        "config_name": _config_name(folder),
        "name_limit": NAME_LIMIT,
        "note_limit": NOTE_LIMIT,
        "config": config,
        "config_problem": problem,
        "commands": _commands(folder, summary.state if summary else ""),
        "export": _export(folder, summary is not None and bool(summary.export_failed)),
        "printed": [*_printed(folder, STDOUT_FILE), *_printed(folder, STDERR_FILE)],
    }


def _export(folder: RunFolder, has_export_failed: bool) -> dict[str, Any]:
    there = saved_steps(folder.checkpoints_path, folder.best_path)
    saved = there.exported(_export_from(folder))
    exported = folder.path.resolve() / folder.export_path.name
    is_adapter = safe_files.is_file(folder.export_path / ADAPTER_CONFIG, folder.root)
    has_export = folder.has_export
    is_owed = has_export_failed and not has_export
    target = str(exported) if is_owed else f"exports/{folder.id}"
    fault = ""
    if has_export:
        try:
            folder.checked_export()
        except OSError as error:
            fault = str(error) if isinstance(error, FileFault) else f"{error.strerror}: {exported}."
            has_export = is_adapter = False
    loaded = str(exported) if has_export else target
    typed = what_to_type(loaded, _ollama_name(folder))
    if is_adapter:
        typed = adapter_to_type(loaded, _ollama_name(folder), _base_of(folder))
    rows = [{"label": label, "text": text} for label, text in typed]
    if saved is not None:
        runs = str(folder.path.resolve().parent)
        command = shlex.join(["export", folder.id, target, "--runs-dir", runs])
        rows.append(
            {"label": "Export it without a browser", "text": f"{program_command()} {command}"}
        )
    if saved is not None or has_export:
        rows.append({"label": "Measure it on benchmarks", "text": _eval_command(folder)})
    if saved is None:
        sentence = "No checkpoint is saved, so there are no weights to export."
    else:
        which = "best" if saved == there.best else "newest saved"
        sentence = f"The {which} weights are those of step {saved:,}; an export takes these."
    if has_export:
        sentence += (
            f" The run itself exported to {exported}, which only your account can read; for "
            "programs of other accounts, export to a folder elsewhere."
        )
    if fault:
        sentence += f" The run's own export cannot be used: {fault}"
    pushed = loaded if has_export else ""
    return {
        "folder": target,
        "can_export": saved is not None,
        "has_adapters": _has_adapters(folder),
        "caption": sentence,
        "rows": rows,
        "pushed": pushed,
        "benchmarks": benchmark_table(read_benchmarks(folder.path)),
        "template": _template_text(folder, is_adapter) if has_export else "",
    }


def _has_adapters(folder: RunFolder) -> bool:
    try:
        return folder.config.train.method == "lora"
    except RamstreamError:
        return False


def _eval_command(folder: RunFolder) -> str:
    """Returns the command that asks a first task; the person names others in its place."""
    runs = str(folder.path.resolve().parent)
    command = shlex.join(["eval", folder.id, "--tasks", "arc_easy", "--runs-dir", runs])
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
    parts = re.findall(r"[a-z0-9]+", _config_name(folder).lower())
    return "-".join(parts) or "my-model"


def _template_text(folder: RunFolder, is_adapter: bool) -> str:
    """Returns a text on the template in the Modelfile of a run's export."""
    try:
        content = safe_files.read_bytes(folder.export_path / MODELFILE, folder.root)
    except FileFault as error:
        return f"Its Modelfile cannot be read: {error.strerror}."
    except OSError:
        if is_adapter:
            return "An adapter has no Modelfile; export the whole model for Ollama."
        return "Its Modelfile is gone; export the model again for Ollama."
    text = content.decode("utf-8", "replace")
    if "\nTEMPLATE " in text:
        return (
            "Its Modelfile writes conversations for Ollama with the tokens of the model's own chat "
            "template; both were compared."
        )
    why = re.search(r"^# There is no TEMPLATE here: (.*)$", text, re.MULTILINE)
    return f"Its Modelfile has no TEMPLATE: {why[1] if why else 'it was changed by hand.'}"


def _printed(folder: RunFolder, name: str) -> list[str]:
    return last_lines(folder.path / name, folder.root)[-PRINTED_LINES:]


def _config_name(folder: RunFolder) -> str:
    try:
        return folder.config.name
    except RamstreamError:
        return folder.id


def _commands(folder: RunFolder, state: str) -> list[dict[str, str]]:
    """Returns command lines for a shell in the folder in which this program was started.

    The paths of runs are absolute, so that they are found from anywhere.
    """
    runs = str(folder.path.resolve().parent)
    config = str(folder.path.resolve() / CONFIG_FILE)
    commands = []
    saved = saved_steps(folder.checkpoints_path, folder.best_path)
    if state not in ("finished", "unreadable") and not saved.is_weights_alone:
        commands.append(("Go on with this run", ["--resume", folder.id, "--runs-dir", runs]))
    if state != "unreadable" and saved.trained_on is not None:
        trained_on = ["--from", folder.id, "--runs-dir", runs]
        commands.append(("A new run that starts from its weights", trained_on))
    if state != "unreadable":
        commands.append(("A new run with the same settings", [config, "--runs-dir", runs]))
    return [
        {"label": label, "text": f"{program_command()} train {shlex.join(arguments)}"}
        for label, arguments in commands
    ]
