"""Routes that show runs and control them.

GET  /api/live
    Which run to open.
GET  /api/live/RUN?since=SEQ&axis=AXIS
    What the page draws of a run, over steps, time or tokens.
GET  /api/runs/RUN/log?after=COUNT
    The log of a run after its first entries.
GET  /api/runs/RUN/curves.csv
    The curves of a run as a CSV file, with one row for each step.
GET  /api/runs/RUN/details
    Its name and note, its settings, and command lines for them and for its exported model.
GET  /api/runs/RUN/room?folder=FOLDER
    The bytes that may be written to a folder.
GET  /api/runs/RUN/file?folder=FOLDER&name=NAME
    A file of an exported folder of the run, as a download.
GET  /api/runs/RUN/archive?folder=FOLDER
    All files of an exported folder of the run, as a ZIP file.
GET  /api/runs/RUN/evaluation?limit=COUNT
    What its model was found to do beside its base model, and what can be evaluated.
POST /api/runs/RUN/evaluate {validation, answers, blind, tasks, own, limit, chat, programs, weights}
    Starts the job that evaluates the run.
POST /api/runs/RUN/evaluation/vote {evaluation, prompt, place}
    Counts a vote on the answers to a prompt: left, right or same.
POST /api/runs/RUN/evaluation/reveal {evaluation}
    Tells which answers are of which model.
POST /api/runs/RUN/control {command, seen}
    Stops, discards, pauses, resumes or saves; `seen` is the state that the page showed then.
POST /api/runs/RUN/describe {name, note?, tags?}
    Sets the run's name, its note and, if they are named, its tags, a list of texts.
POST /api/runs/RUN/change {values}
    Sets a new learning rate or number of steps.
POST /api/runs/RUN/delete {}
    Deletes the run's folder.
POST /api/runs/RUN/export {folder, dtype?}
    Starts the job that exports the model, in the dtype auto (the model's own), bfloat16 or float32.
POST /api/runs/RUN/push {folder, repository, seen_by?}
    Starts the job that uploads an exported folder to the Hugging Face hub. A new repository is seen
    by its owner alone, or by everyone.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.pages.run.evaluation_answers import EvaluationAnswers
from app.pages.run.exported_archive import exported_archive
from app.pages.run.exported_file import exported_file
from app.pages.run.run_details import run_details
from app.pages.run.run_watch import watch_of
from app.server.requests import answering_errors, count_of, json_body, text_of, texts_of
from app.session.session import Session
from app.shared.charts.axes import AXES
from engine.config.changes import Change
from engine.config.export_choice import ExportChoice
from engine.files import disk_free
from engine.paths import named_folder
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.curves_csv import curves_csv


def run_routes(session: Session) -> list[Route]:
    """Returns the routes for the runs of `session`."""
    answers = _RunAnswers(session)
    evaluation = EvaluationAnswers(session)
    reading = {
        "/api/live": answers.which_run,
        "/api/live/{run_id}": answers.live,
        "/api/runs/{run_id}/log": answers.log,
        "/api/runs/{run_id}/curves.csv": answers.curves,
        "/api/runs/{run_id}/details": answers.details,
        "/api/runs/{run_id}/room": answers.room,
        "/api/runs/{run_id}/file": answers.file,
        "/api/runs/{run_id}/archive": answers.archive,
        "/api/runs/{run_id}/evaluation": evaluation.show,
    }
    acting = {
        "/api/runs/{run_id}/describe": answers.describe,
        "/api/runs/{run_id}/control": answers.control,
        "/api/runs/{run_id}/change": answers.change,
        "/api/runs/{run_id}/delete": answers.delete,
        "/api/runs/{run_id}/evaluate": evaluation.start,
        "/api/runs/{run_id}/evaluation/reveal": evaluation.reveal,
        "/api/runs/{run_id}/evaluation/vote": evaluation.vote,
        "/api/runs/{run_id}/export": answers.export,
        "/api/runs/{run_id}/push": answers.push,
    }
    return [
        *(Route(path, answering_errors(work), methods=["GET"]) for path, work in reading.items()),
        *(Route(path, answering_errors(work), methods=["POST"]) for path, work in acting.items()),
    ]


class _RunAnswers:
    """Answers requests about the runs of one session. All file reads happen in threads."""

    def __init__(self, session: Session):
        self._session = session

    async def which_run(self, _: Request) -> Response:
        run_id = await asyncio.to_thread(self._session.run_to_open)
        active = await asyncio.to_thread(lambda: self._session.busy_id)
        return JSONResponse(
            {"server_id": self._session.server_id, "active": active, "run_id": run_id}
        )

    async def live(self, request: Request) -> Response:
        since = count_of(request.query_params.get("since", "")) or 0
        axis = request.query_params.get("axis")
        watch = watch_of(self._session, _run_id(request))
        body = await watch.answer(since, axis if axis in AXES else "step")
        server = json.dumps(await asyncio.to_thread(self._about_server, _run_id(request))).encode()
        # The watch returns the members of an object as bytes. These are large, so they are appended
        # unparsed to the members that the server adds.
        return Response(server[:-1] + b"," + body + b"}", media_type="application/json")

    def _about_server(self, run_id: str) -> dict[str, Any]:
        """Returns which run is active, and its name unless it is `run_id`."""
        busy = self._session.busy_id
        other = None if busy == run_id else busy
        return {
            "server_id": self._session.server_id,
            "active": busy,
            "other_active": "" if other is None else self._session.name_of_run(other),
        }

    async def log(self, request: Request) -> Response:
        after = count_of(request.query_params.get("after", "")) or 0
        watch = watch_of(self._session, _run_id(request))
        return JSONResponse(await asyncio.to_thread(watch.log, after))

    async def curves(self, request: Request) -> Response:
        folder = open_run(self._session.runs_dir, _run_id(request))
        lines = await asyncio.to_thread(lambda: "".join(curves_csv(folder.events_path)))
        name = f'attachment; filename="{folder.id}-curves.csv"'
        headers = {"content-disposition": name}
        return Response(lines, media_type="text/csv; charset=utf-8", headers=headers)

    async def details(self, request: Request) -> Response:
        run_id = _run_id(request)
        folder = open_run(self._session.runs_dir, run_id)
        snapshot = self._session.follow(run_id).snapshot  # as far as it was read for the page
        return JSONResponse(await asyncio.to_thread(run_details, folder, snapshot))

    async def room(self, request: Request) -> Response:
        open_run(self._session.runs_dir, _run_id(request))
        folder = named_folder(request.query_params.get("folder", "").strip())
        return JSONResponse({"free": await asyncio.to_thread(disk_free, folder)})

    async def file(self, request: Request) -> Response:
        run = open_run(self._session.runs_dir, _run_id(request))
        folder, name = (request.query_params.get(key, "") for key in ("folder", "name"))
        return await asyncio.to_thread(exported_file, run, folder, name)

    async def archive(self, request: Request) -> Response:
        run = open_run(self._session.runs_dir, _run_id(request))
        folder = request.query_params.get("folder", "")
        return await asyncio.to_thread(exported_archive, run, folder)

    async def describe(self, request: Request) -> Response:
        body = await json_body(request)
        name = text_of(body, "name")
        note = text_of(body, "note") if "note" in body else None
        tags = texts_of(body, "tags") if "tags" in body else None
        about = await asyncio.to_thread(self._session.describe, _run_id(request), name, note, tags)
        return JSONResponse({"name": about.name, "note": about.note, "tags": list(about.tags)})

    async def control(self, request: Request) -> Response:
        body = await json_body(request)
        seen = text_of(body, "seen") if "seen" in body else ""
        command = text_of(body, "command")
        run_id = await asyncio.to_thread(self._session.request, _run_id(request), command, seen)
        return JSONResponse({"run_id": run_id})

    async def change(self, request: Request) -> Response:
        asked = Change.from_dict((await json_body(request)).get("values"))
        run_id = await asyncio.to_thread(self._session.change, _run_id(request), asked)
        return JSONResponse({"run_id": run_id})

    async def delete(self, request: Request) -> Response:
        await json_body(request)
        await asyncio.to_thread(self._session.delete, _run_id(request))
        return JSONResponse({})

    async def export(self, request: Request) -> Response:
        body = await json_body(request)
        choice = ExportChoice(
            dtype=text_of(body, "dtype") if "dtype" in body else "auto",
            weights=text_of(body, "weights") if "weights" in body else None,
            form=text_of(body, "form") if "form" in body else None,
        )
        job = self._session.export(_run_id(request), text_of(body, "folder"), choice)
        return JSONResponse(job.to_dict())

    async def push(self, request: Request) -> Response:
        body = await json_body(request)
        folder, repository = text_of(body, "folder"), text_of(body, "repository")
        private = "seen_by" not in body or text_of(body, "seen_by") != "everyone"
        job = self._session.push(_run_id(request), folder, repository, private)
        return JSONResponse(job.to_dict())


def _run_id(request: Request) -> str:
    return request.path_params["run_id"]
