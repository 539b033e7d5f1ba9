"""Routes by which a page starts and ends serving."""

from __future__ import annotations

import json

import pytest

from app.pages.serve.openai_routes import _events, openai_routes
from app.pages.serve.serve_routes import serve_routes
from app.server.api_key import ApiKey
from app.session.serving import Serving
from app.session.session import Session
from engine.runs.record.run_folder import create_run
from tests.support.fake_chat import FakeChatCalls
from tests.support.folders import make_config
from tests.support.routes import send, wait_for


@pytest.fixture
def served(tmp_path):
    session = Session(tmp_path / "runs")
    folder = create_run(session.runs_dir, make_config(tmp_path))
    (folder.checkpoints_path / "step-10").mkdir(parents=True)
    serving = Serving(session, FakeChatCalls())
    key = ApiKey(session.runs_dir / "key")
    yield folder.id, serving, [*serve_routes(serving, key), *openai_routes(serving)], key
    serving.stop()
    session.close()


def test_a_page_starts_and_ends_serving_and_learns_the_key(served):
    run_id, serving, routes, key = served
    assert "key" not in send(routes, "GET", "/api/serve").json()
    assert send(routes, "POST", "/api/serve/start", {"run_id": run_id}).json()["about"] == run_id
    wait_for(lambda: serving.served() is not None)
    state = send(routes, "GET", "/api/serve").json()
    assert state["run_id"] == run_id and state["key"] == key.text()
    assert (key.path.stat().st_mode & 0o777) == 0o600
    assert [each["id"] for each in send(routes, "GET", "/v1/models").json()["data"]] == [
        "Tiny",
        "Tiny-base",
    ]
    assert send(routes, "GET", "/v1/models/Tiny-base").json()["id"] == "Tiny-base"
    assert send(routes, "POST", "/api/serve/stop", {}).json() == {}
    assert send(routes, "GET", "/v1/models").json()["data"] == []
    missing = send(routes, "GET", "/v1/models/Tiny")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_what_cannot_be_served_is_a_sentence(served):
    _, _, routes, _ = served
    for body in ({}, {"run_id": "../x"}, {"run_id": "20260101-000000-none"}):
        refused = send(routes, "POST", "/api/serve/start", body)
        assert refused.status_code == 409 and refused.json()["error"]


def test_a_key_is_kept_for_the_next_start_and_replaced_if_others_could_read_it(tmp_path):
    path = tmp_path / "key"
    first = ApiKey(path).text()
    assert ApiKey(path).text() == first and first.startswith("sk-ramstream-")
    path.chmod(0o644)
    second = ApiKey(path).text()
    assert second != first and path.stat().st_mode & 0o077 == 0
    path.write_bytes(b"sk-ramstream-short")
    assert ApiKey(path).text() not in (first, second)


def test_an_event_is_one_line_for_every_client():
    chunks = [{"text": "a\u2028b\u2029c\x85d\ne"}, {"text": "Größe 茶"}]
    lines = _events(chunks).decode().splitlines()
    assert [json.loads(line.removeprefix("data: ")) for line in lines if line] == chunks
    assert "Größe 茶" in lines[2]
