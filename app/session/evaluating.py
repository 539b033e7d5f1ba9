"""Evaluations of runs, each a job. A run that begins, or goes on, ends the evaluation under way,
since it needs the memory; what is done by then is kept, and the next evaluation does the rest.
"""

from __future__ import annotations

import time
from typing import Any

from app.session.engine_calls import ChatCalls
from app.session.jobs import Job
from app.session.offered_weights import OfferedWeights
from app.session.session import Session
from engine.config.export_choice import ExportFrom
from engine.errors import DataError, RunError
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.summaries.evaluation_results import Wanted
from engine.runs.summaries.names import shown_name

GIVE_UP_SECONDS = 30
"""Seconds that a run waits at most for the end of an evaluation."""
_POLL_SECONDS = 0.05


class Evaluating:
    """Starts the evaluations of a session's runs. All methods may be called from any thread."""

    def __init__(self, session: Session):
        self._session = session
        self._job: Job | None = None
        self._offered = OfferedWeights(session, ChatCalls())
        session.call_before_runs(self.end)

    def start(self, run_id: str, wanted: Wanted, of: ExportFrom | None, allows_code: bool) -> Job:
        """Starts the job that evaluates a run. `of` names the trained weights, as for
        `AskedEvaluation`. Raises RunError if nothing is wanted, while a run trains here, and as
        `Jobs.start` does.
        """
        if not (wanted.validation or wanted.answers or wanted.tasks):
            raise RunError("Nothing is chosen; tick what to evaluate.")
        folder = open_run(self._session.runs_dir, run_id)
        lent = self._lent_by(folder)

        def work(job: Job) -> str:
            if lent is not None:
                # A run that goes on needs the machine for itself.
                lent.when_over("evaluation", self.end)
            job.stage("Opening the run")
            self._session.free_idle_memory()
            self._session.engine.evaluate_run(
                folder.path.parent,
                run_id,
                wanted,
                of=of,
                allows=lambda sentence: _allowed(sentence, allows_code),
                progress=job.progress,
                lent=lent,
            )
            return f"Evaluated {shown_name(folder)}."

        self._job = self._session.jobs.start(_title(folder), work, about=run_id)
        return self._job

    def job_of(self, folder: RunFolder) -> Job | None:
        """Returns the job that evaluates this run now, if one does."""
        ours = (folder.id, _title(folder))
        working = self._session.jobs.working()
        return next((job for job in working if (job.about, job.title) == ours), None)

    def end(self) -> None:
        """Ends the evaluation under way, and waits until its memory is free."""
        job = self._job
        if job is None:
            return
        job.cancel()
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while job.state == "working" and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def why_not(self, run_id: str) -> str:
        """Returns why this run cannot be evaluated now; empty if it can."""
        try:
            self._lent_by(RunFolder(self._session.runs_dir / run_id))
        except RunError as error:
            return str(error)
        return ""

    def _lent_by(self, folder: RunFolder) -> Any:
        """Returns the calls of this run if it is paused in this process. Raises RunError while a
        run needs the machine.
        """
        paused = self._offered.paused_run()
        return paused if self._session.active_id == folder.id else None


def _title(folder: RunFolder) -> str:
    return f"The evaluation of {shown_name(folder)}"


def _allowed(sentence: str, allows_code: bool) -> bool:
    if not allows_code:
        raise DataError(f"{sentence} Read them, then tick “My task may run its programs”.")
    return True
