"""Routes that show and cancel jobs, which are long work.

GET  /api/jobs
    The jobs under way.
GET  /api/jobs/N
    One job, even after its end.
POST /api/jobs/N/cancel {}
    Asks the job to end. It ends at its next check and leaves nothing half done.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.server.requests import answering_errors, count_of, json_body
from app.session.jobs import Job, Jobs
from engine.errors import RunError


def job_routes(jobs: Jobs) -> list[Route]:
    """Returns the routes that list `jobs`, show one of them and cancel it."""

    def job_of(request: Request) -> Job:
        number = count_of(request.path_params["number"])
        found = jobs.find(number) if number is not None else None
        if found is None:
            raise RunError(
                "There is no such job; it may have been started before the program was restarted."
            )
        return found

    async def list_working(_: Request) -> Response:
        return JSONResponse({"jobs": [job.to_dict() for job in jobs.working()]})

    async def show(request: Request) -> Response:
        return JSONResponse(job_of(request).to_dict())

    async def cancel(request: Request) -> Response:
        await json_body(request)
        job = job_of(request)
        job.cancel()
        return JSONResponse(job.to_dict())

    return [
        Route("/api/jobs", answering_errors(list_working), methods=["GET"]),
        Route("/api/jobs/{number}", answering_errors(show), methods=["GET"]),
        Route("/api/jobs/{number}/cancel", answering_errors(cancel), methods=["POST"]),
    ]
