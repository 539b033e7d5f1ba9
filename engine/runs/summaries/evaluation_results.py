"""What a run's model was found to do beside its base model: ``evaluations.jsonl`` in the
run's folder.

An evaluation consists of parts, such as the loss of one side. Each is a line that is written when
the part is done, so that an evaluation that was broken off goes on with the next one. Results of
benchmarks are in a file of their own; here is only that their task is done.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from engine.runs.summaries.benchmark_results import WhichWeights
from engine.runs.summaries.lines_file import append_lines, read_lines

EVALUATIONS_FILE = "evaluations.jsonl"

LOSS, MATCHED, ANSWERED = OF_ROWS = ("(loss)", "(matched)", "(answered)")
"""Parts of an evaluation that are about validation rows; others have the name of a task."""

Side = Literal["base", "trained"]
"""The base model, or the trained one."""
Preferred = Literal["base", "trained", "same"]


class Wanted(Struct, frozen=True):
    """What an evaluation consists of."""

    validation: bool = True
    """The loss of the validation rows, and the answers to validation prompts that are right."""
    prompts: int = 200
    """Number of validation prompts whose answers are compared with the expected ones, at most."""
    answers: int = 0
    """Number of validation prompts whose answers are shown side by side."""
    is_blind: bool = False
    """Nobody is told which side an answer is of before it was voted on."""
    tasks: tuple[str, ...] = ()
    """Tasks of lm-evaluation-harness."""
    include: str = ""
    """Folder with a user's own tasks."""
    own: str = ""
    """File of the task in it that a person has chosen, if it was chosen by its file."""
    task_files: str = ""
    """Digest of the user's own tasks."""
    limit: int | None = None
    """Number of samples of each task at most; None for all."""
    shots: int | None = None
    """Number of solved examples before each question; None leaves that to the task."""
    chat: bool = False
    """The questions of tasks are written with the model's chat template."""
    most_tokens: int | None = None
    """Tokens of a row of a task at most; None leaves that to the model."""
    with_base: bool = True
    """The base model is evaluated, too."""


class Began(Struct, tag="began", frozen=True):
    """An evaluation of the weights of `step` began."""

    id: str
    wanted: Wanted
    weights: WhichWeights
    step: int | None
    dtype: str
    """Dtype of the computation, of both sides."""
    rows: str
    """Fingerprint of the data; empty where their rows are not read."""
    time: float
    """Unix seconds."""
    note: str = ""
    """One sentence on what a person should know of the rows."""


class LossMeasured(Struct, tag="loss", frozen=True):
    """Loss of the validation rows."""

    id: str
    side: Side
    loss: float
    losses: list[float]
    """Mean loss of each row, or of groups of rows; entry i of both sides is about the same rows."""
    tokens: list[int]
    """Number of tokens that each is the mean of."""


class PairsCompared(Struct, tag="pairs", frozen=True):
    """Whether the chosen answer of each validation pair was likelier than the rejected one."""

    id: str
    side: Side
    ahead: list[bool]


class AnswersMatched(Struct, tag="matched", frozen=True):
    """Whether each validation prompt was answered exactly as expected."""

    id: str
    side: Side
    right: list[bool]


class Answer(Struct, frozen=True):
    """An answer to a validation prompt."""

    prompt: str
    expected: str
    answer: str


class PromptsAnswered(Struct, tag="answered", frozen=True):
    """Answers that are shown side by side."""

    id: str
    side: Side
    answers: list[Answer]
    tokens: int
    """Number of tokens of all answers."""
    seconds: float


class TaskDone(Struct, tag="task", frozen=True):
    """A task was asked; its results are in the file of benchmarks."""

    id: str
    side: Side
    task: str


class Noted(Struct, tag="noted", frozen=True):
    """What a person should know of how the answers are drawn, in one sentence."""

    id: str
    text: str


class Voted(Struct, tag="voted", frozen=True):
    """A person preferred an answer to a prompt, whose number counts from 0."""

    id: str
    prompt: int
    preferred: Preferred


class Revealed(Struct, tag="revealed", frozen=True):
    """A person was told which answers are of which side."""

    id: str


class Ended(Struct, tag="ended", frozen=True):
    """All parts of an evaluation are done."""

    id: str


Line = (
    Began
    | LossMeasured
    | PairsCompared
    | AnswersMatched
    | PromptsAnswered
    | TaskDone
    | Noted
    | Voted
    | Revealed
    | Ended
)
_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


