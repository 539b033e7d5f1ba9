"""`prepare_data`: a data set as rows to train on, rows to evaluate on, and a summary of what became of it."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config import DataConfig
from engine.data.encode import Document, Encoder
from engine.data.formats import BrokenText, ColumnMap, Example, map_columns
from engine.data.packing import pack
from engine.data.render import Skipped
from engine.data.rows import RowSet
from engine.data.sources import Row, Source, open_source
from engine.errors import DataError
from engine.paths import resolve_source

Progress = Callable[[int, int, str], None]
"""Called with rows done, rows in all (0 when unknown) and a sentence; what it raises stops the preparation."""

_BATCH = 512
_ROWS_TO_DETECT = 20
_EVAL_SEED = 20_010_911
"""Which examples are held out does not depend on the run's seed, so that runs can be compared."""


@dataclass(frozen=True)
class Prompt:
    """A held-out question: the conversation up to its last answer, ready to be continued."""

    prompt_ids: list[int]
    prompt_text: str
    """What was asked last, as a person reads it."""
    expected_text: str
    """The answer, without special tokens and outer white space: compare with an answer decoded alike."""
    answer_tokens: int
    """Tokens of the expected answer, its end-of-turn token included."""


@dataclass(frozen=True)
class PreparedData:
    """Rows to train and to evaluate on. `summary` is shown as it is."""

    summary: dict[str, Any]
    train: RowSet
    eval: RowSet
    fingerprint: str
    """Digest of every token, mark and row: a resumed run compares it to know that its data is still the same."""
    _prompts: list[Prompt] = field(repr=False)

    def eval_prompts(self, n: int) -> list[Prompt]:
        """The first `n` held-out questions; fewer when there are fewer, none for plain text."""
        return self._prompts[:n]


@dataclass
class _Collected:
    """What reading leaves: documents of both sides, and what was left out."""

    train: list[Document] = field(default_factory=list)
    eval: list[Document] = field(default_factory=list)
    train_examples: int = 0
    eval_examples: int = 0
    rows: int = 0
    cut: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)


def prepare_data(config: DataConfig, tokenizer: Any, seed: int, packing_allowed: bool = True,
                 progress: Progress | None = None) -> PreparedData:
    """Read, render, tokenise, split and pack the data set of `config`.

    `tokenizer` is a fast tokenizer of transformers; `seed` sets the order of the rows, not the choice of the held-out
    ones; `packing_allowed` False keeps one example a row whatever the configuration says. Raises DataError, in one
    sentence, when the data cannot be read or trains on no token."""
    source = open_source(config)
    columns, encoder = _open(config, tokenizer, source)
    collected = _collect(source, columns, encoder, config, tokenizer, progress)
    if not collected.train:
        raise DataError(_nothing_left(source, collected))
    packed = config.packing and packing_allowed
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    train = _rows(collected.train, config, packed, pad_id, seed)
    held_out = _rows(collected.eval, config, packed, pad_id, seed)
    summary = _summary(config, source, columns, encoder, collected, train, held_out, packing_allowed)
    return PreparedData(summary, train, held_out, _fingerprint(train, held_out), collected.prompts)


def _open(config: DataConfig, tokenizer: Any, source: Source) -> tuple[ColumnMap, Encoder]:
    first = [row for _, row in itertools.islice(source.read(), _ROWS_TO_DETECT)]
    if not first:
        raise DataError(f"{source.name} has no rows; give a data set with at least one.")
    return (map_columns(config.format, first, source),
            Encoder(tokenizer, config.train_on, config.max_seq_len))


# ---------------------------------------------------------------------- reading


def encoded_rows(source: Source, columns: ColumnMap, encoder: Encoder, rows: Iterator[tuple[int, Row]],
                 ) -> Iterator[tuple[int, Example | None, list[Document] | Skipped]]:
    """Row number, example and documents (or why there are none) of each of `rows`, tokenised in batches."""
    while batch := list(itertools.islice(rows, _BATCH)):
        examples = [_example(columns, row, source.where(number)) for number, row in batch]
        found = iter(encoder.encode([example for example in examples if not isinstance(example, Skipped)]))
        for (number, _), example in zip(batch, examples):
            if isinstance(example, Skipped):
                yield number, None, example
            else:
                yield number, example, next(found)


def _example(columns: ColumnMap, row: Row, where: str) -> Example | Skipped:
    try:
        return columns.example(row, where) or Skipped("the row is empty")
    except BrokenText:
        return Skipped("the text is not valid Unicode")


def _collect(source: Source, columns: ColumnMap, encoder: Encoder, config: DataConfig, tokenizer: Any,
             progress: Progress | None) -> _Collected:
    held_out = _held_out(source.total or 0, config.eval_fraction)
    out = _Collected()
    last: tuple[Example, list[Document]] | None = None
    for number, example, documents in encoded_rows(source, columns, encoder, source.read()):
        ordinal, out.rows = out.rows, out.rows + 1
        if progress is not None and out.rows % _BATCH == 0:
            progress(out.rows, source.total or 0, f"Tokenising {source.name}")
        if isinstance(documents, Skipped):
            out.skipped[documents.reason] += 1
            out.first_skipped.setdefault(documents.reason, source.where(number)
                                         + (f": {documents.detail}" if documents.detail else ""))
            continue
        out.cut += any(document.length > len(document.ids) for document in documents)
        if ordinal in held_out:
            _hold_out(out, example, documents, tokenizer)
        else:
            out.train.extend(documents)
            out.train_examples += 1
            last = example, documents
    if config.eval_fraction > 0 and not out.eval and out.train_examples > 1 and last is not None:
        del out.train[-len(last[1]):]  # every row meant to be held out was skipped
        out.train_examples -= 1
        _hold_out(out, *last, tokenizer)
    if progress is not None:
        progress(out.rows, out.rows, f"Tokenised {source.name}")
    return out


