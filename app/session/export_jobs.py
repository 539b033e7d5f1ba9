"""The work of the jobs that export a model and push it to the hub."""

from __future__ import annotations

from collections.abc import Callable

from app.session.engine_calls import EngineCalls
from app.session.jobs import BYTES, Job
from engine.config.export_choice import ExportChoice
from engine.errors import RunError
from engine.paths import named_folder
from engine.runs.record.run_folder import RunFolder


def export_work(
    engine: EngineCalls, run: RunFolder, folder: str, choice: ExportChoice
) -> Callable[[Job], str]:
    """Returns the work that exports a run's weights to `folder`. Raises RunError if none is
    given.
    """
    if not folder.strip():
        raise RunError("No folder is given; name the folder to write the model to.")
    target = named_folder(folder.strip())

    def work(job: Job) -> str:
        job.stage("Opening the run", BYTES)
        found = engine.export_run(
            run.path.parent, run.id, target, choice=choice, progress=job.progress
        )
        return " ".join([f"Exported the model of {found.in_words} to {target}.", *found.notes])

    return work


def push_work(
    engine: EngineCalls, folder: str, repository: str, private: bool
) -> Callable[[Job], str]:
    """Returns the work that uploads the exported `folder` to a repository of the hub. Raises
    RunError if a name is missing.
    """
    if not folder.strip() or not repository:
        raise RunError("Name the exported folder and the repository to push it to.")
    source = named_folder(folder.strip())

    def work(job: Job) -> str:
        address = engine.push(source, repository, private=private, progress=job.progress)
        return f"Pushed {source} to {address}."

    return work
