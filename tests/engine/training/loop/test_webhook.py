"""The webhook's address is notified when a run ends."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from engine.config.limits import web_address
from engine.config.settings import TrainConfig
from engine.errors import ConfigError
from engine.runs.record.events import LogLine, RunEnded
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.trained_runs import events_of


@pytest.fixture
def listener():
    """Runs a server that answers with `status` and keeps what it receives."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.server.got.append(
                (self.path, json.loads(self.rfile.read(int(self.headers["content-length"]))))
            )
            self.send_response(self.server.status)
            self.send_header("location", "/elsewhere")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.got, server.status = [], 204
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def run_with(tmp_path, address, **changes):
    return start_run(
        make_config(
            tmp_path,
            **{"train.steps": 2, "train.warmup_steps": 1, "output.webhook": address, **changes},
        ),
        tmp_path / "runs",
    )


def test_the_end_of_a_run_is_told_once(tmp_path, listener):
    run = run_with(tmp_path, f"http://127.0.0.1:{listener.server_port}/hook?key=secret")
    ended = run.execute()
    ((path, found),) = listener.got
    assert path == "/hook?key=secret"
    assert found["run"] == run.id
    assert found["state"] == ended.state == "finished"
    assert found["text"] == "Tiny finished: Finished all 2 steps."
    assert (
        found["step"],
        found["total_steps"],
    ) == (2, 2)
    assert isinstance(found["loss"], float) and found["seconds"] > 0
    assert not [line for line in events_of(run, LogLine) if "webhook" in line.text]


def test_a_failure_is_told_too(tmp_path, listener):
    run = run_with(
        tmp_path,
        f"http://127.0.0.1:{listener.server_port}/",
        **{"data.source": str(tmp_path / "missing.jsonl")},
    )
    ended = run.execute()
    assert [found["reason"] for _, found in listener.got] == [ended.reason]
    assert ended.state == "failed"


@pytest.mark.parametrize("status, text", [(500, "answered 500"), (302, "answered 302")])
def test_what_does_not_arrive_is_in_the_log_and_costs_nothing(tmp_path, listener, status, text):
    listener.status = status
    run = run_with(tmp_path, f"http://127.0.0.1:{listener.server_port}/secret")
    assert run.execute().state == "finished" and len(listener.got) == 1
    line = [line.text for line in events_of(run, LogLine) if "webhook" in line.text]
    assert len(line) == 1
    assert text in line[0]
    assert "secret" not in line[0]
    assert events_of(run, RunEnded)


def test_an_address_where_nobody_listens(tmp_path, listener):
    listener.server_close()
    run = run_with(tmp_path, f"http://127.0.0.1:{listener.server_port}/")
    assert run.execute().state == "finished"
    assert any("could not be told" in line.text for line in events_of(run, LogLine))


@pytest.mark.parametrize(
    "address",
    ["", "example.org/x", "ftp://example.org", "file:///etc/passwd", "http://", "http://[::1"],
)
def test_only_web_addresses_are_taken(address):
    with pytest.raises(ConfigError, match="output.webhook"):
        TrainConfig.from_dict(
            {"model": {"source": "m"}, "data": {"source": "d"}, "output": {"webhook": address}}
        )


@pytest.mark.parametrize(
    "address, reported",
    [
        ("http://me:secret@example.org/x", "the address has a user or a password before its host"),
        ("https://me@example.org/", "leave them out, and give an address that needs none"),
        ("http://example.org/a b", "the address has a space or a control character"),
        ("http://example.org/\n", "the address has a space or a control character"),
        ("http://example.org/ü", "letters beyond ASCII"),
        ("http://a..b/", "names a host"),
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_with_the_settings(address, reported):
    with pytest.raises(ConfigError) as refused:
        TrainConfig.from_dict(
            {"model": {"source": "m"}, "data": {"source": "d"}, "output": {"webhook": address}}
        )
    assert reported in str(refused.value) and "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "address", ["http://[::1]:8080/x?y=1", "HTTPS://Hooks.Example.org/T0/B0", "http://bücher.de/x"]
)
def test_addresses_that_can_be_posted_to_are_taken(address):
    web_address("output.webhook", address)
