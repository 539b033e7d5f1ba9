"""These details of one run are shown in the Runs tab on request: its name and note, its exact
settings, and command lines for them.
"""

from __future__ import annotations

import shlex
from typing import Any

from app.session.detached import STDERR_FILE, STDOUT_FILE, last_lines
from engine.checkpoints.saved_steps import saved_steps
from engine.errors import RamstreamError
from engine.paths import program_command
from engine.runs.about import NAME_LIMIT, NOTE_LIMIT, read_about
from engine.runs.folder import CONFIG_FILE, RunFolder
from engine.runs.listing import summarise

PRINTED_LINES = 40
"""This many lines are shown of each of the two files that hold a detached run's output."""


def run_details(folder: RunFolder) -> dict[str, Any]:
    """Returns the details of a run. If one part cannot be read, the others are still returned.

    They are its name and note, with the limits of both; `config` as stored in the run folder, or
    `config_problem`; `commands` as label and text; and `printed`, the last lines of its output if
    it ran in a process of its own.
    """
    about = read_about(folder.path)
    summary = summarise(folder)
    config = ""
    problem = ""
    try:
        config = (folder.path / CONFIG_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        problem = f"{CONFIG_FILE} cannot be read ({error.strerror})."
    return {
        "id": folder.id,
        "path": str(folder.path.resolve()),
        "name": about.name,
        "note": about.note,
        "config_name": _config_name(folder),
        "name_limit": NAME_LIMIT,
        "note_limit": NOTE_LIMIT,
        "config": config,
        "config_problem": problem,
        "commands": _commands(folder, summary.state if summary else ""),
        "printed": [*_printed(folder, STDOUT_FILE), *_printed(folder, STDERR_FILE)],
    }


def _printed(folder: RunFolder, name: str) -> list[str]:
    return last_lines(folder.path / name)[-PRINTED_LINES:]


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
    saved = saved_steps(folder.checkpoints_path)
    if state not in ("finished", "unreadable") and not saved.is_weights_alone:
        commands.append(("Go on with this run", ["--resume", folder.id, "--runs-dir", runs]))
    if state != "unreadable" and saved.newest is not None:
        trained_on = ["--from", folder.id, "--runs-dir", runs]
        commands.append(("A new run that starts from its weights", trained_on))
    if state != "unreadable":
        commands.append(("A new run with the same settings", [config, "--runs-dir", runs]))
    return [
        {"label": label, "text": f"{program_command()} train {shlex.join(arguments)}"}
        for label, arguments in commands
    ]
