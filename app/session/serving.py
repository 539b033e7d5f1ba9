"""The run whose model this server answers with to clients of OpenAI's API.

One run is served at a time, under two names: its own for the trained weights, and another for the
base model. The trained weights are loaded at the start, and those of the base model when they are
first asked for. Where both do not fit in memory together, the weights that are asked for take the
place of the others once these have finished their answers.

A run that begins or goes on needs the memory: serving ends then.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from app.session.engine_calls import ChatCalls, ChatEngine, ServedModel
from app.session.jobs import Job
from app.session.offered_weights import CURRENT, Choice, OfferedWeights
from app.session.session import Session
from engine.errors import FitError, RunError
from engine.runs.record.run_folder import open_run
from engine.runs.summaries.names import shown_name
from engine.tools.chat.conversation import Message, Sampling, Source

BASE_SUFFIX = "-base"
WAIT_SECONDS = 0.05
NOT_SERVED = "No model is served here; open a run's Export page and choose Start serving."


@dataclass(frozen=True)
class Served:
    """The run that is served, and where its weights come from by side: "tuned" and "base"."""

    run_id: str
    name: str
    began: int
    sources: dict[str, Source]
    is_borrowed: bool
    """Whether the run is paused in this process and answers itself."""

    def names(self) -> dict[str, str]:
        """Returns the name of each side, the trained model first."""
        return {"tuned": self.name, "base": f"{self.name}{BASE_SUFFIX}"}

    def side_of(self, model: str) -> str | None:
        """Returns the side that a client names, by the run's name or its id."""
        for name in (self.name, self.run_id):
            if model == name:
                return "tuned"
            if model == f"{name}{BASE_SUFFIX}":
                return "base"
        return None


class UnknownModel(RunError):
    """A model that is not served."""


@dataclass
class Lent:
    """A served model as Chat uses weights: they are not its own to close."""

    model: ServedModel
    held_bytes: int = field(default=0, init=False)

    @property
    def label(self) -> str:
        return self.model.label

    @property
    def prompt_builder(self) -> Any:
        return self.model.prompt_builder

    def slow_note(self) -> str:
        return self.model.slow_note()

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]:
        return self.model.answer(messages, sampling)

    def close(self) -> None:
        """Leaves the weights in memory, since clients use them."""


