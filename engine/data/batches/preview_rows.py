"""The first rows of a data set as text, with the trained text marked, and totals over them."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.batches.packing import pack
from engine.data.formats.formats import ColumnMap
from engine.data.formats.values import legible
from engine.data.sources.open_source import Source, notes_on
from engine.data.sources.text_files import Passage
from engine.data.tokens.documents import AcceptedExample, Document, TextRows
from engine.data.tokens.encode import Encoder
from engine.data.tokens.encoded import Numbered, encode_rows
from engine.data.tokens.render import NO_END
from engine.data.tokens.rendered import RejectedExample, warning_sentences
from engine.data.tokens.trained_ends import without_end, written_ends
from engine.text import counted

_BINS = 20


@dataclass(frozen=True)
class Opened:
    """A source whose first rows have been read."""

    source: Source
    columns: ColumnMap
    first_rows: list[Numbered]
    has_more: bool
    """Whether rows may follow that were not read."""


@dataclass
class _Measured:
    """Totals over the measured rows."""

    lengths: list[int] = field(default_factory=list)
    """The length of each document in tokens, before the cut."""
    tokens: int = 0
    trained_tokens: int = 0
    cut: int = 0
    skipped: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    """Reasons for which rows were skipped."""
    text_rows: list[int] = field(default_factory=list)
    """Number of rows that each plain text gives, as far as it was read."""
    text_bytes: int = 0
    """Number of bytes of the passages of plain texts that were read."""

    def add(self, found: AcceptedExample | RejectedExample) -> None:
        if isinstance(found, RejectedExample):
            self.skipped += 1
            self.reasons[found.reason] += 1
            return
        self.cut += found.cut
        for document in found.documents:
            self.tokens += len(document.ids)
            self.trained_tokens += int(document.loss_mask.sum())
            self.lengths.append(document.length)

    def add_text(self, row: dict[str, Any], found: AcceptedExample | RejectedExample) -> None:
        """Adds a row of plain text, or a passage of one."""
        self.add(found)
        if isinstance(row, Passage):
            self.text_bytes += len(row["text"].encode())
        if not isinstance(row, Passage) or not row.before:
            self.text_rows.append(0)
        if isinstance(found, AcceptedExample):
            self.text_rows[-1] += len(found.documents)


def plain_rows(rows: int, opened: list[Opened]) -> dict[str, Any]:
    """Returns `texts`, the first `rows` rows of the sources as they are: `{where, text}` of each,
    with a line for each of its columns.
    """
    texts: list[dict[str, str]] = []
    for place, part in enumerate(opened):
        most = rows * (place + 1) // len(opened)
        for _, row, where in part.first_rows[: most - len(texts)]:
            texts.append({"where": where, "text": _in_lines(row)})
    return {"texts": texts}


def _in_lines(row: Any) -> str:
    columns = row.items() if isinstance(row, dict) else [("text", row)]
    return "\n".join(f"{legible(str(name))}: {_as_text(value)}" for name, value in columns)


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def shown_rows(
    config: DataConfig, tokenizer: Any, rows: int, opened: list[Opened]
) -> dict[str, Any]:
    """Returns the first `rows` rows of the sources, and totals over all rows that were read.

    - `source`, `format`, `format_detected`, `columns`, `unused_columns`, `chat_template` and
      `max_seq_len` say how the rows are read.
    - `rows` has each shown row as `{where, tokens, trained_tokens, cut, skipped, documents}`, where
      a document is a list of `{text, trained}`, of a pair `{text, trained, answer}`, and where an
      answer has a weight of its own `{text, trained, weight}`.
    - `rows_measured`, `rows_cut`, `rows_skipped` and `percent_trained` cover all rows that were
      read.
    - `lengths` has the length of each measured document in tokens, before the cut, and `histogram`
      is `{edges, counts}` of these lengths.
    - `packed_rows` is the number of rows that the measured documents fill when packed (None without
      packing), and `percent_filled` is the share of their positions that are tokens.
    - `text_rows` is a sentence on how many rows plain texts give, or an empty text.
    - `untrainable` is a sentence if none of these rows has a token to train on, or an empty text;
      `has_more` is whether rows may follow that were not read.
    - `ends` has the tokens that end an answer; `endless` is a sentence if none does, or an empty
      text.
    - `warnings` is a list of sentences.
    """
    encoder = Encoder.of(config, tokenizer)
    shown: list[dict[str, Any]] = []
    measured = _Measured()
    for place, part in enumerate(opened):
        # The first rows of every source are shown, as evenly as `rows` allows.
        most = rows * (place + 1) // len(opened)
        # A run reports such keys before it reads what else the rows of a source have.
        placed = ((row, where) for _, row, where in part.first_rows)
        part.columns.refuse_possible_flags(placed, part.source.name)
        encoded = encode_rows(encoder, part.columns, part.first_rows)
        texts = TextRows(config) if part.columns.format == "text" else None
        for (_, row, where), each in zip(part.first_rows, encoded):
            if texts is None:
                found = each
                measured.add(found)
            else:
                found = texts.of_row(row, each)
                measured.add_text(row, found)
            is_waiting = isinstance(found, AcceptedExample) and not found.documents
            if len(shown) < most and not is_waiting:
                shown.append(_shown_row(where, found, tokenizer))
    warnings = encoder.renderer.take_warnings()
    return {
        **_how_read(config, encoder, opened),
        "max_seq_len": config.max_seq_len,
        "rows": shown,
        "rows_measured": sum(len(part.first_rows) for part in opened),
        "rows_cut": measured.cut,
        "rows_skipped": measured.skipped,
        **_figures(measured, config),
        "text_rows": _text_rows(measured, config, opened),
        "untrainable": _untrainable(measured),
        "ends": list(written_ends(encoder, [part.columns.format for part in opened])),
        "endless": without_end(encoder, [part.columns.format for part in opened], warnings[NO_END]),
        "has_more": any(part.has_more for part in opened),
        "warnings": _warnings(config, warnings, [part.columns for part in opened]),
    }


def _text_rows(measured: _Measured, config: DataConfig, opened: list[Opened]) -> str:
    """Returns a sentence on how many rows plain texts give, where one gives several, or an empty
    text. Of files that were not read to their end, it is an estimate.
    """
    rows = sum(measured.text_rows)
    if rows <= len(measured.text_rows):
        return ""
    long = f"of at most {config.max_seq_len:,} tokens"
    sizes = [part.source.text_bytes for part in opened]
    if any(part.has_more for part in opened) and measured.text_bytes and None not in sizes:
        in_all = round(rows * sum(size or 0 for size in sizes) / measured.text_bytes)
        return f"All of the text gives about {counted(in_all, 'row')} {long}."
    texts = counted(len(measured.text_rows), "text")
    verb = "gives" if len(measured.text_rows) == 1 else "give"
    text = f"The first {texts} {verb} {counted(rows, 'row')} {long}"
    if len(measured.text_rows) > 1:
        text += f", the longest one {counted(max(measured.text_rows), 'row')}"
    return f"{text}."


def _untrainable(measured: _Measured) -> str:
    """Returns a sentence if no row has a token to train on, or an empty text."""
    if measured.trained_tokens:
        return ""
    which = "The row that was read has no token to train on"
    if measured.skipped != 1:
        which = f"None of the {measured.skipped:,} rows that were read has a token to train on"
    if not measured.reasons:
        return f"{which}."
    reason, _ = measured.reasons.most_common(1)[0]
    return f"{which}, mostly because {reason}; change the data, data.format or data.train_on."


def _shown_row(
    where: str, found: AcceptedExample | RejectedExample, tokenizer: Any
) -> dict[str, Any]:
    row = _Measured()
    row.add(found)
    documents = [] if isinstance(found, RejectedExample) else found.documents
    spans = [_spans(document, tokenizer) for document in documents]
    if len(documents) == 2 and documents[0].reference is not None:
        spans = _pair_spans(spans)
    elif documents and documents[0].reference is not None:
        answer = "good" if documents[0].reference else "bad"
        for span in spans[0]:
            span.update({"answer": answer} if span["trained"] else {})
    return {
        "where": where,
        "tokens": row.tokens,
        "trained_tokens": row.trained_tokens,
        "cut": row.cut > 0,
        "skipped": found.reason if isinstance(found, RejectedExample) else None,
        "documents": spans,
    }


def _pair_spans(answers: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Returns the spans of the chosen answer behind its prompt, then those of the rejected answer
    alone. `answers` has the rejected one first. Each trained span is marked with its answer.
    """
    rejected, chosen = answers
    first = next(place for place, span in enumerate(rejected) if span["trained"])
    found = []
    for name, spans in (("chosen", chosen), ("rejected", rejected[first:])):
        answer = {"answer": name}
        for span in spans:
            span.update(answer if span["trained"] else {})
        found.append(spans)
    return found


