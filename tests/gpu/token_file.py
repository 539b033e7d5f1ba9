"""A token file holds the tokens of texts, for trainings where there is neither network nor text:
`python -m tests.gpu.token_file TOKENIZER.json OUT.npz FOLDER...`.

Every `.txt` file under the folders is a document. Documents come in an order that depends on their
paths alone, each followed by the end-of-text token, until there are enough for training
(`--training`). Those after them are for validation (`--held-out`). So no document is in both parts.

The file is a zip of numpy arrays that `numpy.load` reads: `low` (uint16, the lower bits of the
tokens), `high` (uint8, the upper ones) and `held_out` (how many of the last
tokens are for validation).
"""

from __future__ import annotations

import argparse
import hashlib
import io
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

END_OF_TEXT = "<|endoftext|>"
AT_ONCE = 256
"""This many documents are tokenized at once."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of a token file."""

    training: np.ndarray
    """Tokens of documents that are trained on, int32 [n]."""
    validation: np.ndarray
    """Tokens of the other documents, int32 [n]."""


def write_tokens(path: Path, training: np.ndarray, validation: np.ndarray) -> None:
    """Writes a token file. The tokens are integers below 2**24, each [n]."""
    tokens = np.concatenate([training, validation]).astype(np.uint32)
    arrays = {
        "low": (tokens & 0xFFFF).astype(np.uint16),
        "high": (tokens >> 16).astype(np.uint8),
        "held_out": np.array(len(validation)),
    }
    # numpy's own compression takes a third more.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as held:
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            held.writestr(f"{name}.npy", buffer.getvalue())


def read_tokens(path: Path) -> Tokens:
    """Returns the tokens of a file that `write_tokens` wrote."""
    with np.load(path) as held:
        tokens = held["high"].astype(np.int32) << 16 | held["low"].astype(np.int32)
        first_validation = len(tokens) - int(held["held_out"])
    return Tokens(tokens[:first_validation], tokens[first_validation:])


def in_order(folders: list[Path]) -> list[Path]:
    """Returns the documents of some folders, in an order that depends on their paths alone."""
    found = []
    for folder in folders:
        for path in folder.rglob("*.txt"):
            name = path.relative_to(folder).as_posix()
            found.append((hashlib.blake2b(name.encode()).digest(), path))
    return [path for _, path in sorted(found)]


def tokenized(tokenizer: Path, documents: list[Path]) -> Iterator[list[int]]:
    """Yields the tokens of each document, with the end-of-text token behind them."""
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer))
    end = encoder.token_to_id(END_OF_TEXT)
    for start in range(0, len(documents), AT_ONCE):
        texts = [
            path.read_text(encoding="utf-8", errors="replace")
            for path in documents[start : start + AT_ONCE]
        ]
        for encoded in encoder.encode_batch(texts, add_special_tokens=False):
            yield [*encoded.ids, end]


def take(documents: Iterator[list[int]], count: int) -> np.ndarray:
    """Returns the first `count` tokens of documents, int32 [count]. Of the last one it may be only
    the beginning: the rest is left out.
    """
    taken: list[int] = []
    while len(taken) < count:
        tokens = next(documents, None)
        if tokens is None:
            raise SystemExit(f"the texts have too few tokens: {len(taken):,} of {count:,}")
        taken += tokens
    return np.array(taken[:count], dtype=np.int32)


def main() -> None:
    """Makes a token file from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, help="the tokenizer.json of a model")
    parser.add_argument("out", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--training", type=int, default=16_400_000, help="tokens to train on")
    parser.add_argument("--held-out", type=int, default=140_000, help="tokens to evaluate on")
    given = parser.parse_args()
    documents = tokenized(given.tokenizer, in_order(given.folders))
    training = take(documents, given.training)
    validation = take(documents, given.held_out)
    write_tokens(given.out, training, validation)
    print(
        f"{len(training):,} tokens to train on and {len(validation):,} for validation, "
        f"the largest is {max(training.max(), validation.max()):,}; "
        f"{given.out.stat().st_size / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