@dataclass
class Evaluation:
    """One evaluation, as far as it is done."""

    began: Began
    losses: dict[Side, LossMeasured] = field(default_factory=dict)
    pairs: dict[Side, PairsCompared] = field(default_factory=dict)
    matched: dict[Side, AnswersMatched] = field(default_factory=dict)
    answered: dict[Side, PromptsAnswered] = field(default_factory=dict)
    tasks: set[tuple[Side, str]] = field(default_factory=set)
    noted: str = ""
    """One sentence on how the answers are drawn."""
    votes: dict[int, Preferred] = field(default_factory=dict)
    is_revealed: bool = False
    is_over: bool = False
    """All parts are done."""

    @property
    def sides(self) -> tuple[Side, ...]:
        """The sides that are evaluated, in order."""
        return ("base", "trained") if self.began.wanted.with_base else ("trained",)

    @property
    def note(self) -> str:
        """What a person should know of its rows and of how answers are drawn."""
        return " ".join(filter(None, (self.began.note, self.noted)))

    @property
    def is_hidden(self) -> bool:
        """Whether nobody may be told yet which side an answer is of."""
        is_blind = self.began.wanted.is_blind and self.began.wanted.with_base
        return is_blind and not self.is_revealed

    def missing(self, side: Side) -> list[str]:
        """Returns the parts of one side that are not done, in order."""
        wanted = self.began.wanted
        parts = []
        if wanted.validation and side not in self.losses and side not in self.pairs:
            parts.append(LOSS)
        if wanted.validation and side not in self.matched:
            parts.append(MATCHED)
        if wanted.answers and side not in self.answered:
            parts.append(ANSWERED)
        return parts + [task for task in wanted.tasks if (side, task) not in self.tasks]

    def parts_done(self) -> tuple[int, int]:
        """Returns how many parts are done, and how many there are."""
        wanted = self.began.wanted
        of_side = 2 * wanted.validation + bool(wanted.answers) + len(wanted.tasks)
        total = of_side * len(self.sides)
        return total - sum(len(self.missing(side)) for side in self.sides), total

    def take(self, line: Line) -> None:
        """Adds the next line of this evaluation."""
        if isinstance(line, LossMeasured):
            self.losses[line.side] = line
        elif isinstance(line, PairsCompared):
            self.pairs[line.side] = line
        elif isinstance(line, AnswersMatched):
            self.matched[line.side] = line
        elif isinstance(line, PromptsAnswered):
            self.answered[line.side] = line
        elif isinstance(line, TaskDone):
            self.tasks.add((line.side, line.task))
        elif isinstance(line, Noted):
            self.noted = line.text
        elif isinstance(line, Voted):
            self.votes[line.prompt] = line.preferred
        elif isinstance(line, Revealed):
            self.is_revealed = True
        elif isinstance(line, Ended):
            self.is_over = True


@dataclass(frozen=True)
class Evaluations:
    """All evaluations of a run that can be read, the latest last."""

    found: tuple[Evaluation, ...] = ()
    problem: str = ""
    """One sentence on what cannot be read; empty where nothing is wrong."""

    @property
    def latest(self) -> Evaluation | None:
        return self.found[-1] if self.found else None


def read_evaluations(path: Path) -> Evaluations:
    """Returns the evaluations in the run folder `path`. Damaged lines are left out, and counted in
    the problem.
    """
    lines: list[Line]
    lines, problem = read_lines(path / EVALUATIONS_FILE, _line_in)
    found: dict[str, Evaluation] = {}
    for line in lines:
        if isinstance(line, Began):
            found[line.id] = Evaluation(line)
        elif line.id in found:
            found[line.id].take(line)
    return Evaluations(tuple(found.values()), problem)


def _line_in(content: bytes) -> Line | None:
    """Returns what a line says, or None if it is damaged."""
    try:
        line: Line = _decode(content)
    except (ValueError, RecursionError):
        return None
    is_finite = all(map(math.isfinite, _numbers(line)))
    return line if is_finite else None


def _numbers(line: Line) -> Iterable[float]:
    if isinstance(line, LossMeasured):
        return (line.loss, *line.losses)
    if isinstance(line, PromptsAnswered):
        return (line.seconds,)
    return (line.time,) if isinstance(line, Began) else ()


def append_evaluation(path: Path, *lines: Line) -> None:
    """Adds lines to the evaluations of the run folder `path`, on the disk when this returns. Raises
    RunError if they cannot be written.
    """
    append_lines(path / EVALUATIONS_FILE, [_encode(line) for line in lines])
