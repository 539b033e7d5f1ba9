"""`prepare_data` makes rows to train on, rows to evaluate on, and a summary of a data set.

- Each source becomes tokens in files (`tokenize.py`), split into documents to train on and
  validation documents.
- A mix takes a number of examples from each source that depends on its weight.
- The documents are packed into rows (`packing.py`).
- A fingerprint covers all of this, so that a resumed run can check that its data is still the same.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig, Reading
from engine.config.preference_settings import Objective
from engine.data.batches.packing import one_each, pack, two_each
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import DocumentTokens, Order, RowSet, RowSets
from engine.data.batches.summary import Part, summary_of
from engine.data.tokens.encode import Encoder
from engine.data.tokens.mapped_arrays import Visited, Visits, chunks
from engine.data.tokens.token_cache import Split, StoredTokens, remove_old
from engine.data.tokens.tokenize import EVAL_SEED, Execution, stored_tokens
from engine.data.tokens.trained_ends import ENDS, ids_of
from engine.progress import Progress

BY_LENGTH = " by length"
"""End of a fingerprint of rows that are grouped by length."""
_CHUNKS_A_REPORT = 64
_DEFAULT_EXECUTION = Execution()


@dataclass(frozen=True)
class Prompt:
    """A validation question: the conversation up to its last answer, ready to be continued."""

    prompt_ids: list[int]
    prompt_text: str
    """The last question, as shown to a person."""
    expected_text: str
    """The answer, without special tokens and without white space around it. Compare it with an
    answer decoded in the same way.
    """
    answer_tokens: int
    """Number of tokens of the expected answer, including its end-of-turn token."""
    rejected_text: str = ""
    """The rejected answer where the expected one is the chosen one of a pair."""


@dataclass(frozen=True)
class PreparedData:
    """Rows of training and of validation, and a `summary` for the user."""

    summary: dict[str, Any]
    train: RowSet
    eval: RowSet
    fingerprint: str
    """Digest of every token, loss mask and row. A resumed run compares it to check that its data is
    still the same, in the same order.
    """
    highest_id: int
    """The highest token id in the sources."""
    _prompts: Callable[[int], list[Prompt]] = field(repr=False)

    def grouped_by_length(self, batch_size: int) -> PreparedData:
        """Returns the same data, with rows of similar length in each step of `batch_size` rows. Its
        fingerprint differs, because the order of the rows is part of what a resume must find again.
        """
        return replace(
            self,
            train=self.train.grouped_by_length(batch_size),
            eval=self.eval.grouped_by_length(batch_size),
            fingerprint=self.fingerprint + BY_LENGTH,
        )

    def learn(self, objective: Objective) -> None:
        """Makes pairs those of `objective`; other rows are unchanged."""
        for rows in (self.train, self.eval):
            if isinstance(rows, PairRows | MarkedRows):
                rows.learn(objective)

    @property
    def ends(self) -> tuple[str, ...]:
        """The tokens that are trained to end an answer."""
        return tuple(self.summary[ENDS])

    def eval_prompts(self, n: int) -> list[Prompt]:
        """Returns the first `n` validation questions, or all if there are fewer. Plain text has no
        questions.
        """
        return self._prompts(n)


def prepare_data(
    config: DataConfig,
    tokenizer: Any,
    seed: int,
    packing_problem: str = "",
    execution: Execution = _DEFAULT_EXECUTION,
) -> PreparedData:
    """Reads, renders, tokenizes, splits and packs the data set of `config`, or maps tokens made by
    an earlier run.

    - `tokenizer` is a fast tokenizer from transformers.
    - `seed` decides the order of the rows, but not which examples are for validation.
    - `packing_problem` is why documents of the model cannot share rows, with its name. Unless it is
      empty, every row has one document, whatever the configuration has.
    Raises DataError, in one sentence, when the data cannot be read, when it has no token to train
    on, or when its tokens cannot be written.
    """
    encoder = Encoder.of(config, tokenizer)
    parts, keys = [], []
    for part_config, weight in config.parts():
        tokens, key = stored_tokens(part_config, encoder, execution)
        parts.append(Part(part_config, weight, tokens))
        if key is not None:
            keys.append(key)
    remove_old(keys)
    layout = _Layout(
        max_seq_len=config.max_seq_len,
        packed=config.packing and not packing_problem,
        pad_id=_pad_id(tokenizer),
        order=Order(seed, config.shuffle),
        reads=config.reads,
    )
    rows = RowSets(
        train=layout.rows([_Chosen(part.tokens.train, _visited(part)) for part in parts]),
        validation=layout.rows([_Chosen(part.tokens.eval, None) for part in parts]),
    )

    summary = summary_of(config, parts, encoder, rows, packing_problem)
    answered = _Answered(tokenizer, set(ids_of(tokenizer, summary[ENDS])))

    def prompts(n: int) -> list[Prompt]:
        found = [list(_prompts(part.tokens, answered, n, config.reads)) for part in parts]
        return _alternating(found)[:n]

    return PreparedData(
        summary,
        rows.train,
        rows.validation,
        _fingerprint(rows, execution.progress),
        max(part.tokens.tally.highest_id for part in parts),
        prompts,
    )


def _pad_id(tokenizer: Any) -> int:
    if tokenizer.pad_token_id is not None:
        return tokenizer.pad_token_id
    if tokenizer.eos_token_id is not None:
        return tokenizer.eos_token_id
    return 0


@dataclass(frozen=True)
class _Answered:
    """The tokens of an expected answer, read as those of a sampled one are."""

    tokenizer: Any
    ends: set[int]

    def text(self, ids: list[int]) -> str:
        """Returns the text of an answer without what ends it, which need not be a special token."""
        while ids and ids[-1] in self.ends:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=True).strip()


def _prompts(tokens: StoredTokens, answered: _Answered, n: int, reads: Reading) -> Iterator[Prompt]:
    split, asked = tokens.eval, tokens.prompts()
    if reads == "labels":  # nobody wants the bad answers
        asked = (found for found in asked if split.references[found["document"]])
    for found in itertools.islice(asked, n):
        start, end = found["answer"]
        document = int(split.starts[found["document"]])
        ids = split.ids[document : document + end].tolist()
        expected = answered.text(ids[start:])
        rejected = ""
        if reads == "pairs":  # the rejected answer is in the document before, behind the same words
            other = split.ids[int(split.starts[found["document"] - 1]) + start : document]
            rejected = answered.text(other.tolist())
        yield Prompt(ids[:start], found["asked"], expected, end - start, rejected)


def _alternating(lists: list[list[Prompt]]) -> list[Prompt]:
    """Returns the first of each list, then the second of each, and so on, so that even a few
    questions represent every source.
    """
    groups = itertools.zip_longest(*lists)
    return [prompt for prompt in itertools.chain.from_iterable(groups) if prompt is not None]


# ---------------------------------------------------------------------- rows


@dataclass(frozen=True)
class _Chosen:
    """The documents taken from one side of a source."""

    split: Split
    visited: np.ndarray | None
    """The documents to visit, in order, int64[visits]. None means every document once."""

    @property
    def documents(self) -> np.ndarray:
        if self.visited is None:
            return np.arange(len(self.split.starts) - 1)
        return self.visited


def _visited(part: Part) -> np.ndarray | None:
    """Returns the documents (int64[visits]) of the examples that an epoch takes from the source, or
    None for every document once. An epoch makes as many whole passes over the examples as fit, then
    takes a fixed selection of the examples for the remainder.
    """
    examples = part.tokens.train.examples
    count = len(examples) - 1
    passes, more = divmod(part.visits(), count)
    if (passes, more) == (1, 0):
        return None
    extra = np.sort(np.random.default_rng(EVAL_SEED).permutation(count)[:more])
    visited = np.concatenate([np.tile(np.arange(count), passes), extra])
    first_documents = examples[visited]
    documents = np.diff(examples)[visited]
    # The documents of an example are numbered from its first document on. `offsets` is, for each
    # example, the difference between these numbers and one running count over all visits.
    ends = np.cumsum(documents)
    offsets = first_documents - (ends - documents)
    return np.repeat(offsets, documents) + np.arange(ends[-1])


@dataclass(frozen=True)
class _Layout:
    """How documents become rows."""

    max_seq_len: int
    packed: bool
    pad_id: int
    order: Order
    reads: Reading
    """`pairs` if every two documents are the answers of a pair, `labels` if each is an answer with
    a mark, `examples` if rows are packed or not.
    """

    def rows(self, parts: list[_Chosen]) -> RowSet:
        """Returns rows made from the chosen documents of all sources."""
        tokens = _tokens_of(parts)
        documents = len(tokens.starts) - 1
        if self.reads == "pairs":
            return PairRows(tokens, two_each(documents), self.pad_id, self.order)
        if self.reads == "labels":
            return MarkedRows(tokens, one_each(documents), self.pad_id, self.order)
        if not self.packed:
            return RowSet(tokens, one_each(documents), self.pad_id, self.order)
        order = np.arange(documents)
        if self.order.shuffle:
            order = np.random.default_rng([self.order.seed]).permutation(order)
        rows = pack(np.diff(tokens.starts), self.max_seq_len, order)
        return RowSet(tokens, rows, self.pad_id, self.order)


def _tokens_of(parts: list[_Chosen]) -> DocumentTokens:
    """Returns the tokens of the chosen documents, one part after another."""
    splits = [part.split for part in parts]
    if len(parts) == 1 and parts[0].visited is None:  # the files hold exactly these
        only = splits[0]
        return DocumentTokens(only.ids, only.loss_mask, only.starts, only.references, only.weights)
    chosen = [part.documents for part in parts]
    counts = [len(documents) for documents in chosen]
    lengths = [np.diff(split.starts)[documents] for split, documents in zip(splits, chosen)]
    begins = [split.starts[:-1][documents] for split, documents in zip(splits, chosen)]
    starts = np.zeros(sum(counts) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=starts[1:])
    which = np.repeat(np.arange(len(parts), dtype=np.uint16), counts)
    visits = Visits(which, np.concatenate(begins), starts)
    ids = visits.of([split.ids for split in splits])
    loss_mask = visits.of([split.loss_mask for split in splits])
    logps = [split.references[docs] for split, docs in zip(splits, chosen) if split.holds_pairs]
    weights: np.ndarray | Visited = splits[0].weights
    if any(len(split.weights) for split in splits):
        weights = visits.of([_weights_of(split) for split in splits])
    references = np.concatenate([np.zeros(0), *logps])
    return DocumentTokens(ids, loss_mask, starts, references, weights)


def _weights_of(split: Split) -> np.ndarray:
    """Returns the weights of a side's tokens, float32[tokens]. Ones take no memory."""
    ones = np.broadcast_to(np.float32(1), len(split.ids))
    return split.weights if len(split.weights) else ones


def _fingerprint(rows: RowSets, progress: Progress) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for split in (rows.train, rows.validation):
        arrays = (
            *split.given_references,
            *([split.weights] if len(split.weights) else []),
            split.ids,
            split.loss_mask,
            split.starts,
            split.rows.documents,
            np.diff(split.rows.starts),
        )
        for array in arrays:
            digest.update(np.int64(len(array)).tobytes())
            for number, chunk in enumerate(chunks(array), 1):
                digest.update(np.ascontiguousarray(chunk).data)
                if number % _CHUNKS_A_REPORT == 0:
                    done = number * len(chunk)
                    progress(done, len(array), "Making sure that the tokens are the same")
    return digest.hexdigest()
