"""A session of the app over runs that are pretended, and what its routes answer."""

from __future__ import annotations

import threading
from types import SimpleNamespace

from app.pages.frame.job_routes import job_routes
from app.pages.run.run_routes import run_routes
from app.pages.runs.list_routes import list_routes
from app.pages.runs.queue_routes import queue_routes
from app.session.engine_calls import EngineCalls
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.runs.record.events import ControlReceived, RunEnded, RunStarted, StateChanged
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run, open_run
from tests.support.routes import send_all
from tests.support.synthetic_run import run_events, step_finished

CONFIG = TrainConfig.from_dict({"name": "Fake", "model": {"source": "m"}, "data": {"source": "d"}})


def named(name):
    return CONFIG.with_values({"name": name})


class FakeRun:
    """Steps when told to; obeys like `engine.training.loop.run.Run`."""

    def __init__(self, folder):
        self.id, self.folder = folder.id, folder
        self.commands: list[str] = []
        self.may_step, self.asked = threading.Semaphore(0), threading.Event()

    def execute(self):
        with self.folder.lock():
            recorder = RunRecorder(self.folder.path, self.id)
            recorder.emit(RunStarted(name="Fake", total_steps=10))
            recorder.emit(StateChanged(state="running"))
            step = recorder.snapshot.step
            while step < 10 and not self.asked.is_set():
                if self.may_step.acquire(timeout=0.01):
                    step += 1
                    recorder.emit(step_finished(step, 10))
            for command in self.commands:
                recorder.emit(
                    ControlReceived(command=command if isinstance(command, str) else "change")
                )
            recorder.emit(RunEnded(state="stopped" if self.asked.is_set() else "finished"))
            recorder.close()

    def request(self, command):
        self.commands.append(command)
        if command != "resume":  # which means nothing to one that is going on
            self.asked.set()

    def stop(self, is_urgent):
        self.request("stop")

    def follow(self, told):
        pass

    def close(self):
        pass


class FakeEngine:
    """Keeps the runs it made; `asked` are the arguments of the other calls."""

    def __init__(self):
        self.runs: list[FakeRun] = []
        self.asked: list[tuple] = []

    def calls(self):
        return EngineCalls(
            start_run=lambda config, runs_dir: self.make(create_run(runs_dir, config)),
            resume_run=lambda runs_dir, run_id: self.make(open_run(runs_dir, run_id)),
            export_run=self.export,
            push=self.push,
        )

    def make(self, folder):
        self.runs.append(FakeRun(folder))
        return self.runs[-1]

    def export(self, runs_dir, run_id, folder, choice, progress):
        progress(1, 2)
        if folder.name == "full":
            raise RunError("The disk is full.")
        self.asked.append((run_id, folder, choice))
        return SimpleNamespace(in_words="step 7", notes=())

    def push(self, folder, repository, private, progress):
        progress(1, 2)
        self.asked.append((folder, repository, private))
        return f"https://hub.example/{repository}"


def call(session, *requests):
    """Answers of (method, path, json) requests to the session's routes, one after the other in one
    event loop.
    """
    routes = (
        run_routes(session)
        + list_routes(session)
        + queue_routes(session)
        + job_routes(session.jobs)
    )
    return send_all(routes, *requests)


def get(session, path):
    return call(session, ("GET", path, None))[0]


def post(session, path, body):
    return call(session, ("POST", path, body))[0]


def finished_run(session, events=None, **config):
    folder = create_run(session.runs_dir, CONFIG.with_values(config))
    recorder = RunRecorder(folder.path, folder.id)
    for event in events or run_events(60):
        recorder.emit(event)
    recorder.close()
    return folder


def at_once(count, act):
    """What `act(number)` returned or raised, of so many threads that begin together."""
    gate, answers = threading.Barrier(count), [None] * count

    def one(number):
        gate.wait()
        try:
            answers[number] = act(number)
        except RunError as error:
            answers[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers
