"""The app is served with one run, a secret next to the folder of runs, and a helper that sends many
requests.
"""

from __future__ import annotations

import asyncio

import httpx
import pytest

from engine.config.settings import TrainConfig
from engine.runs.record.run_folder import create_run
from tests.support.security import RUN, SECRET
from tests.support.served import ADDRESS, served


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def app(folder):
    """Returns the app with a run, and with a secret next to the folder of runs."""
    (folder / "secret").mkdir()
    for name in ("config.yaml", "events.jsonl", "secret.txt"):
        (folder / "secret" / name).write_text(SECRET)
    made = create_run(
        folder / "runs",
        TrainConfig.from_dict(
            {
                "name": "run",
                "model": {"source": "no/such-model"},
                "data": {"source": "no/such-data"},
            }
        ),
    )
    made.path.rename(folder / "runs" / RUN)
    app = served(folder / "runs")
    yield app.app
    app.session.close()


@pytest.fixture
def ask(app):
    """Sends many requests at once, none of which may cause a server error. Returns the answers."""

    def ask(requests):
        async def go():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
                answers = []
                for method, path, content in requests:
                    answers.append(
                        await client.request(
                            method,
                            path,
                            content=content,
                            headers={"content-type": "application/json"}
                            if method == "POST"
                            else {},
                        )
                    )
                answers.append(await client.get("/api/runs"))
                return answers

        *answers, alive = asyncio.run(go())
        assert alive.status_code == 200, "the app answers no more"
        for (method, path, content), answer in zip(requests, answers):
            what = (method, path[:80], str(content)[:80], answer.text[:300])
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, what
            if answer.status_code != 200:
                shown = answer.json()
                sentence = shown.get("error") or shown["detail"]  # from Gradio's file routes
                assert (
                    0 < len(sentence) <= 2000
                    and "Traceback" not in sentence
                    and "Error(" not in sentence
                ), what
        return answers

    return ask
