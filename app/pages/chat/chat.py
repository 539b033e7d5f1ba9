"""The one chat of Chat, which the server keeps, so that it outlives a page.

A message is handled like this:

- `Chat.send` adds it to the chat and starts a job.
- The job releases the weights that this message does not need, and loads those that are missing:
  both sides together if they fit, or else one side after the other.
- Both sides draw one token each in turn, and each token is added to the state that pages read.
- Weights that are served to other programs answer here, too, and are not loaded again.
- The weights stay in memory until they were idle for `IDLE_SECONDS`, or a run begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from app.labels import in_bytes
from app.pages.chat.loaded_weights import LoadedWeights
from app.pages.chat.turns import Answer, Turn, history
from app.session.engine_calls import ChatCalls, ChatEngine
from app.session.jobs import Cancelled, Job
from app.session.offered_weights import CURRENT, Choice, OfferedWeights
from app.session.serving import Serving
from app.session.session import Session
from engine.errors import DataError, FitError, ModelError, RamstreamError, RunError
from engine.tools.chat.conversation import Message, Sampling, Source, take_turns

IDLE_SECONDS = 600
GIVE_UP_SECONDS = 30
"""Seconds that a beginning run waits at most for the end of the current answer."""
MOST_TURNS = 200


class Chat:
    """The chat of the server. All methods may be called from any thread.

    There are two locks. A thread that loads, uses or releases weights holds `_weights`, possibly
    for minutes. A thread that reads or changes the state that pages see holds `_state` briefly.
    """

    def __init__(
        self, session: Session, engine: ChatCalls | None = None, serving: Serving | None = None
    ):
        self._session = session
        self._lend = serving.lend if serving is not None else _lends_nothing
        if serving is not None:
            serving.call_before_changes(self.release)
        self._engine = engine or ChatCalls()
        self._state = threading.RLock()
        self._weights = threading.RLock()
        self._offered = OfferedWeights(session, self._engine)
        self._loaded = LoadedWeights(self._engine, self._changing)
        self._turns: list[Turn] = []
        self._choice: Choice | None = None
        self._job: Job | None = None
        self._note = ""
        self._error = ""
        self._server = time.time_ns() // 1_000_000
        """Start of this server, which distinguishes its versions from those of an earlier one."""
        self._version = self._server
        """Number of the state, incremented by each change. It starts from the clock, so that
        versions of an earlier server are lower.
        """
        self._begun = self._version
        """Version with which the latest turn began."""
        self._idle: threading.Timer | None = None
        session.call_before_runs(self.release)
        session.call_for_memory(self.release)

    # ------------------------------------------------------------------ what pages see

    def state(self, since: int = 0) -> dict[str, Any]:
        """Returns the whole state, or only its version if the page already has that version.

        The turns from `first` on are returned: a page that has seen the latest turn begin already
        has all earlier ones.
        """
        with self._state:
            job = self._job if self._job is not None and self._job.state == "working" else None
            if since == self._version and job is None:
                return {"server": self._server, "version": self._version, "working": False}
            first = max(0, len(self._turns) - 1) if since >= self._begun else 0
            held = self._loaded.held_bytes()
            return {
                "server": self._server,
                "version": self._version,
                "working": job is not None,
                "note": self._note,
                "error": self._error,
                "job_id": job.id if job is not None else None,
                "job": job.to_dict() if job is not None and self._note else None,
                "choice": vars(self._choice) if self._choice is not None else None,
                "loaded": self._loaded.labels(),
                "held": in_bytes(held) if held else "",
                "lent": self._loaded.are_lent(),
                "slow": self._loaded.slow_note(),
                "first": first,
                "turns": [turn.to_dict() for turn in self._turns[first:]],
            }

    def choices(self) -> dict[str, Any]:
        """Returns the runs with weights that can answer, the active run and that of the chat among
        them in any case, why none can now (`busy`) with the run to `pause` for a chat, and the
        limits of a chat.
        """
        busy = self._offered.busy()
        with self._state:
            choice = self._choice
        return {
            "runs": self._offered.runs(kept="" if choice is None else choice.run_id),
            "busy": "" if busy is None else busy.sentence,
            "pause": "" if busy is None else busy.run_id,
            "most_turns": MOST_TURNS,
            "idle_minutes": IDLE_SECONDS // 60,
        }

    def about(self, choice: Choice) -> dict[str, Any]:
        """Returns the prompt format of these weights and what they support. Raises RamstreamError
        if they cannot be used.
        """
        tuned = self._offered.sides(choice, compare=False)["tuned"]
        try:
            prompt_builder = self._engine.prompt_builder_of(tuned.config)
        except ModelError as error:
            raise ModelError(_without_setting(str(error))) from error
        return {
            "label": tuned.label,
            "template": prompt_builder.has_template,
            "system": prompt_builder.takes_system,
            "base": not choice.folder,
            "longest": prompt_builder.longest,
        }

    # ------------------------------------------------------------------ requests

    def send(
        self, choice: Choice, message: str, compare: bool, system: str, sampling: Sampling
    ) -> None:
        """Adds a message to the chat, or to a new chat if `choice` differs, and starts its answer.

        Raises RamstreamError if no weights can answer. Later problems are reported in the state.
        """
        if not message.strip():
            raise RunError("The message is empty; type something to say.")
        self._offered.paused_run()
        sides = self._offered.sides(choice, compare)
        with self._state:
            continues = choice == self._choice
            if continues and len(self._turns) >= MOST_TURNS:
                raise RunError(
                    f"This chat has {MOST_TURNS} messages, which is the most; begin a new one."
                )
            turn = Turn(message, {side: Answer(source.label) for side, source in sides.items()})
            question = _Question(choice, sides, turn, system, sampling)
            self._job = self._session.jobs.start(
                "The answer in Chat", lambda job: self._work(job, question)
            )
            self._choice = choice
            self._note = ""
            self._begin_turn([*self._turns, turn] if continues else [turn])

    def stop(self) -> None:
        """Ends the current answer; the text so far stays."""
        with self._state:
            if self._job is not None:
                self._job.cancel()

    def new_chat(self) -> None:
        """Deletes the conversation; the weights stay in memory."""
        self.stop()
        with self._state:
            self._begin_turn([])

    def release(self) -> None:
        """Ends the current answer and releases the memory of the weights.

        It waits for both, for at most `GIVE_UP_SECONDS`.
        """
        self.stop()
        # This needs a thread of its own: a device discards the settings of the current thread,
        # which may be the run's.
        thread = threading.Thread(
            target=self._release, args=(GIVE_UP_SECONDS,), name="chat-release", daemon=True
        )
        thread.start()
        thread.join(GIVE_UP_SECONDS)

    def _release(self, patience: float) -> None:
        """Releases all weights, unless they stay in use for longer than `patience` seconds."""
        if self._weights.acquire(timeout=patience):
            try:
                self._loaded.give_back_all()
            finally:
                self._weights.release()

    # ------------------------------------------------------------------ the job

    def _work(self, job: Job, question: _Question) -> str:
        with self._state:  # `send` holds it until the turn is in the chat
            turns = self._turns
            heard = {
                side: history(turns, question.turn, side, question.system)
                for side in question.sides
            }
        try:
            with self._weights:
                self._rest(None)
                self._answer(job, question, heard)
        except Cancelled:
            pass  # `job.check` below raises it again once the turn has ended
        except FitError as error:
            self._report(error=f"{error}{self._what_is_served()}")
        except RamstreamError as error:
            self._report(error=_without_setting(str(error)))
        finally:
            self._end(question.turn)
            self._rest(IDLE_SECONDS)
        job.check()
        return ""

    def _what_is_served(self) -> str:
        """Returns a sentence on the run whose weights are in memory for other programs, if any."""
        served = self._session.served_id
        if served is None:
            return ""
        return f" {self._session.name_of_run(served)} is served to programs and takes memory, too."

    def _answer(self, job: Job, question: _Question, heard: dict[str, list[Message]]) -> None:
        """Makes all sides answer, at the same time if their weights fit in memory together."""
        paused = self._offered.paused_run()
        sides = question.sides
        self._loaded.give_back_others(sides)
        to_load = {
            side: source
            for side, source in sides.items()
            if not question.is_borrowed(side) and self._lend(source) is None
        }
        fits = self._loaded.make_room(to_load)
        if fits or len(sides) == 1:
            self._load(job, question, list(sides), paused)
            self._write(job, question, heard)
            return
        for side, source in sides.items():
            self._loaded.give_back_others({side: source})
            self._load(job, question, [side], paused)
            self._write(job, question, {side: heard[side]})
        self._report(
            note="Both do not fit in memory at once, so they answered one after the other."
        )

    def _load(self, job: Job, question: _Question, sides: list[str], paused: Any) -> None:
        """Loads the weights of these sides into memory, unless they are already there."""
        for side in sides:
            if self._loaded.has(side):
                continue
            lent = self._lend(question.sides[side])
            if lent is not None:
                self._loaded.keep(side, question.sides[side], lent)
            elif question.is_borrowed(side):
                self._borrow(question, side, paused)
            else:
                self._load_side(job, side, question.sides[side])
            if paused is not None:
                # A run that continues needs the machine for itself.
                paused.when_over("chat", self.release)
            job.check()
        self._report(note="")

    def _borrow(self, question: _Question, side: str, paused: Any) -> None:
        if paused is None:
            raise RunError(
                "This run is no longer paused; choose one of its checkpoints, or pause it again."
            )
        self._loaded.borrow(side, question.sides[side], paused)

    def _load_side(self, job: Job, side: str, source: Source) -> None:
        self._report(note=f"Loading the weights: {source.label}")
        job.stage(f"Loading the weights: {source.label}")
        try:
            self._loaded.load(side, source, job.progress)
        except Cancelled:
            # Weights of the other side were loaded for this answer, too.
            self._loaded.give_back_all()
            raise
        job.stage("Writing")

    def _write(self, job: Job, question: _Question, heard: dict[str, list[Message]]) -> None:
        """Draws the answers of the sides in `heard`, one token of each in turn."""
        ids: dict[str, list[int]] = {side: [] for side in heard}
        answers = question.turn.answers

        def on_token(side: str, token: int) -> None:
            ids[side].append(token)
            text = self._loaded.text(side, ids[side])
            with self._changing():
                answers[side].write(text, len(ids[side]))

        tokens: dict[str, Generator[int, None, None]] = {}
        for side, messages in heard.items():
            drawn = self._loaded.answer(side, messages, question.sampling)
            tokens[side] = self._timed(answers[side], drawn)
        take_turns(tokens, on_token, lambda: job.is_cancelled)

    def _timed(
        self, answer: Answer, tokens: Generator[int, None, None]
    ) -> Generator[int, None, None]:
        """Yields `tokens` and records in `answer` how long each takes.

        If the conversation cannot be put to this side, only its own answer ends.
        """
        with contextlib.closing(tokens):
            while True:
                began = time.perf_counter()
                try:
                    token = next(tokens, None)
                except DataError as error:
                    with self._changing():
                        answer.fail(str(error))
                    return
                with self._changing():
                    answer.count_draw(time.perf_counter() - began, is_last=token is None)
                if token is None:
                    return
                yield token

    def _end(self, turn: Turn) -> None:
        with self._changing():
            for answer in turn.answers.values():
                answer.stop()

    # ------------------------------------------------------------------ the state

    def _begin_turn(self, turns: list[Turn]) -> None:
        """Sets the turns of the chat, the last of which begins now. The caller holds `_state`."""
        with self._changing():
            self._turns = turns
            self._error = ""
        self._begun = self._version

    def _report(self, note: str | None = None, error: str | None = None) -> None:
        with self._changing():
            if note is not None:
                self._note = note
            if error is not None:
                self._error = error

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        """Holds the lock of the state while its body changes the state, then increments the
        version.
        """
        with self._state:
            yield
            self._version += 1

    def _rest(self, seconds: float | None) -> None:
        """Releases the weights after this many seconds without an answer, or on request only if
        None.
        """
        with self._state:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = None
            if seconds is not None and self._loaded.labels():
                # It does not wait for the lock: a thread that uses the weights then restarts the
                # timer.
                self._idle = threading.Timer(seconds, self._release, args=(0,))
                self._idle.daemon = True
                self._idle.start()


def _lends_nothing(_: Source) -> ChatEngine | None:
    return None


@dataclass(frozen=True)
class _Question:
    """A message with the sides to ask and the turn that gets their answers."""

    choice: Choice
    sides: dict[str, Source]
    turn: Turn
    system: str
    sampling: Sampling

    def is_borrowed(self, side: str) -> bool:
        """Returns whether the paused run itself answers for `side`, so that nothing is loaded."""
        return side == "tuned" and self.choice.weights == CURRENT


def _without_setting(sentence: str) -> str:
    """Returns a sentence on the model without the name of its setting, which no chat shows."""
    rest = sentence.removeprefix("model.source: ")
    return rest[:1].upper() + rest[1:]
