"""Serving a run from the start of the program, as `launch.py serve` asks for."""

from __future__ import annotations

import asyncio
import sys

from app.server.api_key import ApiKey
from app.session.serving import Serving
from engine.errors import RunError

LOOK_SECONDS = 0.1


async def serve_run(serving: Serving, run_id: str, url: str, key: ApiKey) -> None:
    """Loads the model of a run, and prints how a program reaches it. Raises RamstreamError where it
    cannot be served.

    The key is printed at a terminal alone: a log may be open to others.
    """
    text = await asyncio.to_thread(key.text)
    job = await asyncio.to_thread(serving.start, run_id)
    print(f"{job.title}: loading its weights", flush=True)
    while job.state == "working":
        await asyncio.sleep(LOOK_SECONDS)
    served = serving.served()
    if job.state != "done" or served is None:
        raise RunError(job.error or job.result)
    trained, before = served.names().values()
    print(f"Base URL  {url}v1")
    print(f"API key   {text if sys.stdout.isatty() else f'in {key.path}'}")
    print(f"Model     {trained} (base model: {before})", flush=True)
    if serving.slow_note():
        print(serving.slow_note(), flush=True)
