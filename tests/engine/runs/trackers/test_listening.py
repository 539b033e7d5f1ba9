"""A run with trackers listens nowhere beyond loopback: neither its process nor one that it or a
tracker's package has started.
"""

from __future__ import annotations

import os
import time

import psutil
import pytest

from engine.config.output_settings import TRACKERS
from engine.runs.record.events import LogLine, StepFinished
from engine.runs.trackers.known_trackers import KINDS
from engine.runs.trackers.ledger import Ledger
from engine.training.loop.run import Run, start_run
from tests.support.folders import make_config
from tests.support.strangers import beyond_loopback, listening
from tests.support.trained_runs import events_of

PATIENCE = 60
"""A test gives up after this many seconds."""
FAKE = """
import subprocess, sys
LISTENS = '''
import socket, time
with socket.create_server(({address!r}, 0)) as server:
    print(server.getsockname()[1], flush=True)
    time.sleep({seconds})
'''
class Run:
    url = None
    def __init__(self, id):
        self.id, self.summary = id, {{}}
        # As the package itself does, it has a process of its own.
        command = [sys.executable, "-c", LISTENS]
        self.service = subprocess.Popen(command, stdout=subprocess.PIPE)
        self.service.stdout.readline()
    def define_metric(self, *_, **__): pass
    def log(self, _): pass
    def finish(self, exit_code):
        self.service.kill()
        self.service.wait()
def Settings(**_): pass
def init(id, **_): return Run(id)
"""
"""The package of Weights & Biases, whose service listens at `address`."""


def addresses_of(run: Run, tracker: str) -> tuple[set[str], set[str]]:
    """Executes a run. Returns the addresses at which its process and those that are started from it
    listen once the tracker is open, and those of them that other hosts reach. What listened before,
    such as the server of another test, does not count.
    """
    found: tuple[set[str], set[str]] = set(), set()
    before = listening(*_family())

    def look(record):
        until = time.monotonic() + PATIENCE
        if not isinstance(record.event, StepFinished):
            return
        # The run waits here until the tracker has taken it.
        while not Ledger(run.folder.path).of(tracker).run:
            failed = [event.text for event in events_of(run, LogLine) if event.level == "warning"]
            assert time.monotonic() < until and not failed, failed
            time.sleep(0.05)
        family = _family()
        for addresses, reported in zip(found, (listening(*family), beyond_loopback(*family))):
            addresses.update(address for address, _ in reported - before)

    run.recorder.subscribe(look)
    assert run.execute().state == "finished"
    return found


def _family() -> list[int]:
    """Returns this process and those that are started from it."""
    return [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]


def tracked_run(tmp_path, name: str) -> Run:
    changes = {"train.steps": 2, "train.warmup_steps": 1, "output.trackers": [name]}
    return start_run(make_config(tmp_path, **changes), tmp_path / "runs")


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_tracker_s_service_is_seen_where_it_listens_and_nothing_else_listens(
    tmp_path, monkeypatch, address
):
    folder = tmp_path / "packages" / "wandb"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(FAKE.format(address=address, seconds=PATIENCE))
    monkeypatch.syspath_prepend(str(folder.parent))
    path = (str(folder.parent), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    everywhere, beyond = addresses_of(tracked_run(tmp_path, "wandb"), "wandb")
    assert everywhere == {address}
    assert beyond == {address} - {"127.0.0.1"}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_run_with_a_tracker_listens_on_loopback_alone(tmp_path, monkeypatch, name):
    kind = KINDS[name]
    if not kind.is_installed:
        pytest.skip(kind.not_installed)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    _, beyond = addresses_of(tracked_run(tmp_path, name), name)
    assert not beyond
