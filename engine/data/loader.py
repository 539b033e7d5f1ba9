"""`prepare_data`: a data set as rows to train on, rows to evaluate on, and a summary of what became
of it.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.encode import Encoder
from engine.data.mapped import Visits, pieces
from engine.data.packing import one_each, pack
from engine.data.rows import RowSet
from engine.data.summary import Part, summary_of
from engine.data.token_cache import Side, StoredTokens, remove_old
from engine.data.tokenise import EVAL_SEED, stored_tokens
from engine.progress import Progress, untold

_PIECES_A_REPORT = 64


@dataclass(frozen=True)
class Prompt:
    """A held-out question: the conversation up to its last answer, ready to be continued."""

    prompt_ids: list[int]
    prompt_text: str
    """What was asked last, as a person reads it."""
    expected_text: str
    """The answer, without special tokens and outer white space: compare with an answer decoded
    alike.
    """
    answer_tokens: int
    """Tokens of the expected answer, its end-of-turn token included."""


@dataclass(frozen=True)
class PreparedData:
    """Rows to train and to evaluate on. `summary` is shown as it is."""

    summary: dict[str, Any]
    train: RowSet
    eval: RowSet
    fingerprint: str
    """Digest of every token, mark and row: a resumed run compares it to know that its data is still
    the same.
    """
    highest_id: int
    """Of all tokens of the sources."""
    _prompts: Callable[[int], list[Prompt]] = field(repr=False)

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out questions; fewer when there are fewer, none for plain text."""
        return self._prompts(n)


def prepare_data(
    config: DataConfig,
    tokenizer: Any,
    seed: int,
    packing_problem: str = "",
    progress: Progress = untold,
    processes: int | None = None,
) -> PreparedData:
    """Read, render, tokenise, split and pack the data set of `config`, or map the tokens that an
    earlier run made.

    `tokenizer` is a fast tokenizer of transformers; `seed` sets the order of the rows, not the
    choice of the held-out ones; `packing_problem`, the name of the model and why it cannot pack,
    keeps one example a row whatever the configuration says; `processes` is how many tokenise, 0 for
    this one alone, None for as many as pay. Raises DataError, in one sentence, when the data cannot
    be read, trains on no token, or its tokens cannot be written.
    """
    encoder = Encoder(tokenizer, config.train_on, config.max_seq_len)
    parts, keys = [], []
    for part, weight in config.parts():
        tokens, key = stored_tokens(part, encoder, progress, processes)
        parts.append(Part(part, weight, tokens))
        keys.append(key)
    remove_old(keys)
    packed = config.packing and not packing_problem
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    train = _rows(
        [(part.tokens.train, _visited(part)) for part in parts], config, packed, pad_id, seed
    )
    held_out = _rows([(part.tokens.eval, None) for part in parts], config, packed, pad_id, seed)
    return PreparedData(
        summary_of(config, parts, encoder, train, held_out, packing_problem),
        train,
        held_out,
        _fingerprint(train, held_out, progress),
        max(part.tokens.tally.highest_id for part in parts),
        lambda n: _alternating([list(_prompts(part.tokens, tokenizer, n)) for part in parts])[:n],
    )


def _prompts(tokens: StoredTokens, tokenizer: Any, n: int) -> Iterator[Prompt]:
    side = tokens.eval
    for found in itertools.islice(tokens.prompts(), n):
        start, end = found["answer"]
        ids = side.ids[side.starts[found["document"]] :][:end].tolist()
        yield Prompt(
            ids[:start],
            found["asked"],
            tokenizer.decode(ids[start:], skip_special_tokens=True).strip(),
            end - start,
        )


def _alternating(lists: list[list[Prompt]]) -> list[Prompt]:
    """The first of each list, the second of each, and so on: a few questions then speak for every
    source.
    """
    return [
        prompt for group in itertools.zip_longest(*lists) for prompt in group if prompt is not None
    ]


# ---------------------------------------------------------------------- rows


def _visited(part: Part) -> np.ndarray | None:
    """int64: documents of the examples that an epoch takes from the source: whole passes, then as
    many examples more as are missing, always the same ones. None for all of them once.
    """
    examples = part.tokens.train.examples
    count = len(examples) - 1
    passes, more = divmod(part.visits(), count)
    if (passes, more) == (1, 0):
        return None
    chosen = np.sort(np.random.default_rng(EVAL_SEED).permutation(count)[:more])
    visited = np.concatenate([np.tile(np.arange(count), passes), chosen])
    first, documents = examples[visited], np.diff(examples)[visited]
    ends = np.cumsum(documents)
    return np.repeat(first - (ends - documents), documents) + np.arange(ends[-1])


def _rows(
    parts: list[tuple[Side, np.ndarray | None]],
    config: DataConfig,
    packed: bool,
    pad_id: int,
    seed: int,
) -> RowSet:
    """The rows of the documents of several sources, or of those of them that are visited."""
    (side, visited), *others = parts
    ids, trained, starts = side.ids, side.trained, side.starts
    if others or visited is not None:
        wanted = [
            np.arange(len(part.starts) - 1) if documents is None else documents
            for part, documents in parts
        ]
        starts = np.zeros(sum(map(len, wanted)) + 1, np.int64)
        np.cumsum(
            np.concatenate(
                [np.diff(part.starts)[chosen] for (part, _), chosen in zip(parts, wanted)]
            ),
            out=starts[1:],
        )
        visits = Visits(
            np.repeat(np.arange(len(parts), dtype=np.uint16), [len(chosen) for chosen in wanted]),
            np.concatenate([part.starts[:-1][chosen] for (part, _), chosen in zip(parts, wanted)]),
            starts,
        )
        ids, trained = (
            visits.of([part.ids for part, _ in parts]),
            visits.of([part.trained for part, _ in parts]),
        )
    documents = len(starts) - 1
    if packed:
        order = np.arange(documents)
        if config.shuffle:
            order = np.random.default_rng([seed]).permutation(order)
        rows = pack(np.diff(starts), config.max_seq_len, order)
    else:
        rows = one_each(documents)
    return RowSet(ids, trained, starts, rows, pad_id, seed, config.shuffle)


def _fingerprint(train: RowSet, held_out: RowSet, progress: Progress) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in (train, held_out):
        for array in (
            side.ids,
            side.trained,
            side.starts,
            side.rows.documents,
            np.diff(side.rows.starts),
        ):
            digest.update(np.int64(len(array)).tobytes())
            for number, piece in enumerate(pieces(array), 1):
                digest.update(np.ascontiguousarray(piece))
                if number % _PIECES_A_REPORT == 0:
                    progress(
                        number * len(piece), len(array), "Making sure that the tokens are the same"
                    )
    return digest.hexdigest()
