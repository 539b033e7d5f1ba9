"""The tokens of a source, stored on disk: found in the cache, or made now, in several processes if
that is faster.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.sources.open_source import Source, open_source
from engine.data.tokens.cache_key import Identity, identity_of, key_of
from engine.data.tokens.column_survey import map_all, whole_survey
from engine.data.tokens.documents import Document, Documents, TextRows
from engine.data.tokens.encode import Encoder
from engine.data.tokens.encoded import (
    Encoded,
    Numbered,
    divided,
    encode_batch,
    example_of,
    row_batches,
)
from engine.data.tokens.rendered import RejectedExample
from engine.data.tokens.token_cache import StoredTokens, Tally, TokenWriter, find
from engine.data.tokens.trained_ends import written_ends
from engine.data.tokens.workers import EncodingProcesses
from engine.errors import DataError
from engine.machine.cgroups import sample_host_memory, usable_cores
from engine.progress import Progress, labeled, no_progress

EVAL_SEED = 20_010_911
"""Seed that chooses the validation examples, not the run's, so that runs can be compared."""

_SECONDS_SAVED = 6.0
"""Least number of seconds that helper processes must save to be started. They need about two
seconds to start.
"""
_MOST_PROCESSES = 16
_BYTES_A_PROCESS = 1 << 30
"""Largest number of bytes of host memory of a process. The bound is generous, because the processes
end before the planes are allocated.
"""


@dataclass(frozen=True)
class Execution:
    """How a data set is prepared: who receives the progress, and how many processes tokenize."""

    progress: Progress = no_progress
    """Callback that receives the progress. An exception from it cancels the work."""
    processes: int | None = None
    """Number of helper processes that tokenize. With 0, this process tokenizes; with None, as many
    processes start as save time. The tokens are the same in all cases.
    """


@dataclass(frozen=True)
class _Content:
    """What is known about the content of a source (`identity_of`)."""

    identity: Identity
    whole: bool
    """Whether the identity covers everything, so that a key can be made from it."""


def stored_tokens(
    config: DataConfig, encoder: Encoder, execution: Execution
) -> tuple[StoredTokens, str | None]:
    """Returns the tokens of the one source of `config` and their key in the cache. The key is None
    for a source whose content cannot be identified. Raises DataError when the source cannot be read
    or has no token to train on.
    """
    source = None
    on_disk = _content_on_disk(config)
    content = on_disk
    if not on_disk.whole:  # a data set of the hub must be opened to know its content
        source = open_source(config, counted=False)
        identity = [on_disk.identity, source.fingerprint, source.total]
        content = _Content(identity, source.fingerprint is not None)
    key = key_of(content.identity, config, encoder.tokenizer) if content.whole else None
    if key is not None:
        found = find(key, labeled(execution.progress, "Checking the tokens in the cache"))
        if found is not None:
            rows = found.tally.rows
            execution.progress(rows, rows, f"Tokens of {found.tally.name} read from the cache")
            return found, key
    if source is None:
        source = open_source(config, counted=False)
    encoding = _Encoding(encoder, execution.processes)
    with TokenWriter(source.name) as writer:
        tally = _tokenize(source, encoding, config, writer, execution.progress)
        changed = on_disk.whole and _content_on_disk(config).identity != on_disk.identity
        if changed:  # while it was being read, so the tokens belong to no key
            key = None
        return writer.publish(key, tally), key


def _content_on_disk(config: DataConfig) -> _Content:
    try:
        return _Content(*identity_of(config))
    except OSError:  # reading the source will fail too, with a better message
        return _Content([], False)


def _tokenize(
    source: Source, encoding: _Encoding, config: DataConfig, writer: TokenWriter, progress: Progress
) -> Tally:
    survey = whole_survey(config, source, progress)
    mapped = map_all(config, source, survey)
    if source.total is None and survey.is_whole:
        source = replace(source, total=survey.rows)
    ends = list(written_ends(encoding.encoder, [mapped.format]))
    tally = Tally(source.name, mapped, ends=ends)
    splits = _Splits(writer, tally, _validation_rows(source.total or 0, config))
    texts = TextRows(config) if mapped.format == "text" else None

    def report() -> None:
        progress(tally.rows, source.total or 0, f"Tokenizing {source.name}")

    with contextlib.closing(encoding.of_source(source, tally, report)) as batches:
        for batch, encoded in batches:
            splits.add(batch, encoded if texts is None else divided(texts, batch, encoded))
            report()
    if texts is not None:
        splits.add_rest(texts.rest())
    splits.finish(config.eval_fraction > 0)
    if not writer.train.examples:
        raise DataError(_nothing_left(tally))
    progress(tally.rows, tally.rows, f"Tokenized {source.name}")
    return tally


def _validation_rows(total: int, config: DataConfig) -> np.ndarray:
    """Returns bool[total], true for validation rows."""
    validation = np.zeros(total, dtype=bool)
    count = config.validation_count(total)
    validation[np.random.default_rng(EVAL_SEED).permutation(total)[:count]] = True
    return validation


# ---------------------------------------------------------------------- here or elsewhere


