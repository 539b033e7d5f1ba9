"""What a person is told of a prepared data set."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.encode import Encoder
from engine.data.render import warning_sentences
from engine.data.rows import RowSet
from engine.data.sources import notes_on
from engine.data.token_cache import StoredTokens, Tally


@dataclass(frozen=True)
class Part:
    """One source of a mix, or the only one."""

    config: DataConfig
    weight: float
    tokens: StoredTokens

    @property
    def tally(self) -> Tally:
        return self.tokens.tally

    @property
    def held_out(self) -> int:
        """Examples that are held out."""
        return len(self.tokens.eval.examples) - 1

    def visits(self) -> int:
        """Training examples that an epoch takes from this source, at least one."""
        return max(1, round(self.weight * (len(self.tokens.train.examples) - 1)))


def summary_of(
    config: DataConfig,
    parts: list[Part],
    encoder: Encoder,
    train: RowSet,
    held_out: RowSet,
    packing_problem: str,
) -> dict[str, Any]:
    lengths = np.diff(train.starts)
    tokens, loss_tokens = train.tokens, train.loss_tokens
    formats = list(dict.fromkeys(part.tally.columns.format for part in parts))
    counts = [_counts(part) for part in parts]
    return {
        "source": parts[0].tally.name if len(parts) == 1 else config.title,
        "format": ", ".join(formats),
        "format_detected": any(part.tally.columns.detected for part in parts),
        "columns": {
            column: said for part in parts for column, said in part.tally.columns.meaning().items()
        },
        "unused_columns": list(
            dict.fromkeys(name for part in parts for name in part.tally.columns.unused)
        ),
        "chat_template": ", ".join(dict.fromkeys(encoder.template_use(name) for name in formats)),
        "train_on": "all" if formats == ["text"] else config.train_on,
        **({"sources": counts} if len(parts) > 1 else {}),
        "cached": all(part.tokens.cached for part in parts),
        "rows_read": sum(count["rows_read"] for count in counts),
        "rows_skipped": sum(count["rows_skipped"] for count in counts),
        "skipped_because": dict(sum((part.tally.skipped for part in parts), Counter())),
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
        "tokens_per_example": {
            "mean": round(float(lengths.mean()), 1),
            "longest": int(lengths.max()),
        },
        "tokens_per_row": round(tokens / len(train), 1),
        "warnings": _warnings(config, parts, encoder, packing_problem),
    }


def _counts(part: Part) -> dict[str, Any]:
    """What became of one source. `train_examples` are those that an epoch visits, one as often as
    it does.
    """
    tally = part.tally
    return {
        "source": tally.name,
        "format": part.tally.columns.format,
        "weight": part.weight,
        "rows_read": tally.rows,
        "rows_skipped": sum(tally.skipped.values()),
        "rows_cut": tally.cut,
        "train_examples": part.visits(),
        "eval_examples": part.held_out,
    }


def _warnings(
    config: DataConfig, parts: list[Part], encoder: Encoder, packing_problem: str
) -> list[str]:
    found = warning_sentences(sum((part.tally.warnings for part in parts), Counter()))
    for part in parts:
        tally, of = part.tally, f" of {part.tally.name}" if len(parts) > 1 else ""
        found += [
            f"Rows{of} skipped because {reason}: {count:,} (first in "
            f"{tally.first_skipped[reason]})."
            for reason, count in tally.skipped.items()
        ]
        if tally.cut:
            found.append(
                f"Rows{of} cut because they are longer than data.max_seq_len {config.max_seq_len}: "
                f"{tally.cut:,}."
            )
        found += notes_on(part.config)
        if config.eval_fraction > 0 and not part.held_out:
            found.append(f"No row{of} is held out, because there is only one.")
    if config.packing and packing_problem:
        found.append(f"Packing is off, one example a row ({packing_problem}).")
    if encoder.tokenizer.eos_token_id is None and any(
        encoder.template_use(part.tally.columns.format) == "none" for part in parts
    ):
        found.append(
            "The tokenizer has no end-of-sequence token, so the model cannot learn where to stop."
        )
    return found
