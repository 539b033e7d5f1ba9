"""The state of the server.

- It runs at most one run in this process, in a worker thread that does not depend on any tab.
- It starts other runs in processes of their own, or in turn from its queue.
- It follows the records of all runs, including those of other processes.
- It passes requests on to the process that a run belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import math
import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from app.session.detached import DetachedRuns, is_starting, request_when_started
from app.session.engine_calls import EngineCalls, Run
from app.session.export_jobs import export_work, push_work
from app.session.followed_run import FollowedRun
from app.session.jobs import BYTES, Job, Jobs
from app.session.queue import Queued, RunQueue
from app.session.refusals import name_of, refuse_if_paused_when_seen, refuse_unless_done
from app.session.run_list import RunList, RunsToShow
from app.shared.run_bar import actions_in
from app.shared.run_row import RunScan
from app.shared.run_table import Asked
from engine.config.changes import Change
from engine.config.export_choice import AS_CONFIGURED, ExportChoice
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, RunError
from engine.runs.record.control import COMMANDS
from engine.runs.record.run_folder import RunFolder, delete_run, find_run, open_run
from engine.runs.summaries.about import About, read_about, write_about
from engine.runs.summaries.listing import RunSummary, summarize
from engine.runs.summaries.names import shown_name
from engine.tools.cli.end_signals import write_line
from engine.training.checkpoints.saved_on_disk import saved_steps

KEPT_RUNS = 8
ENDED_BY_A_PERSON = ("stopped", "discarded")
JOIN_SECONDS = 0.2
"""Seconds of each of the waits into which the wait for a thread is divided, so that a second Ctrl-C
can end it.
"""


class Session:
    """Owns the runs of one folder. All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, engine: EngineCalls | None = None):
        self.runs_dir = runs_dir
        self.engine = engine or EngineCalls()
        self.server_id = secrets.token_hex(6)
        """Id of this server, new at each start, from which a page notices that the server was
        restarted.
        """
        self.jobs = Jobs()
        self._detached = DetachedRuns()
        self._before_runs: list[Callable[[], None]] = []
        self.served_id: str | None = None
        """Run whose model answers other programs; `Serving` sets it."""
        self._idle: list[Callable[[], None]] = []
        self.was_opened = threading.Event()
        """Event that is set once a page has been opened."""
        # Under this lock, checking that no run is active and starting one are one step: of twenty
        # people who press Start at once, only one starts a run.
        self._launching = threading.Lock()
        # The launching thread writes these two fields, and the run's own thread also writes
        # `_active` when the run ends. Readers take no lock: they copy `_active` once and use the
        # copy, since it can become None at any time.
        self._active: Run | None = None
        self._worker: threading.Thread | None = None
        # A signal handler sets these, so no lock guards them; it never sets them back.
        self._is_closing = False
        self._is_urgent = False
        self._stopped: Run | None = None
        """Run that was asked to stop, since the server ends. A second request would leave it."""
        # This lock guards `_followed`, so that each run is followed only once.
        self._following = threading.Lock()
        self._followed: OrderedDict[str, FollowedRun] = OrderedDict()
        """Followed runs; the most recently requested comes last."""
        self._list = RunList(runs_dir, self._detached, lambda: self.active_id)
        self.queue = RunQueue(
            runs_dir,
            self._start_queued,
            self.why_not_start,
            self._list.running_elsewhere,
            self._went_its_way,
        )

    # ------------------------------------------------------------------ the run of this process

    def call_before_runs(self, give_back: Callable[[], None]) -> None:
        """Registers `give_back`, which is called before each run begins, to free memory that is not
        needed.
        """
        self._before_runs.append(give_back)

    def call_for_memory(self, give_back: Callable[[], None]) -> None:
        """Registers `give_back`, which frees memory that is kept for later alone."""
        self._idle.append(give_back)

    def free_idle_memory(self) -> None:
        """Frees the memory that is kept for later alone. Call it from a job: no other uses it."""
        for give_back in self._idle:
            give_back()

    def _free_memory(self) -> None:
        for give_back in self._before_runs:
            give_back()

    @property
    def active_id(self) -> str | None:
        """The id of the run that is active in this process, or None if none is."""
        run = self._active
        return run.id if run is not None else None

    @property
    def active_run(self) -> Run | None:
        """The run that `active_id` names, or None."""
        return self._active

    @property
    def busy_id(self) -> str | None:
        """The id of the run that is active, here or in another process. Other processes are checked
        at most once a second.
        """
        elsewhere = None if self._active is not None else self._list.running_elsewhere_lately()
        return self.active_id or elsewhere

    @property
    def preparing_elsewhere(self) -> str | None:
        """The id of a run that another process is preparing. Not all of its memory is allocated
        yet.
        """
        run_id = self.busy_id
        if run_id is None or run_id == self.active_id:
            return None
        for run in self.runs():
            if run.id == run_id and run.state == "preparing":
                return run_id
        return None

    def why_not_start(self) -> str | None:
        """Returns why no run can be started now, or None if one can."""
        run_id = self.active_id or self._list.running_elsewhere()
        if run_id is None:
            return None
        return f"{self.name_of_run(run_id)} is training. This run can start after it."

    def free_at(self) -> float | None:
        """Returns when the run that is under way ends if it goes on as it does, to the minute, in
        Unix seconds; None where that is not known.
        """
        run_id = self.busy_id
        if run_id is None:
            return None
        try:
            snapshot = self.follow(run_id).snapshot
        except RunError:
            return None
        left = snapshot.seconds_left if snapshot.state == "running" else None
        return None if left is None else 60 * math.ceil((time.time() + left) / 60)

    def start(self, config: TrainConfig) -> str:
        """Starts a run and returns its id at once. One on several GPUs gets a process of its own.
        Raises RunError if a run is active, and any error that `start_run` raises.
        """
        if _has_several_gpus(config):
            return self.start_detached(config)
        return self._launch(lambda: self.engine.start_run(config, self.runs_dir))

    def start_detached(self, config: TrainConfig) -> str:
        """Starts a run in a process of its own, which continues after this one ends, and returns
        its id at once. Raises as `start` does.
        """
        with self._launching:
            self._refuse_second_run()
            self._free_memory()
            run_id = self._detached.start(config, self.runs_dir, self._has_ended)
            self._list.forget()
            return run_id

    def resume(self, run_id: str) -> str:
        """Continues a stopped, failed or interrupted run and returns its id at once. One on several
        GPUs gets a process of its own. Raises as `start` does.
        """
        folder = open_run(self.runs_dir, run_id)
        with contextlib.suppress(ConfigError):  # the run itself reports what is wrong
            if _has_several_gpus(folder.config):
                return self._resume_detached(folder)
        return self._launch(lambda: self.engine.resume_run(self.runs_dir, run_id), run_id)

    def _resume_detached(self, folder: RunFolder) -> str:
        with self._launching:
            if self._goes_on(folder):  # another request was first
                return folder.id
            self._refuse_second_run()
            # Reasons against it are reported here, and not recorded by the process as a failure.
            self.engine.resume_run(self.runs_dir, folder.id).close()
            self._free_memory()
            self._detached.resume(folder, self._has_ended)
            self.follow(folder.id).note_begin()
            self._list.forget()
            return folder.id

    def queue_resume(self, run_id: str) -> int:
        """Queues the resume of a run that is over, and returns its position among the waiting runs,
        from 1. Raises RunError if it cannot be resumed, and as `RunQueue.add` does.
        """
        folder = open_run(self.runs_dir, run_id)
        run = summarize(folder)
        if (
            run is None
            or self._goes_on(folder)
            or "resume" not in actions_in(run.state, saved_steps(folder.checkpoints_path))
        ):
            name = shown_name(folder)
            raise RunError(f"{name} cannot be resumed: it is still training or has finished.")
        return self.queue.add(folder.config.with_values({"name": run.name}), resumes=run_id)

    def _start_queued(self, queued: Queued) -> str:
        if queued.resumes:
            return self.resume(queued.resumes)
        config = TrainConfig.from_dict(queued.config)
        return self.start_detached(config) if queued.detached else self.start(config)

    def _went_its_way(self, run_id: str) -> bool:
        """Returns whether a run of another process, which is over, finished or failed rather than
        being ended by a person.
        """
        folder = RunFolder(self.runs_dir / run_id)
        self._detached.record_end(folder)
        run = summarize(folder)
        return run is not None and run.state not in ENDED_BY_A_PERSON

    def _refuse_second_run(self) -> None:
        if self._is_closing:
            raise RunError("Ramstream is closing; start the run when it is open again.")
        reason = self.why_not_start()
        if reason is not None:
            raise RunError(reason)

    def _launch(self, make: Callable[[], Run], run_id: str | None = None) -> str:
        """Makes a run, starts it in a thread of its own, and returns its id. `run_id` is the id of
        a run to resume.
        """
        with self._launching:
            if run_id is not None and self.active_id == run_id:  # another request was first
                return run_id
            self._refuse_second_run()
            run = make()
            # This is a daemon thread, since a second Ctrl-C must be able to end the server.
            worker = threading.Thread(
                target=self._work, args=(run,), name=f"run-{run.id}", daemon=True
            )
            # This is set before the thread starts, since that thread resets it at the end of the
            # run.
            self._active = run
            self._worker = worker
            run.follow(self._report)
            if self._is_closing:  # a signal has come meanwhile
                self._stop_active()
            try:
                worker.start()
            except RuntimeError:  # the system has no more threads
                self._active = None
                self._worker = None
                run.close()
                if run_id is None:
                    delete_run(self.runs_dir, run.id)  # a folder without a record is not a run
                raise RunError(
                    "The run cannot be started: the system allows this program no further thread. "
                    "End other programs and try again."
                ) from None
            finally:
                self._list.forget()
            return run.id

    def _work(self, run: Run) -> None:
        """Runs a run to its end; the worker thread calls this."""
        try:
            self._free_memory()
            # If the run's folder vanishes, only what was read before is still known of the run.
            with self._noted(run.id):
                run.execute()
        except RunError as error:
            # Another process has taken the run meanwhile, so this one must not write its record.
            print(error, file=sys.stderr, flush=True)
        finally:
            self._active = None
            self._has_ended()

    @contextlib.contextmanager
    def _noted(self, run_id: str) -> Iterator[None]:
        """Returns a context in which the run is noted to be under way in this process."""
        followed = None
        with contextlib.suppress(RunError):  # the run itself reports what is wrong
            followed = self.follow(run_id)
            followed.note_begin()
        try:
            yield
        finally:
            if followed is not None:
                followed.note_end()

    def _has_ended(self) -> None:
        self._list.forget()
        self.queue.poll()

    def stop(self, is_urgent: bool = False) -> None:
        """Asks the active run to stop, and starts no other from now on. If it `is_urgent`, the
        process may soon be ended by force. It returns at once, and a signal handler may call it.
        """
        self._is_urgent = is_urgent
        self._is_closing = True
        self.queue.start_no_more()
        self._stop_active()

    def _stop_active(self) -> None:
        run = self._active
        if run is not None and run is not self._stopped:
            self._stopped = run
            run.stop(self._is_urgent)

    def _report(self, text: str) -> None:
        """Writes a line of the active run's log to the terminal, while the server ends."""
        if self._is_closing:
            write_line(text)

    def close(self) -> None:
        """Stops and saves the active run, and waits for it; queued runs stay queued."""
        self.queue.close()
        self.stop(self._is_urgent)
        worker = self._worker
        while worker is not None and worker.is_alive():
            worker.join(timeout=JOIN_SECONDS)

    # ------------------------------------------------------------------ requests to any run

    def request(self, run_id: str, command: str | Change, seen: str = "") -> str:
        """Requests a stop, discard, pause, resume, save or change of a run, and returns the run's
        id. A run that is over or interrupted is resumed as a new session of this process. `seen` is
        the state that the page showed at the time of the request, if known.

        Simultaneous requests for the same command are not an error. Raises RunError if no process
        would carry out the request.
        """
        folder = open_run(self.runs_dir, run_id)
        followed = self.follow(run_id)
        # This is read before the command is sent: a page may read that it was taken right after
        # that.
        taken = followed.snapshot.requests_taken
        run = self._active
        if run is not None and run.id == run_id:
            run.request(command)
        elif command == "resume" and not self._goes_on(folder):
            refuse_if_paused_when_seen(shown_name(folder), seen)
            return self.resume(run_id)
        else:
            try:
                request_when_started(folder, command)
            except RunError:
                is_no_command = isinstance(command, str) and command not in COMMANDS
                if self._goes_on(folder) or is_no_command:
                    raise
                refuse_unless_done(folder, command)
                return run_id
        followed.note_request(name_of(command), taken)
        return run_id

    @staticmethod
    def _goes_on(folder: RunFolder) -> bool:
        return folder.is_running() or is_starting(folder)

    def change(self, run_id: str, change: Change) -> str:
        """Requests a change of an active run's settings and returns the run's id. Raises RunError
        for values that the run would refuse.
        """
        change.applied(open_run(self.runs_dir, run_id).config, self.follow(run_id).snapshot.step)
        return self.request(run_id, change)

    # ------------------------------------------------------------------ what is known of any run

    def follow(self, run_id: str) -> FollowedRun:
        """Returns what follows a run; all pages that show the run share it. Raises
        RunError if there is no such run.
        """
        with self._following:
            followed = self._followed.get(run_id)
            if followed is None or followed.is_outdated:
                folder = open_run(self.runs_dir, run_id)
                self._detached.record_end(folder)
                followed = FollowedRun(
                    folder, lambda: self.is_about_to_run(folder), lambda: is_starting(folder)
                )
                self._followed[run_id] = followed
            self._followed.move_to_end(run_id)
            while len(self._followed) > KEPT_RUNS:
                self._followed.popitem(last=False)
            return followed

    def is_about_to_run(self, folder: RunFolder) -> bool:
        """Returns whether the run has a process, either this one or its own; that process may not
        have taken the run's lock yet.
        """
        return self.active_id == folder.id or is_starting(folder)

    def name_of_run(self, run_id: str) -> str:
        """Returns the name under which a run is shown."""
        return shown_name(RunFolder(self.runs_dir / run_id))

    def runs(self) -> list[RunSummary]:
        """Returns every run, newest first; the folder is read at most once a second."""
        return self._list.runs()

    def runs_to_show(self, asked: Asked) -> RunsToShow:
        """Returns the runs that a page asks for; see `RunList.runs_to_show`."""
        return self._list.runs_to_show(asked)

    def scans(self, runs: Sequence[RunSummary]) -> tuple[dict[str, RunScan], bool]:
        """Returns what is known of these runs beyond their summaries, and whether that is all; see
        `RunList.scans`.
        """
        return self._list.scans(runs)

    @property
    def is_busy(self) -> bool:
        """Whether a run is active or waits to be started, so that another one waits."""
        return self.busy_id is not None or self.queue.waits

    def describe(
        self,
        run_id: str,
        name: str,
        note: str | None = None,
        tags: Sequence[str] | None = None,
    ) -> About:
        """Sets the name, the note and the tags of a run; its id stays, and so does what is None.
        Raises RunError if they cannot be stored.
        """
        folder = open_run(self.runs_dir, run_id)
        kept = read_about(folder.path)
        about = write_about(
            folder,
            name,
            kept.note if note is None else note,
            kept.tags if tags is None else tags,
        )
        self._list.forget()
        return about

    def delete(self, run_id: str) -> None:
        """Deletes a run with its record and checkpoints. Raises RunError while it is active."""
        if is_starting(find_run(self.runs_dir, run_id)):
            raise RunError(f"{self.name_of_run(run_id)} is starting; stop it first.")
        if run_id == self.served_id:
            raise RunError(f"{self.name_of_run(run_id)} is served; stop serving it first.")
        delete_run(self.runs_dir, run_id)
        with self._following:
            self._followed.pop(run_id, None)
        self._list.forget()

    def run_to_open(self) -> str | None:
        """Returns the id of the run that a page shows if its address names none: the active run, or
        else the newest.
        """
        busy = self.busy_id
        if busy is not None:
            return busy
        runs = self.runs()
        return runs[0].id if runs else None

    # ------------------------------------------------------------------ long work

    def export(self, run_id: str, folder: str, choice: ExportChoice = AS_CONFIGURED) -> Job:
        """Starts a job that exports the weights of a run that `choice` names as a Hugging Face
        folder. Raises RunError if no folder is given, and as `Jobs.start` does.
        """
        run = open_run(self.runs_dir, run_id)
        work = export_work(self.engine, run, folder, choice)
        return self.jobs.start(f"The export of {shown_name(run)}", work, about=run_id, unit=BYTES)

    def push(self, run_id: str, folder: str, repository: str, private: bool) -> Job:
        """Starts a job that uploads the exported `folder` to a repository of the hub. Raises
        RunError if a name is missing, and as `Jobs.start` does.
        """
        open_run(self.runs_dir, run_id)
        work = push_work(self.engine, folder, repository.strip(), private)
        return self.jobs.start(f"The push to {repository.strip()}", work, about=run_id, unit=BYTES)


@functools.lru_cache(maxsize=16)
def _has_several_gpus(config: TrainConfig) -> bool:
    return config.engine.gpus != 1
