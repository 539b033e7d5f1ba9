"""`Session`: what the server owns. It runs at most one run, in a worker thread that no tab can end, follows the runs of
other processes, and passes requests on to whichever process a run belongs to."""

from __future__ import annotations

import importlib
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.jobs import Job, Jobs
from app.watch import Watch
from engine.config import TrainConfig
from engine.errors import RunError
from engine.runs import RunSummary, delete_run, list_runs, open_run, send_command

KEPT_WATCHES = 8
LIST_SECONDS = 1.0


class Run(Protocol):
    """What the session needs of `engine.job.Run`."""

    id: str

    def execute(self) -> Any: ...

    def request(self, command: str) -> None: ...


def _later(module: str, name: str) -> Callable[..., Any]:
    """A function of the engine, imported when it is first called: torch takes seconds, and the page must not wait."""
    return lambda *args, **kwargs: getattr(importlib.import_module(module), name)(*args, **kwargs)


@dataclass(frozen=True)
class EngineCalls:
    """The engine's functions that the session calls; tests give their own."""

    start_run: Callable[..., Run] = _later("engine.job", "start_run")
    resume_run: Callable[..., Run] = _later("engine.job", "resume_run")
    export_run: Callable[..., Any] = _later("engine.export", "export_run")
    ask_run: Callable[..., str] = _later("engine.generate", "ask_run")
    estimate: Callable[..., Any] = _later("engine.fit", "estimate")
    preview: Callable[..., dict[str, Any]] = _later("engine.data", "preview")
    load_tokenizer: Callable[..., Any] = _later("engine.model", "load_tokenizer")

    @staticmethod
    def warm_up() -> None:
        """Import what the first Start, estimate and preview need, so that they do not wait for it."""
        for module in ("engine.fit", "engine.data", "engine.job"):
            importlib.import_module(module)


class Session:
    """All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, engine: EngineCalls | None = None):
        self.runs_dir = runs_dir
        self.engine = engine or EngineCalls()
        self.server_id = secrets.token_hex(6)
        """New with each server, so that a page notices that it talks to another one."""
        self.jobs = Jobs()
        self._launching = threading.Lock()
        self._watching = threading.Lock()
        self._active: Run | None = None
        self._worker: threading.Thread | None = None
        self._watches: OrderedDict[str, Watch] = OrderedDict()
        self._listed: tuple[float, list[RunSummary]] = (-LIST_SECONDS, [])

    # ------------------------------------------------------------------ the run of this process

    @property
    def active_id(self) -> str | None:
        """The run that this process is running."""
        run = self._active
        return run.id if run is not None else None

    def why_not_start(self) -> str | None:
        """The sentence that stands beside a Start that cannot be pressed, or None."""
        run = self._active
        return f"{run.id} is running here, and one run at a time is possible: stop it or let it finish." if run else None

    def start(self, config: TrainConfig) -> str:
        """Start a run and return its id at once. Raises RunError when one is running, and what `start_run` raises."""
        return self._launch(lambda: self.engine.start_run(config, self.runs_dir))

    def resume(self, run_id: str) -> str:
        """Continue a stopped, failed or interrupted run; returns at once, raises like `start`."""
        return self._launch(lambda: self.engine.resume_run(self.runs_dir, run_id))

    def _launch(self, make: Callable[[], Run]) -> str:
        with self._launching:
            reason = self.why_not_start()
            if reason is not None:
                raise RunError(reason)
            run = self._active = make()
            self._worker = threading.Thread(target=self._work, args=(run,), name=f"run-{run.id}", daemon=True)
            self._worker.start()
            self._listed = (-LIST_SECONDS, [])
            return run.id

    def _work(self, run: Run) -> None:
        try:
            run.execute()
        except RunError as error:  # another process has taken the run in the meantime: its record is not ours to write
            print(error, file=sys.stderr, flush=True)
        finally:
            self._active = None

    def close(self) -> None:
        """Stop and save the active run, and wait for it. A KeyboardInterrupt ends the wait."""
        run, worker = self._active, self._worker
        if run is not None and worker is not None:
            run.request("stop")
            while worker.is_alive():
                worker.join(timeout=0.2)

    # ------------------------------------------------------------------ any run

    def request(self, run_id: str, command: str) -> str:
        """Ask a run to stop, discard, pause, resume or save. A run that is over or interrupted is resumed as a new
        session of this process. Raises RunError when nobody would obey. Returns the run's id."""
        folder = open_run(self.runs_dir, run_id)
        run = self._active
        if run is not None and run.id == run_id:
            run.request(command)
        elif command == "resume" and not folder.is_running():
            return self.resume(run_id)
        else:
            send_command(folder, command)
        self.watch(run_id).note_request(command)
        return run_id

    def watch(self, run_id: str) -> Watch:
        """What follows this run, shared by all who look at it. Raises RunError when there is no such run."""
        with self._watching:
            watch = self._watches.get(run_id)
            if watch is None or not watch.folder.path.is_dir():
                watch = self._watches[run_id] = Watch(open_run(self.runs_dir, run_id),
                                                         lambda: self.active_id == run_id)
            self._watches.move_to_end(run_id)
            while len(self._watches) > KEPT_WATCHES:
                self._watches.popitem(last=False)
            return watch

    def runs(self) -> list[RunSummary]:
        """Every run, newest first; read again at most once a second."""
        listed_at, listed = self._listed
        if time.monotonic() - listed_at >= LIST_SECONDS:
            listed = list_runs(self.runs_dir)
            self._listed = (time.monotonic(), listed)
        return listed

    def delete(self, run_id: str) -> None:
        """Delete a run with its record and checkpoints. Raises RunError while it is going on."""
        delete_run(self.runs_dir, run_id)
        with self._watching:
            self._watches.pop(run_id, None)
        self._listed = (-LIST_SECONDS, [])

    def run_to_open(self) -> str | None:
        """The run that a page shows when its address names none: the active one, else the newest."""
        runs = self.runs() if self._active is None else []
        return self.active_id or (runs[0].id if runs else None)

    # ------------------------------------------------------------------ long work

    def export(self, run_id: str, folder: str, checkpoint: int | None = None) -> Job:
        """Write a run's weights as a Hugging Face folder."""
        open_run(self.runs_dir, run_id)
        if not folder.strip():
            raise RunError("No folder is given; name the folder to write the model to.")
        target = Path(folder.strip()).expanduser()

        def work(job: Job) -> str:
            found = self.engine.export_run(self.runs_dir, run_id, target, checkpoint=checkpoint, progress=job.progress)
            return " ".join([f"Exported the model of step {found.step:,} to {target.resolve()}.", *found.skipped])

        return self.jobs.start(f"The export of {run_id}", work)

    def ask(self, run_id: str, prompt: str, max_new_tokens: int, temperature: float, top_p: float) -> Job:
        """Let a run's newest weights answer a prompt; `text` of the job grows as the answer does."""
        open_run(self.runs_dir, run_id)
        if not prompt.strip():
            raise RunError("The prompt is empty; type something to answer.")

        def work(job: Job) -> str:
            def so_far(text: str) -> None:
                job.text = text

            job.text = self.engine.ask_run(self.runs_dir, run_id, prompt, max_new_tokens=max_new_tokens,
                                           temperature=temperature, top_p=top_p, on_text=so_far)
            return ""

        return self.jobs.start(f"The answer of {run_id}", work)
