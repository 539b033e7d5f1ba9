"""Votes on answers whose side nobody is told before: which of two is shown left, the votes, and how
they are counted.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.errors import RunError
from engine.runs.summaries.evaluation_results import (
    Answer,
    Evaluation,
    Preferred,
    Revealed,
    Side,
    Voted,
    append_evaluation,
    read_evaluations,
)

Place = Literal["left", "right", "same"]
"""What a person votes for: the answer on one side, or neither."""


@dataclass(frozen=True)
class Pair:
    """Both answers to a prompt."""

    number: int
    base: Answer
    trained: Answer

    @property
    def is_same(self) -> bool:
        """Whether both are the same, so that nobody needs to vote."""
        return self.base.answer == self.trained.answer


@dataclass(frozen=True)
class Tally:
    """Number of prompts by the side that was preferred."""

    base: int
    trained: int
    same: int
    left: int
    """Number of prompts that nobody has voted on yet."""


def pairs_of(evaluation: Evaluation) -> Iterator[Pair]:
    """Yields both answers to each prompt that both sides have answered."""
    base, trained = evaluation.answered.get("base"), evaluation.answered.get("trained")
    if base is not None and trained is not None:
        for number, answers in enumerate(zip(base.answers, trained.answers)):
            yield Pair(number, *answers)


def sides_of(evaluation: Evaluation, prompt: int) -> tuple[Side, Side]:
    """Returns the sides whose answers to a prompt are shown left and right, always the same."""
    digest = hashlib.blake2b(f"{evaluation.began.id} {prompt}".encode(), digest_size=1).digest()
    return ("base", "trained") if digest[0] % 2 else ("trained", "base")


def tally(evaluation: Evaluation) -> Tally:
    """Returns how often each side was preferred. Answers that are the same count as such."""
    counts: Counter[str] = Counter()
    for pair in pairs_of(evaluation):
        preferred = "same" if pair.is_same else evaluation.votes.get(pair.number, "left")
        counts[preferred] += 1
    return Tally(counts["base"], counts["trained"], counts["same"], counts["left"])


def vote(path: Path, id: str, prompt: int, place: str) -> None:
    """Keeps a vote on the answers to a prompt of the evaluation `id` of the run folder `path`.
    After the last one, everybody is told the sides. Raises RunError for a vote that cannot be
    counted.
    """
    evaluation = _hidden(path, id)
    pairs = {pair.number: pair for pair in pairs_of(evaluation)}
    if prompt not in pairs or place not in get_args(Place):
        raise RunError("There is no such answer to vote for; reload the page.")
    preferred: Preferred = "same"
    if place != "same":
        preferred = sides_of(evaluation, prompt)[("left", "right").index(place)]
    voted = Voted(id, prompt, preferred)
    evaluation.take(voted)
    is_last = not tally(evaluation).left
    append_evaluation(path, voted, *([Revealed(id)] if is_last else []))


def reveal(path: Path, id: str) -> None:
    """Keeps that everybody is told the sides. Raises RunError if there is no such evaluation."""
    _hidden(path, id)
    append_evaluation(path, Revealed(id))


def _hidden(path: Path, id: str) -> Evaluation:
    for evaluation in read_evaluations(path).found:
        if evaluation.began.id == id and evaluation.is_hidden:
            return evaluation
    raise RunError("These answers are not voted on any more; reload the page.")
