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

    train: list[list[Document]] = field(default_factory=list)
    """The documents of each example."""
    eval: list[Document] = field(default_factory=list)
    eval_examples: int = 0
    rows: int = 0
    cut: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first_skipped: dict[str, str] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)


@dataclass(frozen=True)
class _Part:
    """One source of a mix, or the only one."""

    config: DataConfig
    weight: float
    source: Source
    columns: ColumnMap
    out: _Collected

    def visits(self) -> int:
        """Training examples that an epoch takes from this source, at least one."""
        return max(1, round(self.weight * len(self.out.train)))

    def visited(self) -> list[Document]:
        """Their documents: whole passes, then as many examples more as are missing, always the same ones."""
        passes, more = divmod(self.visits(), len(self.out.train))
        chosen = np.random.default_rng(_EVAL_SEED).permutation(len(self.out.train))[:more]
        examples = self.out.train * passes + [self.out.train[i] for i in sorted(chosen.tolist())]
        return [document for example in examples for document in example]


def prepare_data(config: DataConfig, tokenizer: Any, seed: int, packing_problem: str = "",
                 progress: Progress | None = None) -> PreparedData:
    """Read, render, tokenise, split and pack the data set of `config`.

    `tokenizer` is a fast tokenizer of transformers; `seed` sets the order of the rows, not the choice of the held-out
    ones; `packing_problem`, the name of the model and why it cannot pack, keeps one example a row whatever the
    configuration says. Raises DataError, in one sentence, when the data cannot be read or trains on no token."""
    encoder = Encoder(tokenizer, config.train_on, config.max_seq_len)
    parts = [_part(part, weight, encoder, progress) for part, weight in config.parts()]
    packed = config.packing and not packing_problem
    pad_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    train = _rows([document for part in parts for document in part.visited()], config, packed, pad_id, seed)
    held_out = _rows([document for part in parts for document in part.out.eval], config, packed, pad_id, seed)
    summary = _summary(config, parts, encoder, train, held_out, packing_problem)
    prompts = _alternating([part.out.prompts for part in parts])
    return PreparedData(summary, train, held_out, _fingerprint(train, held_out), prompts)


def _part(config: DataConfig, weight: float, encoder: Encoder, progress: Progress | None) -> _Part:
    source = open_source(config)
    first = [row for _, row in itertools.islice(source.read(), _ROWS_TO_DETECT)]
    if not first:
        raise DataError(f"{source.name} has no rows; give a data set with at least one.")
    columns = map_columns(config.format, first, source)
    out = _collect(source, columns, encoder, config, encoder.tokenizer, progress)
    if not out.train:
        raise DataError(_nothing_left(source, out))
    return _Part(config, weight, source, columns, out)


def _alternating(lists: list[list[Prompt]]) -> list[Prompt]:
    """The first of each list, the second of each, and so on: a few questions then speak for every source."""
    return [prompt for group in itertools.zip_longest(*lists) for prompt in group if prompt is not None]


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
            out.train.append(documents)
            last = example, documents
    if config.eval_fraction > 0 and not out.eval and len(out.train) > 1 and last is not None:
        del out.train[-1]  # every row meant to be held out was skipped
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


def _summary(config: DataConfig, parts: list[_Part], encoder: Encoder, train: RowSet, held_out: RowSet,
             packing_problem: str) -> dict[str, Any]:
    lengths = np.diff(train.starts)
    tokens, loss_tokens = train.tokens, train.loss_tokens
    formats = list(dict.fromkeys(part.columns.format for part in parts))
    counts = [_counts(part) for part in parts]
    return {
        "source": parts[0].source.name if len(parts) == 1 else config.title,
        "format": ", ".join(formats),
        "format_detected": any(part.columns.detected for part in parts),
        "columns": {column: said for part in parts for column, said in part.columns.meaning().items()},
        "unused_columns": list(dict.fromkeys(name for part in parts for name in part.columns.unused)),
        "chat_template": ", ".join(dict.fromkeys(encoder.template_use(name) for name in formats)),
        "train_on": "all" if formats == ["text"] else config.train_on,
        **({"sources": counts} if len(parts) > 1 else {}),
        "rows_read": sum(count["rows_read"] for count in counts),
        "rows_skipped": sum(count["rows_skipped"] for count in counts),
        "skipped_because": dict(sum((part.out.skipped for part in parts), Counter())),
        "rows_cut": sum(count["rows_cut"] for count in counts),
        "train_examples": sum(count["train_examples"] for count in counts),
        "eval_examples": sum(count["eval_examples"] for count in counts),
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
        "warnings": _warnings(config, parts, encoder, packing_problem),
    }


def _counts(part: _Part) -> dict[str, Any]:
    """What became of one source. `train_examples` are those that an epoch visits, one as often as it does."""
    out = part.out
    return {"source": part.source.name, "format": part.columns.format, "weight": part.weight, "rows_read": out.rows,
            "rows_skipped": sum(out.skipped.values()), "rows_cut": out.cut, "train_examples": part.visits(),
            "eval_examples": out.eval_examples}


def _warnings(config: DataConfig, parts: list[_Part], encoder: Encoder, packing_problem: str) -> list[str]:
    found = encoder.renderer.warning_sentences()
    for part in parts:
        out, of = part.out, f" of {part.source.name}" if len(parts) > 1 else ""
        found += [f"Rows{of} skipped because {reason}: {count:,} (first in {out.first_skipped[reason]})."
                  for reason, count in out.skipped.items()]
        if out.cut:
            found.append(f"Rows{of} cut because they are longer than data.max_seq_len {config.max_seq_len}: {out.cut:,}.")
        path = resolve_source(part.config.source)
        if part.config.split != DataConfig.split and path is not None and path.is_file():
            found.append(f"data.split {part.config.split} is not used: a file has no splits.")
        if config.eval_fraction > 0 and not out.eval:
            found.append(f"No row{of} is held out, because there is only one.")
    if config.packing and packing_problem:
        found.append(f"Packing is off, one example a row ({packing_problem}).")
    if encoder.tokenizer.eos_token_id is None and any(encoder.template_use(part.columns.format) == "none"
                                                      for part in parts):
        found.append("The tokenizer has no end-of-sequence token, so the model cannot learn where to stop.")
    return found
