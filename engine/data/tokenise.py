"""A source to tokens on disk: from the cache, or made now, in other processes where that is faster."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Generator

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.encode import Documents, Encoder
from engine.data.encoded import Encoded, Numbered, encode_batch, example_of, row_batches
from engine.data.formats import ROWS_TO_DETECT, map_columns
from engine.data.identity import Identity, identity_of, key_of
from engine.data.processes import EncodingProcesses
from engine.data.sources import Source, open_source
from engine.data.token_cache import StoredTokens, Tally, TokenWriter, find
from engine.errors import DataError
from engine.machine.cgroups import sample_host_memory, usable_cores
from engine.progress import Progress, saying

EVAL_SEED = 20_010_911
"""Which examples are held out does not depend on the run's seed, so that runs can be compared."""

_SECONDS_SAVED = 6.0
"""Processes are started for this much; they need about two to be ready."""
_MOST_PROCESSES = 16
_BYTES_A_PROCESS = 1 << 30
"""Of host memory, generously: they are gone before the planes are allocated."""


def stored_tokens(
    config: DataConfig,
    encoder: Encoder,
    progress: Progress,
    processes: int | None,
) -> tuple[StoredTokens, str | None]:
    """The tokens of the one source of `config`, and the key that they have in the cache (None for a
    source that does not say what it holds). Raises DataError when the source cannot be read or
    trains on no token.

    `processes`: how many to tokenise in, 0 for this one alone, None for as many as pay. The tokens
    are the same.
    """
    source = None
    identity, whole = _identity(config)
    local = whole
    if not whole:
        source = open_source(config)
        identity, whole = (
            [identity, source.fingerprint, source.total],
            source.fingerprint is not None,
        )
    key = key_of(identity, config, encoder.tokenizer) if whole else None
    if key is not None:
        found = find(key, saying(progress, "Checking the tokens in the cache"))
        if found is not None:
            progress(
                found.tally.rows,
                found.tally.rows,
                f"Tokens of {found.tally.name} read from the cache",
            )
            return found, key
    if source is None:
        source = open_source(config)
    with TokenWriter(source.name) as writer:
        tally = _tokenise(source, encoder, config, writer, progress, processes)
        if local and _identity(config)[0] != identity:
            key = None  # changed while it was read
        return writer.publish(key, tally), key


def _identity(config: DataConfig) -> tuple[Identity, bool]:
    try:
        return identity_of(config)
    except OSError:  # whoever reads the source will say it better
        return [], False


def _tokenise(
    source: Source,
    encoder: Encoder,
    config: DataConfig,
    writer: TokenWriter,
    progress: Progress,
    processes: int | None,
) -> Tally:
    first = [row for _, row in itertools.islice(source.read(), ROWS_TO_DETECT)]
    if not first:
        raise DataError(f"{source.name} has no rows; give a data set with at least one.")
    tally = Tally(source.name, map_columns(config.format, first, source, config.columns))
    sides = _Sides(writer, tally, _held_out(source.total or 0, config.eval_fraction))
    with contextlib.closing(_encoded(source, encoder, tally, processes)) as found:
        for batch, encoded in found:
            sides.add(batch, encoded)
            progress(tally.rows, source.total or 0, f"Tokenising {source.name}")
    sides.finish(config.eval_fraction > 0)
    if not writer.train.examples:
        raise DataError(_nothing_left(tally))
    progress(tally.rows, tally.rows, f"Tokenised {source.name}")
    return tally


def _held_out(total: int, fraction: float) -> np.ndarray:
    """bool[total]: the held-out rows, at least one where there are two rows, never all."""
    held_out = np.zeros(total, dtype=bool)
    if fraction > 0 and total >= 2:
        count = min(max(1, round(total * fraction)), total - 1)
        held_out[np.random.default_rng(EVAL_SEED).permutation(total)[:count]] = True
    return held_out


# ---------------------------------------------------------------------- here or elsewhere


