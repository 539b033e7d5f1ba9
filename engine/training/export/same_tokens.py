"""Whether an export reads conversations as they were trained.

A tokenizer that was written and is read again, and the vocabulary of a GGUF file, may divide a text
otherwise than the tokenizer that trained did, or write it by another template. The model then sees
tokens that it was not trained on, and only its answers are worse. So the tokens of the first rows
of the run's own data are compared before an export is called good.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.batches.preview import read_parts
from engine.data.formats.example import Single, Text
from engine.data.sources.open_source import refuse_missing_file
from engine.data.tokens.column_survey import map_first
from engine.data.tokens.documents import answers_of
from engine.data.tokens.encode import Encoder, TokenizedText
from engine.data.tokens.encoded import example_of
from engine.data.tokens.rendered import RejectedExample
from engine.errors import first_line
from engine.paths import resolve_source
from engine.runs.summaries.exports import OTHER_TOKENS
from engine.text import counted
from engine.training.export.gguf_reading import GgufReading
from engine.training.export.gguf_tokenizer import Vocabulary

CONVERSATIONS = 10
_CHARACTERS = 20_000
"""Characters of a text that are compared at most."""
_SHOWN = 6
"""Tokens that are shown of a difference."""


def same_tokens(
    data: DataConfig, tokenizer: Any, served: Any = None, file: Vocabulary | None = None
) -> str:
    """Returns a sentence on whether `served`, the tokenizer of an exported folder, and the
    vocabulary of a GGUF `file` give the tokens that were trained with `tokenizer`.
    """
    if served is None and file is None:
        return "Tokens were not compared: the exported tokenizer cannot be read again."
    try:
        examples = list(itertools.islice(_examples(data), CONVERSATIONS))
        if not examples:
            return "Tokens were not compared: the data of the run are not on this machine."
        readers = _Readers(
            tokenizer,
            Encoder.of(data, tokenizer),
            None if served is None else Encoder.of(data, served),
            None if file is None else GgufReading(file),
        )
        compared = 0
        for where, example in examples:
            documents = readers.trained.tokenized(example)
            difference = readers.difference(example, documents)
            if difference:
                return f"{OTHER_TOKENS}: {where} {difference}"
            compared += bool(documents)
    except Exception as error:  # noqa: BLE001  the model is written, whatever the data are
        return f"Tokens were not compared: {first_line(error)}"
    if not compared:
        return "Tokens were not compared: the first rows of the data have no text."
    return f"Checked: {counted(compared, 'row')} of the data give the same tokens as in training."


@dataclass(frozen=True)
class _Readers:
    """What reads the data of a run: as it was trained, and as it will be served."""

    tokenizer: Any
    trained: Encoder
    served: Encoder | None
    """With the exported tokenizer."""
    file: GgufReading | None

    def difference(self, example: Single, documents: list[TokenizedText]) -> str:
        """Returns how an example, of which `documents` were trained, is served otherwise, or an
        empty text.
        """
        found = [] if self.served is None else self.served.tokenized(example)
        for place, document in enumerate(documents):
            difference = ""
            if self.served is not None:
                difference = self._of_tokenizer(document, found[place : place + 1])
            difference = difference or self._of_file(document)
            if difference:
                return difference
        return ""

    def _of_tokenizer(self, trained: TokenizedText, found: list[TokenizedText]) -> str:
        if not found:
            return "is refused by the exported chat template."
        if found[0].text != trained.text:
            return _other_text(trained.text, found[0].text)
        return self._other_tokens(trained.ids, found[0].ids, "the exported tokenizer")

    def _of_file(self, trained: TokenizedText) -> str:
        # Where somebody typed special tokens, no server knows that they were text.
        if self.file is None or trained.is_typed or len(trained.text) > _CHARACTERS:
            return ""
        found = self.file.tokens_of(trained.text)
        if not trained.is_framed:
            found = [*self.file.begins, *found]
        # What was cut off, and the end that is added to a text, are not compared.
        both = min(len(found), len(trained.ids))
        return self._other_tokens(trained.ids[:both], found[:both], "llama.cpp")

    def _other_tokens(self, trained: Sequence[int], found: Sequence[int], who: str) -> str:
        if trained == found:
            return ""
        place = _first_difference(trained, found)
        one, other = (self._shown(ids[place : place + _SHOWN]) for ids in (trained, found))
        return f"differs at token {place + 1:,}: trained {one}, and {who} reads {other}."

    def _shown(self, ids: Sequence[int]) -> str:
        names = self.tokenizer.convert_ids_to_tokens(list(ids))
        return " ".join(f"[{name}]" for name in names) or "nothing more"


def _other_text(trained: str, found: str) -> str:
    place = _first_difference(trained, found)
    one, other = (text[max(0, place - 10) : place + 20] for text in (trained, found))
    return f"is written {other!r} by the exported chat template, and {one!r} was trained."


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    both = enumerate(zip(one, other))
    return next((k for k, (a, b) in both if a != b), min(len(one), len(other)))


def _examples(data: DataConfig) -> Iterator[tuple[str, Single]]:
    """Yields the first examples of the data, each with its place, as far as they are on this
    machine. Raises DataError where they are gone.
    """
    for part, _ in data.parts():
        refuse_missing_file(part.only_source)
        if resolve_source(part.only_source) is None:
            continue  # a data set of the hub is not asked for again
        for read in read_parts(part, CONVERSATIONS):
            columns = map_first(read.config, read.source, [row for _, row, _ in read.rows])
            for _, row, where in read.rows[:CONVERSATIONS]:
                example = example_of(columns, row, where)
                if not isinstance(example, RejectedExample):
                    yield from ((where, _short(each)) for each in answers_of(example))


def _short(example: Single) -> Single:
    return Text(example.text[:_CHARACTERS]) if isinstance(example, Text) else example