def _held_out(total: int, fraction: float) -> frozenset[int]:
    """Ordinals (from 0) of the held-out rows: at least one where there are two rows, never all."""
    if fraction <= 0 or total < 2:
        return frozenset()
    count = min(max(1, round(total * fraction)), total - 1)
    return frozenset(np.random.default_rng(_EVAL_SEED).permutation(total)[:count].tolist())


def _hold_out(out: _Collected, example: Example | None, documents: list[Document], tokenizer: Any) -> None:
    out.eval.extend(documents)
    out.eval_examples += 1
    last = documents[-1]
    if last.answer is None or last.answer[0] == 0 or example is None:
        return
    start, end = last.answer
    out.prompts.append(Prompt(last.ids[:start].tolist(), example.asked,
                              tokenizer.decode(last.ids[start:end].tolist(), skip_special_tokens=True).strip(),
                              end - start))


def _nothing_left(source: Source, out: _Collected) -> str:
    if not out.skipped:
        return f"{source.name} has no rows to train on; give more rows or a smaller data.eval_fraction."
    reason, _ = out.skipped.most_common(1)[0]
    return (f"{source.name} has no token to train on: {out.rows - sum(out.skipped.values())} of {out.rows} rows are "
            f"usable, mostly because {reason} (first in {out.first_skipped[reason]}); change the data, data.format or "
            "data.train_on.")


# ---------------------------------------------------------------------- rows


def _rows(documents: list[Document], config: DataConfig, packed: bool, pad_id: int, seed: int) -> RowSet:
    lengths = np.array([len(document.ids) for document in documents], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)])
    trained = np.concatenate([np.empty(0, bool), *(document.trained for document in documents)])
    if packed:
        numbers = np.arange(len(documents))
        order = np.random.default_rng([seed]).permutation(numbers) if config.shuffle else numbers
        rows = pack(lengths, config.max_seq_len, order)
    else:
        rows = [[number] for number in range(len(documents))]
    return RowSet(ids, trained, starts, rows, pad_id, seed, config.shuffle)


def _fingerprint(*sides: RowSet) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for side in sides:
        for array in (side.ids, side.trained, side.starts, np.fromiter(itertools.chain(*side.rows), np.int64),
                      np.fromiter(map(len, side.rows), np.int64)):
            digest.update(np.int64(len(array)).tobytes())
            digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- the summary


def _summary(config: DataConfig, source: Source, columns: ColumnMap, encoder: Encoder, out: _Collected, train: RowSet,
             held_out: RowSet, packing_allowed: bool) -> dict[str, Any]:
    lengths = np.diff(train.starts)
    tokens, loss_tokens = train.tokens, train.loss_tokens
    return {
        "source": source.name,
        "format": columns.format,
        "format_detected": columns.detected,
        "columns": columns.meaning(),
        "unused_columns": columns.unused,
        "chat_template": encoder.template_use(columns.format),
        "train_on": "all" if columns.format == "text" else config.train_on,
        "rows_read": out.rows,
        "rows_skipped": sum(out.skipped.values()),
        "skipped_because": dict(out.skipped),
        "rows_cut": out.cut,
        "train_examples": out.train_examples,
        "eval_examples": out.eval_examples,
        "max_seq_len": config.max_seq_len,
        "packing": train.packed,
        "train_rows": len(train),
        "eval_rows": len(held_out),
        "train_tokens": tokens,
        "train_loss_tokens": loss_tokens,
        "eval_tokens": held_out.tokens,
        "eval_loss_tokens": held_out.loss_tokens,
        "percent_trained": round(100 * loss_tokens / tokens, 1),
        "tokens_per_example": {"mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())},
        "tokens_per_row": round(tokens / len(train), 1),
        "warnings": _warnings(config, columns, encoder, out, packing_allowed),
    }


def _warnings(config: DataConfig, columns: ColumnMap, encoder: Encoder, out: _Collected,
              packing_allowed: bool) -> list[str]:
    found = encoder.renderer.warning_sentences()
    found += [f"Rows skipped because {reason}: {count:,} (first in {out.first_skipped[reason]})."
              for reason, count in out.skipped.items()]
    if out.cut:
        found.append(f"Rows cut because they are longer than data.max_seq_len {config.max_seq_len}: {out.cut:,}.")
    if config.packing and not packing_allowed:
        found.append("Packing is off, because this model's layers cannot keep packed examples apart.")
    if config.split != DataConfig.split and (path := resolve_source(config.source)) is not None and path.is_file():
        found.append(f"data.split {config.split} is not used: a file has no splits.")
    if config.eval_fraction > 0 and not out.eval:
        found.append("No row is held out, because there is only one.")
    if encoder.tokenizer.eos_token_id is None and encoder.template_use(columns.format) == "none":
        found.append("The tokenizer has no end-of-sequence token, so the model cannot learn where to stop.")
    return found