def _how_read(config: DataConfig, encoder: Encoder, opened: list[Opened]) -> dict[str, Any]:
    maps = [part.columns for part in opened]
    templates = [encoder.template_use(columns.format) for columns in maps]
    meaning: dict[str, str] = {}
    for columns in maps:
        meaning.update(columns.meaning())
    unused = itertools.chain.from_iterable(columns.unused for columns in maps)
    return {
        "source": opened[0].source.name if len(opened) == 1 else config.title,
        "format": ", ".join(dict.fromkeys(columns.format for columns in maps)),
        "format_detected": any(columns.detected for columns in maps),
        "columns": meaning,
        "unused_columns": list(dict.fromkeys(map(legible, unused))),
        "chat_template": ", ".join(dict.fromkeys(templates)),
    }


def _figures(measured: _Measured, config: DataConfig) -> dict[str, Any]:
    counts, edges = _histogram(measured.lengths)
    percent_trained = 0.0
    if measured.tokens:
        percent_trained = round(100 * measured.trained_tokens / measured.tokens, 1)
    packed_rows: int | None = None
    percent_filled: float | None = None
    if measured.lengths and config.packing and config.reads == "examples":
        packed_rows, percent_filled = _packed(measured.lengths, config)
    return {
        "percent_trained": percent_trained,
        "lengths": measured.lengths,
        "histogram": {"edges": edges, "counts": counts},
        "packed_rows": packed_rows,
        "percent_filled": percent_filled,
    }


