"""The chat of the Talk tab: which weights are in memory, the conversation, and the answer under
way. There is one chat, and it is kept here, so that it outlives a page.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.session.engine_calls import TalkCalls, Talker
from app.session.jobs import Cancelled, Job
from app.session.session import Session
from app.words import in_bytes
from engine.checkpoints.checkpoint import folders_by_step
from engine.errors import DataError, FitError, RamstreamError, RunError
from engine.runs.folder import open_run
from engine.talk.conversation import Message, Sampling, Source, base_of, checkpoint_of, take_turns

IDLE_SECONDS = 600
GIVE_UP_SECONDS = 30
"""How long a run that begins waits for the answer under way to end."""
MOST_TURNS = 200
CURRENT = "current"


@dataclass(frozen=True)
class Choice:
    """What a person talks to: weights of a run ("current" of a paused one, "newest", "step-N",
    "export"), or a folder.
    """

    run_id: str = ""
    weights: str = "newest"
    folder: str = ""


@dataclass
class Answer:
    """Of one side; `state` is waiting, writing, done, stopped or failed, which `problem` explains.
    `weights` says which ones answered.
    """

    weights: str
    text: str = ""
    state: str = "waiting"
    problem: str = ""
    tokens: int = 0
    draws: int = 0
    seconds: float = 0.0
    """That `draws` tokens took; the first, which waits for the whole conversation to be read, is
    not counted.
    """

    def write(self, text: str, tokens: int) -> None:
        """The answer so far, of so many tokens."""
        self.text, self.tokens = text, tokens

    def count_draw(self, seconds: float, is_last: bool) -> None:
        """A token was drawn in `seconds`, or, where it is the last draw, the answer's end was."""
        if self.state == "writing":
            self.draws += 1
            self.seconds += seconds
        self.state = "done" if is_last else "writing"

    def fail(self, problem: str) -> None:
        self.state, self.problem = "failed", problem

    def stop(self) -> None:
        """Nothing more comes; one that is over stays as it is."""
        if self.state in ("waiting", "writing"):
            self.state = "stopped"

    def to_dict(self) -> dict[str, Any]:
        rate = f"{self.draws / self.seconds:,.1f} tokens/s" if self.seconds > 0 else ""
        return {
            "weights": self.weights,
            "text": self.text,
            "state": self.state,
            "problem": self.problem,
            "tokens": self.tokens,
            "rate": rate,
        }


@dataclass
class Turn:
    message: str
    answers: dict[str, Answer] = field(default_factory=dict)


