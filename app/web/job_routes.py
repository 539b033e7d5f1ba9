"""These are the routes of long work.

    GET  /api/jobs                the jobs under way
    GET  /api/jobs/N              one job, also when it is over
    POST /api/jobs/N/cancel {}    asks it to end

A job ends where it next looks whether it was asked to, and leaves nothing half done.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.session.jobs import Job, Jobs
from app.web.requests import answering_errors, count_of, json_body
from engine.errors import RunError


def job_routes(jobs: Jobs) -> list[Route]:
    def asked_for(request: Request) -> Job:
        number = count_of(request.path_params["number"])
        found = jobs.find(number) if number is not None else None
        if found is None:
            raise RunError(
                "There is no such job; it may have been started before the program was restarted."
            )
        return found

    async def listed(_: Request) -> Response:
        return JSONResponse({"jobs": [job.to_dict() for job in jobs.working()]})

    async def one(request: Request) -> Response:
        return JSONResponse(asked_for(request).to_dict())

    async def cancel(request: Request) -> Response:
        await json_body(request)
        job = asked_for(request)
        job.cancel()
        return JSONResponse(job.to_dict())

    return [
        Route("/api/jobs", answering_errors(listed), methods=["GET"]),
        Route("/api/jobs/{number}", answering_errors(one), methods=["GET"]),
        Route("/api/jobs/{number}/cancel", answering_errors(cancel), methods=["POST"]),
    ]