@dataclass(frozen=True)
class _Encoding:
    """Turns the rows of a source into tokens, here or in helper processes."""

    encoder: Encoder
    processes: int | None
    """That of `Execution`."""

    def of_source(
        self, source: Source, tally: Tally, pause: Callable[[], None]
    ) -> Generator[tuple[list[Numbered], Encoded], None, None]:
        """Yields every batch of rows with its tokens, in order. `pause` is that of
        `Encoder.encode`.
        """
        rest = row_batches(source)
        processes = self.processes
        if not processes:
            began = time.monotonic()
            done = 0
            for batch in rest:
                yield batch, encode_batch(self.encoder, tally.columns, batch, pause)
                done += len(batch)
                if processes is None:
                    processes = _worth(done, source.total, time.monotonic() - began)
                if processes:
                    break
            else:
                return
        with EncodingProcesses(self.encoder, processes, source.name) as others:
            yield from others.encode(tally.columns, rest, pause)


def _most() -> int:
    """Returns how many helper processes there may be."""
    memory_available = sample_host_memory()[1]
    return min(usable_cores(), _MOST_PROCESSES, memory_available // _BYTES_A_PROCESS)


def _worth(done: int, total: int | None, seconds: float) -> int | None:
    """Returns the number of helper processes to use for the remaining rows, or None to continue in
    this process. `done` of `total` rows took `seconds` here.
    """
    most = _most()
    if most < 2:
        return None
    # If the total is unknown, as many rows are expected to follow as have been read.
    rows_left = done if total is None else total - done
    seconds_left = seconds * rows_left / done
    seconds_saved = seconds_left * (1 - 1 / most)
    return most if seconds_saved > _SECONDS_SAVED else None


# ---------------------------------------------------------------------- what becomes of the rows


@dataclass(frozen=True)
class _OneExample:
    """One row from a batch, with its documents and the token range of its answer (int64[2])."""

    row: Numbered
    documents: Documents
    answer: np.ndarray


class _Splits:
    """Writes each row to its split, training or validation, and counts the rows.

    `validation` (bool[rows]) marks the validation rows; rows beyond it are trained on. The last
    example of each split is kept back until the next one arrives: if every row of the other split
    turns out to be skipped, it changes splits.
    """

    def __init__(self, writer: TokenWriter, tally: Tally, validation: np.ndarray):
        self._writer = writer
        self._tally = tally
        self._validation_rows = validation
        self._last: _OneExample | None = None
        self._last_validation: _OneExample | None = None

    def add(self, batch: list[Numbered], encoded: Encoded) -> None:
        documents = encoded.documents
        validation = self._marks(len(batch))
        self._count(batch, encoded)
        has_documents = documents.counts > 0
        for place in np.flatnonzero(validation & has_documents).tolist():
            self._hold_out_last()
            self._last_validation = _one_example(batch, encoded, place)
        to_train = np.flatnonzero(~validation & has_documents)
        if not len(to_train):
            return
        self._train_on_last()
        last = int(to_train[-1])
        self._last = _one_example(batch, encoded, last)
        now = ~validation
        now[last] = False
        self._writer.train.write(documents.of_rows(now))

    def add_rest(self, documents: list[Document]) -> None:
        """Trains on documents that end no row: a registry may limit how much of a text is read."""
        self._writer.train.write(Documents.joined([documents]))

    def finish(self, must_hold_out: bool) -> None:
        """Writes the last examples. must_hold_out: if there are at least two, one must be for
        validation.
        """
        if self._last is None:  # every row meant to be trained on was skipped
            self._last, self._last_validation = self._last_validation, None
        self._hold_out_last()
        no_validation = not self._writer.eval.examples
        others_to_train = self._writer.train.examples > 0
        if must_hold_out and no_validation and others_to_train and self._last is not None:
            self._hold_out(self._last)  # every row meant for validation was skipped
        else:
            self._train_on_last()

    def _marks(self, count: int) -> np.ndarray:
        """Returns bool[count], true for those of the next `count` rows that are for validation."""
        marks = np.zeros(count, dtype=bool)
        known = self._validation_rows[self._tally.rows : self._tally.rows + count]
        marks[: len(known)] = known
        return marks

    def _count(self, batch: list[Numbered], encoded: Encoded) -> None:
        highest_id = int(encoded.documents.ids.max(initial=-1))
        self._tally.count(len(batch), encoded.cut, highest_id, encoded.warnings)
        for place, skipped in encoded.skipped:
            where = batch[place][2]
            if skipped.detail:
                where += f": {skipped.detail}"
            self._tally.skip(skipped.reason, where)

    def _hold_out_last(self) -> None:
        if self._last_validation is not None:
            self._hold_out(self._last_validation)

    def _train_on_last(self) -> None:
        if self._last is not None:
            self._writer.train.write(self._last.documents)

    def _hold_out(self, example: _OneExample) -> None:
        self._writer.eval.write(example.documents)
        start, end = map(int, example.answer)
        if start > 0:
            _, content, where = example.row
            read = example_of(self._tally.columns, content, where)
            asked = "" if isinstance(read, RejectedExample) else read.asked
            self._writer.prompt(self._writer.eval.documents - 1, (start, end), asked)


def _one_example(batch: list[Numbered], encoded: Encoded, place: int) -> _OneExample:
    only = np.arange(len(batch)) == place
    return _OneExample(batch[place], encoded.documents.of_rows(only), encoded.answers[place])


def _nothing_left(tally: Tally) -> str:
    if not tally.skipped:
        return (
            f"{tally.name} has no rows to train on; give more rows or a smaller data.eval_fraction."
        )
    reason, _ = tally.skipped.most_common(1)[0]
    usable = tally.rows - tally.skipped.total()
    return (
        f"{tally.name} has no token to train on: {usable} of {tally.rows} rows are usable, mostly "
        f"because {reason} (first in {tally.first_skipped[reason]}); change the data, data.format "
        "or data.train_on."
    )
