"""The summary of a prepared data set for the user."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.batches.rows import RowSets
from engine.data.formats.values import legible
from engine.data.sources.open_source import notes_on
from engine.data.tokens.encode import Encoder
from engine.data.tokens.render import NO_END
from engine.data.tokens.rendered import warning_sentences
from engine.data.tokens.token_cache import StoredTokens, Tally
from engine.data.tokens.trained_ends import ENDS, seen_ends, without_end


@dataclass(frozen=True)
class Part:
    """One source of a mix, or the only source."""

    config: DataConfig
    weight: float
    tokens: StoredTokens

    @property
    def tally(self) -> Tally:
        return self.tokens.tally

    @property
    def validation(self) -> int:
        """Number of validation examples."""
        return len(self.tokens.eval.examples) - 1

    def visits(self) -> int:
        """Counts the training examples that an epoch takes from this source, at least one."""
        return max(1, round(self.weight * (len(self.tokens.train.examples) - 1)))


def summary_of(
    config: DataConfig, parts: list[Part], encoder: Encoder, rows: RowSets, packing_problem: str
) -> dict[str, Any]:
    """Returns the summary of a data set, with the names used in the record."""
    train, validation = rows.train, rows.validation
    lengths = np.diff(train.starts)
    tokens, loss_tokens = train.tokens, train.loss_tokens
    formats = list(dict.fromkeys(part.tally.columns.format for part in parts))
    templates = dict.fromkeys(encoder.template_use(name) for name in formats)
    columns: dict[str, str] = {}
    unused: dict[str, None] = {}
    for part in parts:
        columns.update(part.tally.columns.meaning())
        unused.update(dict.fromkeys(part.tally.columns.unused))
    counts = [_counts(part) for part in parts]
    skipped: Counter[str] = sum((part.tally.skipped for part in parts), Counter())
    return {
        "source": parts[0].tally.name if len(parts) == 1 else config.title,
        "format": ", ".join(formats),
        "format_detected": any(part.tally.columns.detected for part in parts),
        "columns": columns,
        "unused_columns": list(map(legible, unused)),
        "chat_template": ", ".join(templates),
        "train_on": _trained_on(config, formats),
        ENDS: _ends(config, parts, encoder),
        **({"sources": counts} if len(parts) > 1 else {}),
        "cached": all(part.tokens.cached for part in parts),
        "rows_read": sum(count["rows_read"] for count in counts),
        "rows_skipped": sum(count["rows_skipped"] for count in counts),
        "skipped_because": dict(skipped),
        "rows_cut": sum(count["rows_cut"] for count in counts),
        "train_examples": sum(count["train_examples"] for count in counts),
        "eval_examples": sum(count["eval_examples"] for count in counts),
        "max_seq_len": config.max_seq_len,
        "packing": train.packed,
        "train_rows": len(train),
        "eval_rows": len(validation),
        "train_tokens": tokens,
        "train_loss_tokens": loss_tokens,
        "eval_tokens": validation.tokens,
        "eval_loss_tokens": validation.loss_tokens,
        "percent_trained": round(100 * loss_tokens / tokens, 1),
        "tokens_per_example": {
            "mean": round(float(lengths.mean()), 1),
            "longest": int(lengths.max()),
        },
        "tokens_per_row": round(tokens / len(train), 1),
        "warnings": _warnings(config, parts, encoder, packing_problem),
    }


def _trained_on(config: DataConfig, formats: list[str]) -> str:
    """Returns `all` for texts, `rows` where each row has what is trained, or the setting."""
    if formats == ["text"]:
        return "all"
    return "rows" if set(formats) <= {"segments", "tokens"} else config.train_on


def _ends(config: DataConfig, parts: list[Part], encoder: Encoder) -> list[str]:
    """Returns the tokens that end the answers of a data set."""
    found = [end for part in parts for end in part.tally.ends]
    for part in parts:
        if _trained_on(config, [part.tally.columns.format]) in ("assistant", "rows"):
            found += seen_ends(part.tokens.train, encoder.tokenizer, config.max_seq_len)
    return list(dict.fromkeys(found))


def _counts(part: Part) -> dict[str, Any]:
    """Returns the row and example counts of one source. `train_examples` counts an example as often
    as an epoch visits it.
    """
    tally = part.tally
    return {
        "source": tally.name,
        "format": tally.columns.format,
        "weight": part.weight,
        "rows_read": tally.rows,
        "rows_skipped": tally.skipped.total(),
        "rows_cut": tally.cut,
        "train_examples": part.visits(),
        "eval_examples": part.validation,
    }


def _warnings(
    config: DataConfig, parts: list[Part], encoder: Encoder, packing_problem: str
) -> list[str]:
    counts: Counter[str] = sum((part.tally.warnings for part in parts), Counter())
    found = warning_sentences({text: counts[text] for text in counts if text != NO_END})
    formats = [part.tally.columns.format for part in parts]
    found += filter(None, [without_end(encoder, formats, counts[NO_END])])
    for part in parts:
        found += _warnings_on(part, f" of {part.tally.name}" if len(parts) > 1 else "")
    if config.packing and packing_problem:
        found.append(f"Packing is off, one example a row ({packing_problem}).")
    return found


def _warnings_on(part: Part, of_source: str) -> list[str]:
    """Returns the warnings about one source. `of_source` names the source if there are several."""
    config, tally = part.config, part.tally
    found = [
        f"Rows{of_source} skipped because {reason}: {count:,} (first in "
        f"{tally.first_skipped[reason]})."
        for reason, count in tally.skipped.items()
    ]
    if tally.cut:
        found.append(
            f"Rows{of_source} cut because they are longer than data.max_seq_len "
            f"{config.max_seq_len}: {tally.cut:,}."
        )
    found += [*tally.columns.notes, *notes_on(config)]
    if config.eval_fraction > 0 and not part.validation:
        found.append(f"There are no validation rows{of_source}, because there is only one row.")
    return found