def _encoded(
    source: Source,
    encoder: Encoder,
    tally: Tally,
    processes: int | None,
) -> Generator[tuple[list[Numbered], Encoded], None, None]:
    """Every batch of rows with its tokens, in order."""
    rest = row_batches(source)
    if not processes:
        began, done = time.monotonic(), 0
        for batch in rest:
            yield batch, encode_batch(encoder, tally.columns, batch)
            done += len(batch)
            if processes is None and (
                processes := _worth(done, source.total, time.monotonic() - began)
            ):
                break
        else:
            return
    with EncodingProcesses(encoder, tally.columns, processes, source.name) as others:
        yield from others.encode(rest)


def _worth(done: int, total: int | None, seconds: float) -> int | None:
    """How many processes to go on in when `done` of `total` rows took `seconds` here; None to go on
    as before.
    """
    most = min(usable_cores(), _MOST_PROCESSES, sample_host_memory()[1] // _BYTES_A_PROCESS)
    if most < 2:
        return None
    # Of an unknown number of rows, as many again as were read are expected.
    left = seconds * (total - done) / done if total is not None else seconds
    return most if left * (1 - 1 / most) > _SECONDS_SAVED else None


# ---------------------------------------------------------------------- what becomes of the rows


class _Sides:
    """Puts rows where they belong, to train on or held out, and counts them."""

    def __init__(self, writer: TokenWriter, tally: Tally, held_out: np.ndarray):
        self._writer, self._tally, self._held_out = writer, tally, held_out
        self._last: tuple[Numbered, Documents, tuple[int, int]] | None = None
        """The last example to train on. It is held out when no other is."""

    def add(self, batch: list[Numbered], encoded: Encoded) -> None:
        tally, documents = self._tally, encoded.documents
        held_out = np.zeros(len(batch), dtype=bool)
        marks = self._held_out[tally.rows : tally.rows + len(batch)]
        held_out[: len(marks)] = marks
        tally.count(len(batch), encoded.cut, int(documents.ids.max(initial=-1)), encoded.warnings)
        for place, skipped in encoded.skipped:
            tally.skip(
                skipped.reason, batch[place][2] + (f": {skipped.detail}" if skipped.detail else "")
            )
        for place in np.flatnonzero(held_out & (documents.counts > 0)).tolist():
            self._hold_out(
                batch[place], documents.of_rows(_only(place, len(batch))), encoded.answers[place]
            )
        trained = np.flatnonzero(~held_out & (documents.counts > 0))
        if len(trained):
            self._let_go()
            last = int(trained[-1])
            held_out[last] = True
            self._last = (
                batch[last],
                documents.of_rows(_only(last, len(batch))),
                encoded.answers[last],
            )
            self._writer.train.add(documents.of_rows(~held_out))

    def finish(self, wanted: bool) -> None:
        """`wanted`: an example is to be held out, if only there are two."""
        if (
            wanted
            and not self._writer.eval.examples
            and self._writer.train.examples
            and self._last is not None
        ):
            self._hold_out(*self._last)  # every row meant to be held out was skipped
        else:
            self._let_go()

    def _let_go(self) -> None:
        if self._last is not None:
            self._writer.train.add(self._last[1])

    def _hold_out(self, row: Numbered, documents: Documents, answer: np.ndarray) -> None:
        self._writer.eval.add(documents)
        start, end = map(int, answer)
        if start > 0:
            _, content, where = row
            asked = example_of(self._tally.columns, content, where).asked
            self._writer.prompt(self._writer.eval.documents - 1, (start, end), asked)


def _only(place: int, count: int) -> np.ndarray:
    return np.arange(count) == place


def _nothing_left(tally: Tally) -> str:
    if not tally.skipped:
        return (
            f"{tally.name} has no rows to train on; give more rows or a smaller data.eval_fraction."
        )
    reason, _ = tally.skipped.most_common(1)[0]
    return (
        f"{tally.name} has no token to train on: {tally.rows - sum(tally.skipped.values())} of "
        f"{tally.rows} rows are usable, mostly because {reason} (first in "
        f"{tally.first_skipped[reason]}); change the data, data.format or data.train_on."
    )