class Talk:
    """All methods may be called from any thread. Whoever uses weights or gives them back holds
    `_weights`.
    """

    def __init__(self, session: Session, engine: TalkCalls | None = None):
        self._session, self._engine = session, engine or TalkCalls()
        self._state, self._weights = threading.RLock(), threading.RLock()
        self._turns: list[Turn] = []
        self._choice: Choice | None = None
        self._job: Job | None = None
        self._talkers: dict[str, Talker] = {}
        self._sources: dict[str, Source] = {}
        self._note = self._error = ""
        self._version = self._begun = time.time_ns() // 1_000_000
        """Counted on from the clock, so that what a page saw of an earlier server is older.
        `_begun`: with the last turn.
        """
        self._idle: threading.Timer | None = None
        session.call_before_runs(self.release)

    # ------------------------------------------------------------------ what pages see

    def state(self, since: int = 0) -> dict[str, Any]:
        """Everything that is shown, or the version alone where a page has seen it. Of the turns,
        those from `first` on: a page that has seen the last one begin has all others.
        """
        with self._state:
            job = self._job
            working = job is not None and job.state == "working"
            version = self._version
            if since == version and not working:
                return {"version": version, "working": False}
            first = max(0, len(self._turns) - 1) if since >= self._begun else 0
            return {
                "version": version,
                "working": working,
                "note": self._note,
                "error": self._error,
                "job_id": job.id if working else None,
                "job": job.to_dict() if working and self._note else None,
                "choice": vars(self._choice) if self._choice is not None else None,
                "loaded": [talker.label for talker in self._talkers.values()],
                "held": in_bytes(held)
                if (held := sum(t.held_bytes for t in self._talkers.values()))
                else "",
                "first": first,
                "turns": [
                    {
                        "message": turn.message,
                        "answers": {
                            side: answer.to_dict() for side, answer in turn.answers.items()
                        },
                    }
                    for turn in self._turns[first:]
                ],
            }

    def choices(self) -> dict[str, Any]:
        """Runs that have weights to talk to, newest first, each with these weights, and the
        greatest number of tokens.
        """
        runs = []
        for run in self._session.runs():
            weights = self._weights_of(run.id)
            if weights:
                runs.append(
                    {
                        "id": run.id,
                        "name": run.name,
                        "model": run.model,
                        "weights": [
                            {"value": value, "label": label} for value, label in weights.items()
                        ],
                    }
                )
        return {"runs": runs, "most_turns": MOST_TURNS, "idle_minutes": IDLE_SECONDS // 60}

    def about(self, choice: Choice) -> dict[str, Any]:
        """How these weights are spoken to. Raises RamstreamError where they cannot be."""
        voice = self._engine.voice_of(self._sides(choice, False)["tuned"].config)
        return {
            "template": voice.has_template,
            "system": voice.takes_system,
            "base": not choice.folder,
            "longest": voice.longest,
        }

    # ------------------------------------------------------------------ requests

    def say(
        self, choice: Choice, message: str, compare: bool, system: str, sampling: Sampling
    ) -> None:
        """Add a message to the chat, a new one where `choice` differs, and have it answered. Raises
        RamstreamError where nobody can answer; what goes wrong later is in the state.
        """
        if not message.strip():
            raise RunError("The message is empty; type something to say.")
        sides = self._sides(choice, compare)
        with self._state:
            if choice == self._choice and len(self._turns) >= MOST_TURNS:
                raise RunError(
                    f"This chat has {MOST_TURNS} messages, which is the most; begin a new one."
                )
            turn = Turn(message, {side: Answer(weights.label) for side, weights in sides.items()})
            self._job = self._session.jobs.start(
                "The answer in Talk",
                lambda job: self._work(job, choice, sides, turn, system, sampling),
            )
            self._turns = [*self._turns, turn] if choice == self._choice else [turn]
            self._choice, self._note, self._error = choice, "", ""
            self._changed()
            self._begun = self._version

    def stop(self) -> None:
        """End the answer under way; what was written stays."""
        with self._state:
            if self._job is not None:
                self._job.cancel()

    def new_chat(self) -> None:
        """Forget the conversation; the weights stay in memory."""
        self.stop()
        with self._state:
            self._turns, self._error = [], ""
            self._changed()
            self._begun = self._version

    def release(self) -> None:
        """End the answer under way and give the weights' memory back. Waits for both, but not for
        ever.
        """
        self.stop()
        # A thread of its own: a device gives up what its thread was told, and this one may be a
        # run's.
        thread = threading.Thread(
            target=self._release, args=(GIVE_UP_SECONDS,), name="talk-release", daemon=True
        )
        thread.start()
        thread.join(GIVE_UP_SECONDS)

    def _release(self, patience: float) -> None:
        if self._weights.acquire(timeout=patience):
            try:
                self._give_back(self._talkers)
            finally:
                self._weights.release()

    # ------------------------------------------------------------------ the job

    def _work(
        self,
        job: Job,
        choice: Choice,
        sides: dict[str, Source],
        turn: Turn,
        system: str,
        sampling: Sampling,
    ) -> str:
        with self._state:  # the turn is in the chat from here on
            history = {side: self._history(side, turn, system) for side in sides}
        try:
            with self._weights:
                self._rest(None)
                self._answer(job, choice, sides, turn, history, sampling)
        except Cancelled:
            pass
        except RamstreamError as error:
            self._tell(error=str(error))
        finally:
            self._end(turn)
            self._rest(IDLE_SECONDS)
        job.check()
        return ""

    def _answer(
        self,
        job: Job,
        choice: Choice,
        sides: dict[str, Source],
        turn: Turn,
        history: dict[str, list[Message]],
        sampling: Sampling,
    ) -> None:
        paused = self._paused()
        self._give_back(
            {
                side: talker
                for side, talker in self._talkers.items()
                if sides.get(side) != self._sources[side]
            }
        )
        together = self._fit(
            {
                side: source
                for side, source in sides.items()
                if side == "base" or choice.weights != CURRENT
            }
        )
        groups = [list(sides)] if together else [[side] for side in sides]
        for group in groups:
            if len(groups) > 1:
                self._give_back(
                    {side: talker for side, talker in self._talkers.items() if side not in group}
                )
            for side in group:
                if side not in self._talkers:
                    self._load(job, side, sides[side], choice, paused)
            self._tell(note="")
            self._write(job, {side: history[side] for side in group}, turn, sampling)
        if len(groups) > 1:
            self._tell(
                note="Both do not fit in memory at once, so they answered one after the other."
            )

    def _fit(self, sources: dict[str, Source]) -> bool:
        """Whether these weights can all be in memory, where some may be already. Raises FitError
        where one cannot be alone.
        """
        missing = [source for side, source in sources.items() if side not in self._talkers]
        try:
            return not missing or self._engine.fit_together(missing)
        except FitError:
            if not any(side in self._talkers for side in sources):
                raise
        self._give_back(self._talkers)
        return self._engine.fit_together(list(sources.values()))

    def _load(self, job: Job, side: str, source: Source, choice: Choice, paused: Any) -> None:
        if side == "tuned" and choice.weights == CURRENT:
            if paused is None:
                raise RunError(
                    f"{choice.run_id} is not paused here any more; choose a checkpoint, or pause "
                    "it."
                )
            talker = self._engine.borrow(paused, source.config, source.label)
        else:
            self._tell(note=f"Loading the weights: {source.label}")
            job.stage(f"Loading the weights: {source.label}")
            try:
                talker = self._engine.load(source, job.progress)
            except Cancelled:
                self._give_back(
                    self._talkers
                )  # the other side's too, which were loaded for this answer
                raise
            job.stage("Writing")
        with self._state:
            self._talkers[side], self._sources[side] = talker, source
            self._changed()
        if paused is not None:
            paused.when_over(
                "talk", self.release
            )  # a run that goes on wants its machine for itself
        job.check()

    def _write(
        self, job: Job, history: dict[str, list[Message]], turn: Turn, sampling: Sampling
    ) -> None:
        ids: dict[str, list[int]] = {side: [] for side in history}

        def on_token(side: str, token: int) -> None:
            ids[side].append(token)
            text = self._talkers[side].voice.text(ids[side])
            with self._state:
                turn.answers[side].write(text, len(ids[side]))
                self._changed()

        answers = {
            side: self._timed(turn.answers[side], self._talkers[side].answer(messages, sampling))
            for side, messages in history.items()
        }
        take_turns(answers, on_token, lambda: job.is_cancelled)

    def _timed(self, answer: Answer, tokens: Iterator[int]) -> Iterator[int]:
        """`tokens`, with the seconds that they take. A conversation that this side cannot be asked
        ends its answer alone.
        """
        with contextlib.closing(tokens):
            while True:
                began = time.perf_counter()
                try:
                    token = next(tokens, None)
                except DataError as error:
                    with self._state:
                        answer.fail(str(error))
                        self._changed()
                    return
                with self._state:
                    answer.count_draw(time.perf_counter() - began, is_last=token is None)
                    self._changed()
                if token is None:
                    return
                yield token

    def _end(self, turn: Turn) -> None:
        with self._state:
            for answer in turn.answers.values():
                answer.stop()
            self._changed()

    def _history(self, side: str, turn: Turn, system: str) -> list[Message]:
        """The conversation as this side knows it: what it was not asked, it has not heard."""
        messages = [{"role": "system", "content": system}] if system.strip() else []
        for earlier in self._turns:
            if earlier is not turn and side in earlier.answers and earlier.answers[side].text:
                messages += [
                    {"role": "user", "content": earlier.message},
                    {"role": "assistant", "content": earlier.answers[side].text},
                ]
        return [*messages, {"role": "user", "content": turn.message}]

    # ------------------------------------------------------------------ weights

    def _weights_of(self, run_id: str) -> dict[str, str]:
        """What of a run can be talked to, by value: words."""
        with contextlib.suppress(RunError):
            folder = open_run(self._session.runs_dir, run_id)
            steps = sorted(folders_by_step(folder.checkpoints_path), reverse=True)
            paused = self._session.active_id == run_id and self._paused_calls() is not None
            found = {}
            if paused:
                found[CURRENT] = (
                    f"Now, paused after step {self._session.active_run.recorder.snapshot.step:,}"
                )
            found |= {
                f"step-{step}": f"Step {step:,}{', the newest' if step == steps[0] else ''}"
                for step in steps
            }
            return found | (
                {"export": "Its export"} if (folder.export_path / "config.json").exists() else {}
            )
        return {}

    def _sides(self, choice: Choice, compare: bool) -> dict[str, Source]:
        """The weights that answer: `tuned`, and before it `base` where the two are compared. Raises
        RamstreamError where there are none, while a run trains here, and while one of another
        process is being prepared.
        """
        self._paused()
        if choice.folder:
            return {"tuned": self._engine.folder_of(choice.folder)}
        folder = open_run(self._session.runs_dir, choice.run_id)
        weights = self._weights_of(choice.run_id)
        value = next(iter(weights), "") if choice.weights == "newest" else choice.weights
        if value not in weights:
            raise RunError(
                f"Run {choice.run_id} has no such weights; it has "
                f"{', '.join(weights.values()) or 'none yet: save a checkpoint first'}."
            )
        label = f"{folder.config.name}, {weights[value][0].lower()}{weights[value][1:]}"
        sides = {"base": base_of(folder.config)} if compare else {}
        if value == "export":
            return sides | {"tuned": self._engine.folder_of(str(folder.export_path), label)}
        step = int(value.removeprefix("step-")) if value != CURRENT else None
        return sides | {
            "tuned": checkpoint_of(
                self._session.runs_dir, choice.run_id, folder.config, step, label
            )
        }

    def _paused_calls(self) -> Any:
        paused = getattr(self._session.active_run, "paused", None)
        return paused if paused is not None and paused.is_open else None

    def _paused(self) -> Any:
        """The calls of the run that is paused here, None where none is active. Raises RunError
        while one trains, and while one of another process takes its memory.
        """
        if self._session.active_id is None:
            preparing = self._session.preparing_elsewhere
            if preparing is not None:  # what it has planned to take still looks free
                raise RunError(
                    f"{preparing} is getting ready in a process of its own and needs the memory: "
                    "try again once it trains."
                )
            return None
        paused = self._paused_calls()
        if paused is None:
            raise RunError(
                f"{self._session.active_id} is training here and needs the machine: pause it to "
                "talk, or wait until it ends."
            )
        return paused

    def _give_back(self, talkers: dict[str, Talker]) -> None:
        for side, talker in list(talkers.items()):
            with self._state:
                del self._talkers[side], self._sources[side]
                self._changed()
            talker.close()

    def _rest(self, seconds: float | None) -> None:
        """Give the weights back after so many seconds without an answer; None: not now."""
        with self._state:
            if self._idle is not None:
                self._idle.cancel()
            self._idle = None
            if seconds is not None and self._talkers:
                self._idle = threading.Timer(seconds, self._release, args=(0,))
                self._idle.daemon = True
                self._idle.start()

    def _tell(self, note: str | None = None, error: str | None = None) -> None:
        with self._state:
            self._note = self._note if note is None else note
            self._error = self._error if error is None else error
            self._changed()

    def _changed(self) -> None:
        self._version += 1
