"""`Session`: what the server owns. It runs at most one run, in a worker thread that no tab can end,
starts others in processes of their own or in turn, follows the runs of other processes, and passes
requests on to whichever process a run belongs to.
"""

from __future__ import annotations

import secrets
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from app.session.detached import PROCESS_FILE, DetachedRuns, is_starting, request_when_started
from app.session.engine_calls import EngineCalls, Run
from app.session.jobs import BYTES, Job, Jobs
from app.session.queue import RunQueue
from app.view.run_watch import Watch
from engine.checkpoints.checkpoint import folders_by_step
from engine.config.changes import CHANGE, Change
from engine.config.settings import TrainConfig
from engine.errors import RunError
from engine.paths import named_folder
from engine.runs.about import About, write_about
from engine.runs.control import COMMANDS
from engine.runs.folder import RUN_ID, RunFolder, delete_run, open_run
from engine.runs.listing import RunSummary, list_runs, summarise

KEPT_WATCHES = 8
LIST_SECONDS = 1.0
ENDED_BY_A_PERSON = ("stopped", "discarded")
ENDED_AS_ASKED = {"stop": "stopped", "discard": "discarded"}


@dataclass(frozen=True)
class _Listing:
    """The runs, newest first, and the ids of those with weights that answer. `moment` is the
    session's when they began to be read, `read_at` the monotonic time at which they were.
    """

    moment: object
    read_at: float
    runs: list[RunSummary]
    can_talk: frozenset[str]


