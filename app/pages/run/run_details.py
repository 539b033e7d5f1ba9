"""Details of one run for its views Settings and Export: its name and note, its exact settings,
and command lines for them.
"""

from __future__ import annotations

import shlex
from typing import Any

from app.pages.run.export_details import export_details, settings_name
from app.pages.run.settings_in_words import settings_in_words
from app.session.detached import STDERR_FILE, STDOUT_FILE, last_lines
from engine import safe_files
from engine.config.tree import MOST_BYTES
from engine.paths import program_command
from engine.runs.record.run_folder import CONFIG_FILE, RunFolder
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.about import NOTE_LIMIT, read_about
from engine.runs.summaries.listing import summarize
from engine.training.checkpoints.saved_on_disk import saved_steps

PRINTED_LINES = 40
"""Number of lines that are shown of each of the two files with a detached run's output."""


def run_details(folder: RunFolder, snapshot: RunSnapshot) -> dict[str, Any]:
    """Returns the details of a run. If one part cannot be read, the others are still returned.

    They are its name and note, with the limit of the note; `config` as stored in the run folder, or
    `config_problem`; `commands` as label and text; and `printed`, the last lines of its output if
    it ran in a process of its own. `export` is as in `export_details`, and `settings` as in
    `settings_in_words`.
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
        "config_name": settings_name(folder),
        "note_limit": NOTE_LIMIT,
        "config": config,
        "config_problem": problem,
        "commands": _commands(folder, summary.state if summary else ""),
        "export": export_details(folder, snapshot, bool(summary and summary.export_failed)),
        "settings": settings_in_words(folder, summary.total_steps if summary else 0, snapshot.data),
        "printed": [*_printed(folder, STDOUT_FILE), *_printed(folder, STDERR_FILE)],
    }


def _printed(folder: RunFolder, name: str) -> list[str]:
    return last_lines(folder.path / name, folder.root)[-PRINTED_LINES:]


def _commands(folder: RunFolder, state: str) -> list[dict[str, str]]:
    """Returns command lines for a shell in the folder in which this program was started.

    The paths of runs are absolute, so that they are found from anywhere.
    """
    runs = str(folder.path.resolve().parent)
    config = str(folder.path.resolve() / CONFIG_FILE)
    commands = []
    saved = saved_steps(folder.checkpoints_path, folder.best_path)
    if state not in ("finished", "unreadable") and not saved.is_weights_alone:
        commands.append(("Resume this run", ["--resume", folder.id, "--runs-dir", runs]))
    if state != "unreadable" and saved.trained_on is not None:
        trained_on = ["--from", folder.id, "--runs-dir", runs]
        commands.append(("Continue training from its weights", trained_on))
    if state != "unreadable":
        commands.append(("A new run with the same settings", [config, "--runs-dir", runs]))
    return [
        {"label": label, "text": f"{program_command()} train {shlex.join(arguments)}"}
        for label, arguments in commands
    ]