def _warnings(config: DataConfig, counts: Counter[str], maps: list[ColumnMap]) -> list[str]:
    found = warning_sentences({text: counts[text] for text in counts if text != NO_END})
    for part, columns in zip(config.parts(), maps):
        found += [*columns.notes, *notes_on(part[0])]
    return found


def _histogram(lengths: list[int]) -> tuple[list[int], list[int]]:
    """Returns (counts, edges). Each count is the number of lengths from one edge up to, but not
    including, the next. The edges are about `_BINS` whole numbers.
    """
    if not lengths:
        return [], []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // _BINS)
    edges = list(range(low, high + width + 1, width))
    return np.histogram(lengths, bins=edges)[0].tolist(), edges


def _packed(lengths: list[int], config: DataConfig) -> tuple[int, float]:
    """Returns (number of rows that these documents share, percentage of the rows' positions that
    are tokens).
    """
    kept = np.minimum(np.array(lengths, dtype=np.int64), config.max_seq_len)
    rows = len(pack(kept, config.max_seq_len, np.arange(len(kept))))
    return rows, round(100 * float(kept.sum()) / (rows * config.max_seq_len), 1)


def _spans(document: Document, tokenizer: Any) -> list[dict[str, Any]]:
    """Returns the document's text, split where trained text begins or ends, or its weight changes.
    Each span is the difference between two decoded prefixes, because some tokenizers drop the
    leading space of a span decoded alone.
    """
    weights = document.loss_mask.astype(np.float32)
    if document.weights is not None:
        weights *= document.weights
    changes = np.flatnonzero(np.diff(weights)) + 1
    edges = [0, *changes.tolist(), len(document.ids)]
    spans = []
    before = ""
    for start, end in itertools.pairwise(edges):
        text = tokenizer.decode(document.ids[:end].tolist(), clean_up_tokenization_spaces=False)
        span = {"text": text[len(before) :], "trained": bool(document.loss_mask[start])}
        if weights[start] not in (0, 1):
            span["weight"] = float(f"{weights[start]:.7g}")
        spans.append(span)
        before = text
    return spans
