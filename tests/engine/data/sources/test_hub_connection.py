"""Data sets of the hub without a connection: told within seconds, and read from the cache."""

from __future__ import annotations

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from engine.data.sources import hub_connection
from engine.data.sources.hub_connection import from_hub_or_cache, why_cut_off
from engine.errors import DataError
from tests.support.stuck import never_stuck

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def unknown(monkeypatch):
    """Nothing is known yet of the connection, and nobody has set offline mode."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub_connection, "_CONNECTION", hub_connection._Connection())


def at(monkeypatch, port: int) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{port}")


@pytest.fixture
def nobody(monkeypatch):
    """The hub is at a port where nobody listens."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        at(monkeypatch, other.getsockname()[1])
        yield


@pytest.fixture
def silent(monkeypatch):
    """The hub takes connections and says nothing."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        at(monkeypatch, other.getsockname()[1])
        yield


def answering(status: int) -> ThreadingHTTPServer:
    class Hub(BaseHTTPRequestHandler):
        asked = 0

        def do_HEAD(self):
            type(self).asked += 1
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def load(**options):
    return lambda: datasets.load_dataset("acme/rows", split="train", **options)


def cached(folder) -> None:
    """Puts the data set acme/rows into the cache of `datasets`, as a download leaves it there."""
    place = folder / "acme___rows" / "default" / "0.0.0" / "0123"
    place.mkdir(parents=True)
    rows = datasets.Dataset.from_dict({"text": ["one", "two"]})
    with datasets.arrow_writer.ArrowWriter(path=str(place / "rows-train.arrow")) as writer:
        writer.write_table(rows.data.table)
        writer.finalize()
    info = {
        "builder_name": "rows",
        "dataset_name": "rows",
        "config_name": "default",
        "version": {"version_str": "0.0.0", "major": 0, "minor": 0, "patch": 0},
        "splits": {"train": {"name": "train", "num_examples": 2, "dataset_name": "rows"}},
        "features": {"text": {"dtype": "string", "_type": "Value"}},
    }
    (place / "dataset_info.json").write_text(json.dumps(info), encoding="utf-8")


def test_an_unknown_data_set_is_refused_at_once_and_says_that_there_is_no_connection(
    nobody, monkeypatch
):
    requests, request = [], hub_connection._request
    monkeypatch.setattr(hub_connection, "_request", lambda: requests.append(1) or request())
    with never_stuck(), pytest.raises(DataError) as refused:
        from_hub_or_cache("acme/none", load())
    assert len(requests) == 1, "nothing is tried again"
    found = str(refused.value)
    assert found.startswith("This computer cannot reach Hugging Face (")
    assert "refuses" in found and found.endswith("the data set acme/none is not downloaded yet.")
    assert datasets.config.HF_HUB_OFFLINE is False


def test_a_silent_hub_is_waited_for_once(silent, monkeypatch):
    monkeypatch.setattr(hub_connection, "PATIENCE_SECONDS", 0.3)
    monkeypatch.setattr(hub_connection, "KNOWN_SECONDS", 3600)
    ask, asked = hub_connection._ask, []
    monkeypatch.setattr(hub_connection, "_ask", lambda: asked.append(1) or ask())
    began = time.monotonic()
    with never_stuck():
        assert why_cut_off() == why_cut_off()
        assert why_cut_off() is not None
    assert time.monotonic() - began > 0.2 and len(asked) == 1


@pytest.mark.parametrize("streaming", [True, False])
def test_what_is_cached_is_read_without_a_connection(nobody, monkeypatch, tmp_path, streaming):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    cached(tmp_path)
    rows = from_hub_or_cache("acme/rows", load(streaming=streaming))
    assert [row["text"] for row in rows] == ["one", "two"]


def test_an_error_that_is_not_of_the_connection_is_passed_on(nobody, monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    cached(tmp_path)
    with pytest.raises(ValueError, match="nosuch"):
        from_hub_or_cache("acme/rows", lambda: datasets.load_dataset("acme/rows", split="nosuch"))
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("status, reason", [(200, None), (404, None), (503, "it answered 503")])
def test_a_hub_that_answers_is_asked_once_and_used(monkeypatch, status, reason):
    server = answering(status)
    try:
        at(monkeypatch, server.server_port)
        assert (why_cut_off(), why_cut_off()) == (reason, reason)
        assert server.RequestHandlerClass.asked == 1
        monkeypatch.setattr(hub_connection, "KNOWN_SECONDS", 0.0)
        assert why_cut_off() == reason and server.RequestHandlerClass.asked == 2
        offline = []
        from_hub_or_cache("x", lambda: offline.append(datasets.config.HF_HUB_OFFLINE))
        assert offline == [reason is not None]
    finally:
        server.shutdown()
        server.server_close()


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    assert why_cut_off() == "offline mode is on: HF_HUB_OFFLINE"


def test_the_cause_is_told_in_words(monkeypatch, nobody):
    assert why_cut_off() == "it refuses connections"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://no-such-name.invalid")
    monkeypatch.setattr(hub_connection, "_CONNECTION", hub_connection._Connection())
    assert why_cut_off() == "its name cannot be looked up; this machine may be offline"