class Session:
    """All methods may be called from any thread."""

    def __init__(self, runs_dir: Path, engine: EngineCalls | None = None):
        self.runs_dir = runs_dir
        self.engine = engine or EngineCalls()
        self.server_id = secrets.token_hex(6)
        """New with each server, so that a page notices that it talks to another one."""
        self.jobs = Jobs()
        self._detached = DetachedRuns()
        self._before_runs: list[Callable[[], None]] = []
        self.was_opened = threading.Event()
        """Set once a page was."""
        self._launching = threading.Lock()
        self._watching = threading.Lock()
        self._active: Run | None = None
        self._worker: threading.Thread | None = None
        self._watches: OrderedDict[str, Watch] = OrderedDict()
        self._listing = threading.Lock()
        self._moment = object()
        """Another one with each change, so that a list that was being read meanwhile is known to be
        old.
        """
        self._listed: _Listing | None = None
        self._elsewhere: tuple[float, str | None] = (-LIST_SECONDS, None)
        self.queue = RunQueue(
            runs_dir,
            self._start_queued,
            self.why_not_start,
            self._running_elsewhere,
            self._went_its_way,
        )

    # ------------------------------------------------------------------ the run of this process

    def call_before_runs(self, give_back: Callable[[], None]) -> None:
        """Have this called before a run begins: it gives back memory that somebody can do without."""
        self._before_runs.append(give_back)

    def _free_memory(self) -> None:
        for give_back in self._before_runs:
            give_back()

    @property
    def active_id(self) -> str | None:
        """The run that this process is running."""
        run = self._active
        return run.id if run is not None else None

    @property
    def active_run(self) -> Run | None:
        """The same, itself."""
        return self._active

    @property
    def busy_id(self) -> str | None:
        """The run that is going on, here or in another process; looked up again at most once a
        second.
        """
        looked_at, run_id = self._elsewhere
        if self._active is None and time.monotonic() - looked_at >= LIST_SECONDS:
            run_id = self._running_elsewhere()
        return self.active_id or run_id

    @property
    def preparing_elsewhere(self) -> str | None:
        """The run of another process that is being prepared, which takes its memory by and by."""
        run_id = self.busy_id
        if run_id is None or run_id == self.active_id:
            return None
        return next(
            (run.id for run in self.runs() if run.id == run_id and run.state == "preparing"), None
        )

    def why_not_start(self) -> str | None:
        """The sentence that stands beside a Start that cannot be pressed, or None."""
        run = self._active
        if run is not None:
            return (
                f"{run.id} is running here, and one run at a time is possible: stop it or let it "
                "finish."
            )
        run_id = self._running_elsewhere()
        return (
            f"{run_id} is running in a process of its own, and one run at a time is possible: stop "
            "it or let it finish."
            if run_id is not None
            else None
        )

    def _running_elsewhere(self) -> str | None:
        """The run of this folder that another process holds or is about to hold. Not cached: Start
        depends on it.
        """
        found = next(
            (folder.id for folder in self._folders() if folder.is_running() or is_starting(folder)),
            None,
        )
        self._elsewhere = (time.monotonic(), found)
        return found

    def _folders(self) -> list[RunFolder]:
        """Newest first, as they are likeliest to be going on."""
        try:
            names = sorted(
                (
                    path.name
                    for path in self.runs_dir.iterdir()
                    if RUN_ID.fullmatch(path.name) and path.is_dir()
                ),
                reverse=True,
            )
        except OSError:
            return []
        return [RunFolder(self.runs_dir / name) for name in names]

    def start(self, config: TrainConfig) -> str:
        """Start a run and return its id at once. Raises RunError when one is running, and what
        `start_run` raises.
        """
        return self._launch(lambda: self.engine.start_run(config, self.runs_dir))

    def start_detached(self, config: TrainConfig) -> str:
        """Start a run in a process of its own, which goes on when this one ends; its id, at once.
        Raises like `start`.
        """
        with self._launching:
            reason = self.why_not_start()
            if reason is not None:
                raise RunError(reason)
            self._free_memory()
            run_id = self._detached.start(config, self.runs_dir, self._has_ended)
            self._look_again()
            return run_id

    def _start_queued(self, config: TrainConfig, detached: bool) -> str:
        return self.start_detached(config) if detached else self.start(config)

    def _went_its_way(self, run_id: str) -> bool:
        """Whether a run of another process that is over ended by itself, well or not, rather than
        by a person.
        """
        folder = RunFolder(self.runs_dir / run_id)
        self._detached.settle(folder)
        run = summarise(folder)
        return run is not None and run.state not in ENDED_BY_A_PERSON

    def resume(self, run_id: str) -> str:
        """Continue a stopped, failed or interrupted run; returns at once, raises like `start`."""
        return self._launch(lambda: self.engine.resume_run(self.runs_dir, run_id), run_id)

    def _launch(self, make: Callable[[], Run], run_id: str | None = None) -> str:
        with self._launching:
            if run_id is not None and self.active_id == run_id:  # somebody else was quicker
                return run_id
            reason = self.why_not_start()
            if reason is not None:
                raise RunError(reason)
            run = self._active = make()
            self._worker = threading.Thread(
                target=self._work, args=(run,), name=f"run-{run.id}", daemon=True
            )
            try:
                self._worker.start()
            except RuntimeError:  # the system gives no further thread
                self._active = self._worker = None
                run.close()
                if run_id is None:
                    delete_run(self.runs_dir, run.id)  # a folder without a record is no run
                raise RunError(
                    "The run cannot be started: the system allows this program no further thread. "
                    "End other programs and try again."
                ) from None
            finally:
                self._look_again()
            return run.id

    def _look_again(self) -> None:
        """A run began or ended: what is remembered of the folder is old."""
        self._forget_listed()
        self._elsewhere = (-LIST_SECONDS, None)

    def _forget_listed(self) -> None:
        self._moment = object()

    def _has_ended(self) -> None:
        self._look_again()
        self.queue.look()

    def _work(self, run: Run) -> None:
        try:
            self._free_memory()
            run.execute()
        # another process has taken the run in the meantime: its record is not ours to write
        except RunError as error:
            print(error, file=sys.stderr, flush=True)
        finally:
            self._active = None
            self._has_ended()

    def close(self) -> None:
        """Stop and save the active run, and wait for it; what is queued stays queued. A
        KeyboardInterrupt ends the wait.
        """
        self.queue.close()
        run, worker = self._active, self._worker
        if run is not None and worker is not None:
            run.request("stop")
            while worker.is_alive():
                worker.join(timeout=0.2)

    # ------------------------------------------------------------------ any run

    def request(self, run_id: str, command: str | Change, seen: str = "") -> str:
        """Ask a run to stop, discard, pause, resume or save, or for a change. A run that is over or
        interrupted is resumed as a new session of this process. `seen`: the state in which it was
        when somebody asked, if that is known.

        Several may ask at once: what another has asked for already is no error. Raises RunError
        when nobody would obey. Returns the run's id.
        """
        folder, watch = open_run(self.runs_dir, run_id), self.watch(run_id)
        taken = (
            watch.snapshot.requests_taken
        )  # a page may read that the command was taken as soon as it is sent
        run = self._active
        if run is not None and run.id == run_id:
            run.request(command)
        elif command == "resume" and not self._goes_on(folder):
            if seen in (
                "paused",
                "pausing",
            ):  # meant was the pause; whoever ended the run meanwhile would see it come back
                raise RunError(
                    f"Run {run_id} is no longer paused: somebody has ended it. Press Resume again "
                    "to go on with it from what it saved."
                )
            return self.resume(run_id)
        else:
            try:
                request_when_started(folder, command)
            except RunError:
                if self._goes_on(folder) or (isinstance(command, str) and command not in COMMANDS):
                    raise
                self._refuse_unless_done(folder, command)
                return run_id
        watch.note_request(CHANGE if isinstance(command, Change) else command, taken)
        return run_id

    @staticmethod
    def _goes_on(folder: RunFolder) -> bool:
        return folder.is_running() or is_starting(folder)

    @staticmethod
    def _refuse_unless_done(folder: RunFolder, command: str | Change) -> None:
        """What was asked of a run that is over. Raises RunError, which says how it ended, unless
        that is what was asked.
        """
        run = summarise(folder)
        if run is None:
            raise RunError(f"Run {folder.id} was deleted meanwhile.")
        asked = CHANGE if isinstance(command, Change) else command
        if run.state == "interrupted":
            raise RunError(
                f"Run {folder.id} is not running, so it cannot {asked}: its program ended. Resume "
                "goes on with it."
            )
        if ENDED_AS_ASKED.get(asked) != run.state:
            raise RunError(f"Run {folder.id} has ended already. {run.reason}".rstrip())

    def change(self, run_id: str, change: Change) -> str:
        """Ask a run that is going on for a change of its settings. Raises RunError for values that
        it would refuse.
        """
        change.applied(open_run(self.runs_dir, run_id).config, self.watch(run_id).snapshot.step)
        return self.request(run_id, change)

    def watch(self, run_id: str) -> Watch:
        """What follows this run, shared by all who look at it. Raises RunError when there is no
        such run.
        """
        with self._watching:
            watch = self._watches.get(run_id)
            if watch is None or not watch.folder.path.is_dir():
                folder = open_run(self.runs_dir, run_id)
                self._detached.settle(folder)
                watch = self._watches[run_id] = Watch(folder, lambda: self.is_about_to_run(folder))
            self._watches.move_to_end(run_id)
            while len(self._watches) > KEPT_WATCHES:
                self._watches.popitem(last=False)
            return watch

    def is_about_to_run(self, folder: RunFolder) -> bool:
        """Whether it has a process, this one or its own, which may not have taken its lock yet."""
        return self.active_id == folder.id or is_starting(folder)

    def runs(self) -> list[RunSummary]:
        """Every run, newest first; read again at most once a second."""
        return self._list().runs

    def runs_to_show(self) -> list[tuple[RunSummary, bool]]:
        """The same, each with whether it has weights to talk to."""
        listed = self._list()
        return [(run, run.id in listed.can_talk) for run in listed.runs]

    def _list(self) -> _Listing:
        with (
            self._listing
        ):  # who asks while it is read waits for it, rather than reading every run once more
            listed, moment = self._listed, self._moment
            if (
                listed is None
                or listed.moment is not moment
                or time.monotonic() - listed.read_at >= LIST_SECONDS
            ):
                runs = [
                    run for run in map(self._as_it_is, list_runs(self.runs_dir)) if run is not None
                ]
                can_talk = frozenset(run.id for run in runs if self._can_talk(run))
                listed = self._listed = _Listing(moment, time.monotonic(), runs, can_talk)
            return listed

    def _as_it_is(self, run: RunSummary) -> RunSummary | None:
        """A run whose own process is still starting has no lock yet; one whose process ended before
        that has failed.
        """
        folder = RunFolder(Path(run.path))
        if run.state != "interrupted" or not (folder.path / PROCESS_FILE).is_file():
            return run
        if is_starting(folder):
            return replace(run, state="preparing")
        self._detached.settle(folder)
        return summarise(folder)

    def _can_talk(self, run: RunSummary) -> bool:
        """Whether it has weights that answer: a checkpoint, an export, or its own while it is
        paused here.
        """
        if run.state == "paused" and run.id == self.active_id:
            return True
        folder = RunFolder(Path(run.path))
        try:
            return (folder.export_path / "config.json").exists() or bool(
                folders_by_step(folder.checkpoints_path)
            )
        except (
            OSError
        ):  # deleted meanwhile, or not ours to read: the others are listed all the same
            return False

    def describe(self, run_id: str, name: str, note: str) -> About:
        """Give a run a name and a note; its id stays. Raises RunError for what cannot be kept."""
        about = write_about(open_run(self.runs_dir, run_id), name, note)
        self._forget_listed()
        return about

    def delete(self, run_id: str) -> None:
        """Delete a run with its record and checkpoints. Raises RunError while it is going on."""
        if is_starting(open_run(self.runs_dir, run_id)):
            raise RunError(f"The process of run {run_id} is just starting; stop it first.")
        delete_run(self.runs_dir, run_id)
        with self._watching:
            self._watches.pop(run_id, None)
        self._forget_listed()

    def run_to_open(self) -> str | None:
        """The run that a page shows when its address names none: the active one, else the newest."""
        busy = self.busy_id
        runs = self.runs() if busy is None else []
        return busy or (runs[0].id if runs else None)

    # ------------------------------------------------------------------ long work

    def export(self, run_id: str, folder: str, checkpoint: int | None = None) -> Job:
        """Write a run's weights as a Hugging Face folder."""
        open_run(self.runs_dir, run_id)
        if not folder.strip():
            raise RunError("No folder is given; name the folder to write the model to.")
        target = named_folder(folder.strip())

        def work(job: Job) -> str:
            job.stage("Opening the run", BYTES)
            found = self.engine.export_run(
                self.runs_dir, run_id, target, checkpoint=checkpoint, progress=job.progress
            )
            return " ".join(
                [f"Exported the model of step {found.step:,} to {target}.", *found.skipped]
            )

        return self.jobs.start(f"The export of {run_id}", work, about=run_id, unit=BYTES)
