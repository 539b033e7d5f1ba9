"""What the app shows of a data set before a run: the first rows as text, with what is trained
marked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.encode import Document, Encoder
from engine.data.encoded import Numbered, encode_rows
from engine.data.formats import ROWS_TO_DETECT, ColumnMap, map_columns
from engine.data.packing import pack
from engine.data.render import Skipped, warning_sentences
from engine.data.sources import Source, notes_on, open_source, refuse_missing_file
from engine.errors import DataError
from engine.paths import resolve_source

_ROWS_MEASURED = 200
_BINS = 20


def shown_rows(
    config: DataConfig,
    tokenizer: Any,
    rows: int,
    opened: list[tuple[Source, ColumnMap, list[Numbered]]],
) -> dict[str, Any]:
    """The first `rows` of sources that are open, each with its columns and the rows read of it, and
    what all of these come to.

    Keys: `source`, `format`, `format_detected`, `columns`, `unused_columns`, `chat_template`,
    `max_seq_len`, `rows` (each `{where, tokens, trained_tokens, cut, skipped, documents: [[{text,
    trained}]]}`), `rows_measured`, `rows_cut`, `rows_skipped`, `percent_trained`, `lengths` (tokens
    of each measured row before the cut), `histogram` `{edges, counts}` of these, `packed_rows`
    (that the measured examples come to when they share rows, None where they do not) and
    `percent_filled` of these, and `warnings`.
    """
    encoder = Encoder(tokenizer, config.train_on, config.max_seq_len)
    parts = config.parts()
    shown: list[dict[str, Any]] = []
    lengths: list[int] = []
    tokens = trained = cut = skipped = 0
    for place, (source, columns, read) in enumerate(opened):
        # Every source shows its first rows, as evenly as `rows` allows.
        most = rows * (place + 1) // len(opened)
        for (_, _, where), found in zip(read, encode_rows(encoder, columns, read)):
            kept = [] if isinstance(found, Skipped) else found.documents
            row = {
                "where": where,
                "tokens": sum(len(d.ids) for d in kept),
                "trained_tokens": sum(int(d.trained.sum()) for d in kept),
                "cut": not isinstance(found, Skipped) and found.cut,
                "skipped": found.reason if isinstance(found, Skipped) else None,
                "documents": [_pieces(d, tokenizer) for d in kept] if len(shown) < most else [],
            }
            if len(shown) < most:
                shown.append(row)
            tokens, trained = tokens + row["tokens"], trained + row["trained_tokens"]
            cut, skipped = cut + row["cut"], skipped + (row["skipped"] is not None)
            lengths.extend(d.length for d in kept)
    counts, edges = _histogram(lengths)
    packed, filled = _packed(lengths, config) if lengths and config.packing else (None, None)
    return {
        "source": opened[0][0].name if len(opened) == 1 else config.title,
        "format": ", ".join(dict.fromkeys(columns.format for _, columns, _ in opened)),
        "format_detected": any(columns.detected for _, columns, _ in opened),
        "columns": {
            name: said for _, columns, _ in opened for name, said in columns.meaning().items()
        },
        "unused_columns": list(
            dict.fromkeys(name for _, columns, _ in opened for name in columns.unused)
        ),
        "chat_template": ", ".join(
            dict.fromkeys(encoder.template_use(columns.format) for _, columns, _ in opened)
        ),
        "max_seq_len": config.max_seq_len,
        "rows": shown,
        "rows_measured": sum(len(read) for _, _, read in opened),
        "rows_cut": cut,
        "rows_skipped": skipped,
        "percent_trained": round(100 * trained / tokens, 1) if tokens else 0.0,
        "lengths": lengths,
        "histogram": {"edges": edges, "counts": counts},
        "packed_rows": packed,
        "percent_filled": filled,
        "warnings": [
            *warning_sentences(encoder.renderer.warnings),
            *(note for part, _ in parts for note in notes_on(part)),
        ],
    }


def _histogram(lengths: list[int]) -> tuple[list[int], list[int]]:
    """(how many lengths from one edge to before the next, the edges): whole numbers, about `_BINS`
    of them.
    """
    if not lengths:
        return [], []
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // _BINS)
    edges = list(range(low, high + width + 1, width))
    return np.histogram(lengths, bins=edges)[0].tolist(), edges


def _packed(lengths: list[int], config: DataConfig) -> tuple[int, float]:
    """(rows that these documents share, per cent of the rows' positions that are tokens)."""
    kept = np.minimum(np.array(lengths, dtype=np.int64), config.max_seq_len)
    rows = len(pack(kept, config.max_seq_len, np.arange(len(kept))))
    return rows, round(100 * float(kept.sum()) / (rows * config.max_seq_len), 1)


def read_parts(
    config: DataConfig, rows: int
) -> Iterator[tuple[DataConfig, Source, list[Numbered]]]:
    """Each source by its own settings, with the rows of it that a preview of `rows` reads. Raises
    DataError where there are none.
    """
    parts = config.parts()
    count = max(rows, ROWS_TO_DETECT, -(-_ROWS_MEASURED // len(parts)))
    for part, _ in parts:
        yield part, *_first(part, count)


def check_first_rows(config: DataConfig) -> None:
    """Raises DataError where the first rows of a source on this machine cannot be read as a run
    would read them, which takes a moment to find. Data sets of a hub are left to the run.
    """
    for part, _ in config.parts():
        refuse_missing_file(part.source)
        if resolve_source(part.source) is not None:
            source, read = _first(part, ROWS_TO_DETECT)
            map_columns(part.format, [row for _, row, _ in read], source, part.columns)


def _first(part: DataConfig, count: int) -> tuple[Source, list[Numbered]]:
    source = open_source(part, streaming=True)
    read = [
        (number, row, source.where(number))
        for number, row in itertools.islice(source.read(), count)
    ]
    if not read:
        raise DataError(f"{source.name} has no rows; give a data set with at least one.")
    return source, read


def _pieces(document: Document, tokenizer: Any) -> list[dict[str, Any]]:
    """The document's text, cut where training begins or ends. Pieces are differences of decoded
    beginnings, because decoding a piece alone loses its first space with some tokenizers.
    """
    edges = [0, *(np.flatnonzero(np.diff(document.trained)) + 1).tolist(), len(document.ids)]
    pieces, before = [], ""
    for start, end in zip(edges, edges[1:]):
        text = tokenizer.decode(document.ids[:end].tolist(), clean_up_tokenization_spaces=False)
        pieces.append({"text": text[len(before) :], "trained": bool(document.trained[start])})
        before = text
    return pieces
