"""Answers to requests about the evaluations of runs."""

from __future__ import annotations

import asyncio
from typing import Any, cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.pages.run.evaluation_details import evaluation_details
from app.pages.run.run_watch import watch_of
from app.server.requests import count_of, json_body, number_of, switch_of, text_of, texts_of
from app.session.evaluating import Evaluating
from app.session.session import Session
from engine.config.export_choice import ExportFrom
from engine.errors import RunError
from engine.paths import named_folder
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.blind_votes import reveal, vote
from engine.runs.summaries.evaluation_results import Wanted
from engine.tools.evaluate.task_code import tasks_in

MOST_ANSWERS, MOST_SAMPLES = 200, 1_000_000
NOTHING_NEWER = 1 << 62
"""Number of a record's event behind which there is none."""


class EvaluationAnswers:
    """Answers requests about the evaluations of one session's runs. All file reads happen in
    threads.
    """

    def __init__(self, session: Session):
        self._session = session
        self._evaluating = Evaluating(session)

    async def show(self, request: Request) -> Response:
        run_id = request.path_params["run_id"]
        await watch_of(self._session, run_id).answer(NOTHING_NEWER, "step")  # reads the record
        limit = count_of(request.query_params.get("limit", ""))
        return JSONResponse(await asyncio.to_thread(self._shown, run_id, limit))

    def _shown(self, run_id: str, limit: int | None) -> dict[str, Any]:
        folder = open_run(self._session.runs_dir, run_id)
        job = self._evaluating.job_of(folder)
        is_paused_here = self._session.active_id == run_id
        snapshot = self._session.follow(run_id).snapshot
        return evaluation_details(folder, snapshot, is_paused_here, job is not None, limit) | {
            "job": None if job is None else job.to_dict(),
            "why_not": self._evaluating.why_not(run_id),
        }

    async def start(self, request: Request) -> Response:
        body = await json_body(request)
        wanted = await asyncio.to_thread(_wanted, body)
        of = text_of(body, "weights")
        if of and of not in get_args(ExportFrom):
            raise RunError("There are no such weights; reload the page.")
        job = await asyncio.to_thread(
            self._evaluating.start,
            request.path_params["run_id"],
            wanted,
            cast("ExportFrom | None", of or None),
            switch_of(body, "programs"),
        )
        return JSONResponse(job.to_dict())

    async def vote(self, request: Request) -> Response:
        body = await json_body(request)
        folder = open_run(self._session.runs_dir, request.path_params["run_id"])
        prompt = int(number_of(body, "prompt", 0, 0, MOST_ANSWERS))
        await asyncio.to_thread(
            vote, folder.path, text_of(body, "evaluation"), prompt, text_of(body, "place")
        )
        return await self.show(request)

    async def reveal(self, request: Request) -> Response:
        body = await json_body(request)
        folder = open_run(self._session.runs_dir, request.path_params["run_id"])
        await asyncio.to_thread(reveal, folder.path, text_of(body, "evaluation"))
        return await self.show(request)


def _wanted(body: dict[str, Any]) -> Wanted:
    """Returns what the form asks for. Raises RunError for values that it does not have, and
    DataError for a task file that cannot be read.
    """
    answers = int(number_of(body, "answers", 0, 0, MOST_ANSWERS))
    limit = int(number_of(body, "limit", 0, 0, MOST_SAMPLES))
    own = text_of(body, "own").strip()
    tasks = tuple(texts_of(body, "tasks"))
    include = ""
    if own:
        file = named_folder(own)
        tasks += tasks_in(file)
        include = str(file.parent)
    return Wanted(
        validation=switch_of(body, "validation"),
        answers=answers,
        is_blind=switch_of(body, "blind"),
        tasks=tuple(dict.fromkeys(tasks)),
        include=include,
        own=own,
        limit=limit or None,
        chat=switch_of(body, "chat"),
    )