class Serving:
    """Serves one run. All methods may be called from any thread.

    A thread that loads or releases weights holds `_weights`, possibly for minutes. `_served` and
    `_models` are replaced as a whole, so readers need no lock.
    """

    def __init__(self, session: Session, engine: ChatCalls | None = None):
        self._session = session
        self._engine = engine or ChatCalls()
        self._offered = OfferedWeights(session, self._engine)
        self._weights = threading.RLock()
        self._served: Served | None = None
        self._models: dict[str, ServedModel] = {}
        self._job: Job | None = None
        self._late: dict[str, Job] = {}
        """Jobs that load weights for a client, by side; only the event loop has them."""
        self._ended = ""
        self._users: list[Callable[[], None]] = []
        session.call_before_runs(self._give_way)

    def call_before_changes(self, give_back: Callable[[], None]) -> None:
        """Registers `give_back`, which is called before weights come or go: it frees those of a
        chat, and leaves those that are lent to it.
        """
        self._users.append(give_back)

    # ------------------------------------------------------------------ what pages see

    def state(self) -> dict[str, Any]:
        """Returns which run is served, under which names, the job that loads its weights, and why
        none can be served where a run needs the machine.
        """
        served, job = self._served, self._job
        is_loading = job is not None and job.state == "working"
        return {
            "run_id": None if served is None else served.run_id,
            "name": "" if served is None else served.name,
            "models": [] if served is None else list(served.names().values()),
            "loading": job.to_dict() if job is not None and is_loading else None,
            "asked": sum(model.asked for model in self._models.values()),
            "note": self._ended,
            "slow": self.slow_note(),
            "refused": self._refusal(),
        }

    def _refusal(self) -> str:
        """Returns why no run can be served at the moment, or an empty text."""
        busy = self._offered.busy()
        return "" if busy is None else f"{busy.sentence} {busy.remedy}"

    def served(self) -> Served | None:
        """Returns the run that is served, if there is one."""
        return self._served

    def slow_note(self) -> str:
        """Returns a sentence where what is served answers without a cache, else ""."""
        return next(filter(None, (model.slow_note() for model in self._models.values())), "")

    # ------------------------------------------------------------------ start and end

    def start(self, run_id: str) -> Job:
        """Starts a job that loads the weights of a run, and serves them from then on; a run that
        was served until then is not any more. Raises RamstreamError where that cannot be.
        """
        paused = self._offered.paused_run()
        served = self._found(run_id)
        self._ended = ""
        self._job = self._session.jobs.start(
            f"Serving {served.name}", lambda job: self._begin(job, served, paused), about=run_id
        )
        return self._job

    def stop(self) -> None:
        """Ends all answers and frees the memory."""
        if self._job is not None:
            self._job.cancel()
        with self._weights:
            self._serve(None)
            self._close(self._taken(list(self._models)))

    def _found(self, run_id: str) -> Served:
        folder = open_run(self._session.runs_dir, run_id)
        name = shown_name(folder)
        value = self._offered.newest(run_id)
        if not value:
            raise RunError(f"{name} has no saved weights yet; save a checkpoint first.")
        sources = self._offered.sides(Choice(run_id, value), compare=True)
        return Served(run_id, name, int(time.time()), sources, is_borrowed=value == CURRENT)

    def _begin(self, job: Job, served: Served, paused: Any) -> str:
        with self._weights:
            self._serve(None)
            self._close(self._taken(list(self._models)))
            if paused is not None:
                # A run that goes on needs the machine for itself.
                paused.when_over("serve", self._give_back_to_run)
            self._load(job, served, "tuned", paused)
            self._serve(served)
        return ""

    def _serve(self, served: Served | None) -> None:
        self._served = served
        self._session.served_id = None if served is None else served.run_id

    def _give_way(self) -> None:
        """Ends serving, since a run needs the memory, and waits for that.

        It takes a thread of its own: a device discards the settings of the current thread, which
        may be the run's.
        """
        self._note_end()
        thread = threading.Thread(target=self.stop, name="serving-ends", daemon=True)
        thread.start()
        thread.join()

    def _give_back_to_run(self) -> None:
        """Ends serving on the thread of a paused run that goes on. What the device holds for
        answers of the run itself is freed on this thread, which has made it.
        """
        self._note_end()
        if self._job is not None:
            self._job.cancel()
        with self._weights:
            self._serve(None)
            borrowed = [side for side, model in self._models.items() if not model.held_bytes]
            self._close(self._taken(borrowed))
        self._give_way()

    def _note_end(self) -> None:
        served = self._served
        if served is not None:
            self._ended = f"{served.name} is no longer served, since a run needs the memory."

    # ------------------------------------------------------------------ weights

    def refuse_unknown(self, name: str) -> tuple[Served, str]:
        """Returns what is served and the side of it that a client names. Raises UnknownModel."""
        served = self._served
        side = None if served is None else served.side_of(name)
        if served is None or side is None:
            raise UnknownModel(_unknown(name, served))
        return served, side

    def model(self, name: str) -> ServedModel | None:
        """Returns the weights that a client names, or None while they have to be loaded, which this
        begins as soon as no other job is under way.

        The event loop calls this, again and again. Raises UnknownModel, and RunError with the
        reason if they could not be loaded.
        """
        served, side = self.refuse_unknown(name)
        model = self._models.get(side)
        if model is not None:
            return model
        job = self._late.get(side)
        if job is not None and job.state == "working":
            return None
        self._late.pop(side, None)
        if job is not None and job.state != "done":
            raise RunError(job.error or job.result)
        with contextlib.suppress(RunError):  # another job is under way
            self._job = self._late[side] = self._session.jobs.start(
                f"Loading {served.names()[side]}",
                lambda job: self._load_late(job, served, side),
                about=served.run_id,
            )
        return None

    def lend(self, source: Source) -> ChatEngine | None:
        """Returns weights that are served as Chat uses them, or None if they are not in memory."""
        served = self._served
        if served is None:
            return None
        for side, model in self._models.items():
            if served.sources.get(side) == source:
                return Lent(model)
        return None

    def _load_late(self, job: Job, served: Served, side: str) -> str:
        with self._weights:
            if self._served is served and side not in self._models:
                self._load(job, served, side, None)
        return ""

    def _load(self, job: Job, served: Served, side: str, paused: Any) -> None:
        """Loads the weights of one side, or borrows them from the paused run."""
        source = served.sources[side]
        job.stage(f"Loading the weights: {source.label}")
        self._give_back()
        if side == "tuned" and served.is_borrowed:
            if paused is None:
                raise RunError(f"{served.name} is no longer paused; start serving again.")
            chat_engine = self._engine.borrow(paused, source.config, source.label)
        else:
            self._make_room(job, source)
            chat_engine = self._engine.load(source, job.progress)
        self._models = {**self._models, side: self._engine.serve(chat_engine)}

    def _make_room(self, job: Job, source: Source) -> None:
        """Checks the memory. Where weights of the other side leave too little, they go once their
        answers are over; from then on, requests for them wait.

        Raises FitError if these weights do not fit even alone.
        """
        try:
            self._engine.fit_together([source])
            return
        except FitError:
            leaving = self._taken([side for side, each in self._models.items() if each.held_bytes])
            if not leaving:
                raise
        try:
            while any(model.asked for model in leaving):
                job.check()
                time.sleep(WAIT_SECONDS)
        finally:
            self._close(leaving)
        self._engine.fit_together([source])

    def _taken(self, sides: list[str]) -> list[ServedModel]:
        """Removes models from those that answer, and returns them."""
        taken = [self._models[side] for side in sides]
        self._models = {side: each for side, each in self._models.items() if side not in sides}
        return taken

    def _close(self, models: list[ServedModel]) -> None:
        if models:
            self._give_back()
        for model in models:
            model.close()

    def _give_back(self) -> None:
        for give_back in self._users:
            give_back()


def _unknown(name: str, served: Served | None) -> str:
    if served is None:
        return NOT_SERVED
    first, second = served.names().values()
    return f"The model {name[:80]} is not served here; there are {first} and {second}."
