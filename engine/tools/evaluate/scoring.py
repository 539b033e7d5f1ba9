"""Log-likelihoods of continuations, with as few sweeps over the layers as possible.

- Requests with the same tokens before the last share a row, such as the choices A to D of a
  question. Each adds only its labels.
- Rows of similar length share a micro-batch, and a sweep takes many micro-batches.
- Only the positions that predict a continuation reach the head, some hundred at a time.
- If the GPU's memory does not last, the rest is computed in smaller micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.errors import DataError, FitError, GpuMemoryError
from engine.planning.fit.sampling_memory import PASS_TOKENS
from engine.progress import Progress, no_progress
from engine.runtime.step.inference_passes import LabeledRows, LabelScores, pass_groups
from engine.runtime.step.streaming_engine import StreamingEngine


@dataclass(frozen=True)
class Continuation:
    """Tokens of a text, and those that may continue it."""

    context: Sequence[int]
    """Tokens before the continuation, at least one."""
    tokens: Sequence[int]
    """Tokens of the continuation; an empty one is certain."""


@dataclass(frozen=True)
class Likelihood:
    """Likelihood of a continuation."""

    log: float
    """Natural logarithm of the probability, summed over the tokens."""
    is_greedy: bool
    """Each token is the likeliest one after those before it."""


@dataclass(frozen=True)
class _Asked:
    """A row of tokens with the requests that it answers: the number of each, and its labels, which
    follow the last tokens of the row.
    """

    row: tuple[int, ...]
    requests: list[tuple[int, Sequence[int]]]

    def ask(self, request: int, labels: Sequence[int]) -> None:
        self.requests.append((request, labels))


def score(
    engine: StreamingEngine,
    asked: Sequence[Continuation],
    longest: int | None = None,
    progress: Progress = no_progress,
    most_tokens: int = PASS_TOKENS,
) -> list[Likelihood]:
    """Returns the likelihood of each continuation, in order.

    A context whose row would have more than `longest` tokens loses its first ones. `progress` gets
    the number of requests that are done. A micro-batch has at most `most_tokens` tokens, unless it
    is a single row. Raises DataError for a continuation that is too long, and FitError if the GPU's
    memory does not last for a single row.
    """
    rows = _rows(asked, longest)
    found: list[Likelihood] = [Likelihood(-math.inf, False)] * len(asked)
    done = 0
    while rows:
        # The longest come first, so that memory that does not last is noticed at once.
        groups = pass_groups([one.row for one in rows], most_tokens)[::-1]
        finished: set[int] = set()
        try:
            scores = engine.scores(_labeled(rows, group) for group in groups)
            for of_group, group in zip(scores, groups):
                for request, likelihood in _likelihoods(rows, group, of_group):
                    found[request] = likelihood
                    done += 1
                finished.update(group)
                progress(done, len(asked))
        except (torch.OutOfMemoryError, GpuMemoryError) as error:
            most_tokens = _less(groups, most_tokens, error)
        rows = [one for place, one in enumerate(rows) if place not in finished]
    return found


def _rows(asked: Sequence[Continuation], longest: int | None) -> list[_Asked]:
    """Returns the different rows of the requests, in the order of their first request."""
    rows: dict[tuple[int, ...], _Asked] = {}
    for request, one in enumerate(asked):
        if longest is not None and len(one.tokens) > longest:
            raise DataError(
                f"A text that is to be scored has {len(one.tokens):,} tokens and this model takes "
                f"{longest:,} at most; leave its task out."
            )
        tokens = [*one.context, *one.tokens]
        if longest is not None:
            tokens = tokens[-(longest + 1) :]
        row = tuple(tokens[:-1])
        rows.setdefault(row, _Asked(row, [])).ask(request, one.tokens)
    return list(rows.values())


def _labeled(rows: Sequence[_Asked], group: Sequence[int]) -> LabeledRows:
    """Returns the micro-batch of the rows of a group, with the labels of all of their requests in
    order.
    """
    members = [rows[place] for place in group]
    width = max(len(one.row) for one in members)
    ids = np.zeros((len(members), width), dtype=np.int64)
    positions: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for place, one in enumerate(members):
        ids[place, : len(one.row)] = one.row
        end = place * width + len(one.row)
        for _, tokens in one.requests:
            positions.append(np.arange(end - len(tokens), end))
            labels.append(np.array(tokens, dtype=np.int64))
    return LabeledRows(ids, np.concatenate(positions), np.concatenate(labels))


def _likelihoods(
    rows: Sequence[_Asked], group: Sequence[int], of: LabelScores
) -> Iterator[tuple[int, Likelihood]]:
    """Yields the number of each request of the rows of a group, and its likelihood."""
    start = 0
    for place in group:
        for request, tokens in rows[place].requests:
            part = slice(start, start + len(tokens))
            total = float(of.sequence_logps[part].sum(dtype=np.float64))
            yield request, Likelihood(total, bool(of.likeliest[part].all()))
            start += len(tokens)


def _less(groups: Sequence[Sequence[int]], most_tokens: int, error: Exception) -> int:
    """Returns fewer tokens for a micro-batch. Raises FitError where all of them are single rows."""
    if max(map(len, groups)) == 1:
        in_use = getattr(error, "in_use", "")
        in_use = f" ({in_use})" if in_use else ""
        raise FitError(
            f"The GPU ran out of memory{in_use} with a single row of a task; close other programs "
            "or use a GPU with more memory."
        ) from error
    return most_tokens // 2
