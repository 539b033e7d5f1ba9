"""The names under which runs are shown. Each new run has one of its own: a second "Starter" is
"Starter 2".
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.errors import RamstreamError, RunError
from engine.paths import program_command
from engine.runs.record.run_folder import RunFolder, create_run, lasting_config
from engine.runs.summaries.about import read_about
from engine.runs.summaries.listing import configured_name, run_ids

_NUMBERED = re.compile(r"(.+) (\d{1,6})")


def shown_name(folder: RunFolder) -> str:
    """Returns the name under which a run is shown: the one that a person gave to it, or that of its
    settings. A run whose settings cannot be read has its id.
    """
    given = read_about(folder.path).name
    if given:
        return given
    try:
        return folder.config.name
    except (RamstreamError, OSError):
        return folder.id


def names_of_runs(runs_dir: Path) -> list[str]:
    """Returns the names of all runs of a folder. Their settings are not checked, so that a thousand
    runs cost little.
    """
    try:
        folders = [RunFolder(runs_dir / run_id) for run_id in run_ids(runs_dir)]
    except OSError:
        return []
    given = [(folder, read_about(folder.path).name) for folder in folders]
    return [name or configured_name(folder) or folder.id for folder, name in given]


def run_named(runs_dir: Path, text: str) -> str:
    """Returns the id of the run whose id or name is `text`. Raises RunError if there is none, and
    if several have this name.
    """
    try:
        ids = run_ids(runs_dir)
    except OSError:
        ids = []
    if text in ids:
        return text
    found = [run_id for run_id in ids if shown_name(RunFolder(runs_dir / run_id)) == text]
    if len(found) == 1:
        return found[0]
    if found:
        raise RunError(
            f"{text} is the name of several runs; name one by its id: {', '.join(found)}."
        )
    raise RunError(
        f"{text} is neither the id nor the name of a run in {runs_dir}; `{program_command()} runs` "
        "lists them."
    )


def own_name(name: str, taken: Iterable[str]) -> str:
    """Returns `name`, or the first of "name 2", "name 3" and so on that is not taken. Small and
    capital letters are alike.
    """
    others = {other.casefold() for other in taken}
    if name.casefold() not in others:
        return name
    numbered = _NUMBERED.fullmatch(name)
    # "Starter 2" goes on with "Starter 3", while the 3 of "Qwen 3" is no number of a repeat.
    if numbered is not None and numbered[1].casefold() in others:
        name = numbered[1]
    number = 2
    while f"{name} {number}".casefold() in others:
        number += 1
    return f"{name} {number}"


def new_run(runs_dir: str | os.PathLike[str], config: TrainConfig) -> RunFolder:
    """Creates the folder of a new run with a name of its own. Local sources are kept as absolute
    paths. Raises RunError as `create_run` does.
    """
    name = own_name(config.name, names_of_runs(Path(runs_dir)))
    return create_run(runs_dir, lasting_config(config.with_values({"name": name})))
