"""Data sets of any format, in files of any kind, changed and damaged: each is trained as it says,
or refused in a plain sentence.

`RAMSTREAM_FUZZ=20000 pytest -n 0 --everything tests/engine/data/test_fuzz.py` invents as many;
`RAMSTREAM_FUZZ_SEED` chooses others.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, seed, settings
from hypothesis import strategies as st

from engine.data.batches.loader import PreparedData, prepare_data
from engine.data.batches.preview import check_first_rows, preview
from engine.errors import RamstreamError
from tests.support import data_tokenizers as made
from tests.support.invented.data_set import DataSet, invented
from tests.support.invented.texts import ANSWER, CONTEXT, NEVER, marks_in
from tests.support.references import FAMILIES, tokenizer

MANY = int(os.environ.get("RAMSTREAM_FUZZ", "100"))
SEED = os.environ.get("RAMSTREAM_FUZZ_SEED")
_MOST_CHARACTERS = 600
_OF_PYTHON = re.compile(
    r"\b(dict|NoneType|ndarray|Traceback|builtins|bytes object|(?!TProtocol)[A-Za-z]*Exception|"
    r"[A-Z][A-Za-z]*Error|Arrow[A-Z][a-z]+|BrokenText)\b|'(str|int|list|float|bool)'"
)
_TEMPLATES = [*made.TEMPLATES, "r1", "upper", None]
_TOLD = re.compile("answer|reasoning|template|turn|token")


@functools.cache
def _tokenizer(name: str) -> Any:
    kind, _, template = name.partition(" ")
    if kind == "family":
        return tokenizer(template)
    others = {"r1": made.R1, "upper": made.UPPER, "none": None}
    text = others[template] if template in others else made.TEMPLATES[template]
    if kind == "bytes":
        return made.byte_level_tokenizer(text)
    if kind == "trimmed":
        return made.byte_level_tokenizer(text, trim_offsets=True, bos=True)
    return made.sentencepiece_tokenizer(text, legacy=kind == "legacy")


TOKENIZERS = [
    *(f"{kind} {name or 'none'}" for kind in ("bytes", "sentencepiece") for name in _TEMPLATES),
    *("trimmed chatml", "trimmed none", "legacy mistral", "legacy none"),
    *(f"family {name}" for name in FAMILIES),
]


def _end(work: Callable[[], Any]) -> tuple[Any, str]:
    """Returns a result, or the sentence with which the work was refused."""
    try:
        return work(), ""
    except RamstreamError as error:
        sentence = str(error)
    _check_sentence(sentence)
    return None, sentence


def _check_sentence(sentence: str) -> None:
    assert sentence.endswith("."), sentence
    assert len(sentence.splitlines()) == 1, sentence
    assert len(sentence) <= _MOST_CHARACTERS, sentence
    assert not _OF_PYTHON.search(sentence), sentence
    sentence.encode()


def check(data: DataSet, tokenizer: Any) -> str:
    """Checks all that holds of any data set. Returns how it ended, in a word."""
    shown, refused = _end(lambda: preview(data.config, tokenizer, rows=200))
    prepared, problem = _end(lambda: prepare_data(data.config, tokenizer, seed=1))
    _, early = _end(lambda: check_first_rows(data.config))
    if shown is not None:
        msgspec.json.encode(shown)  # the page gets it so
    if prepared is not None:
        msgspec.json.encode(prepared.summary)  # the record has it so
        for warning in prepared.summary["warnings"]:
            _check_sentence(warning)
    _check_agreement(data, shown, refused or (shown or {}).get("error", ""), problem)
    if early:
        assert problem == early
    if prepared is None:
        return "refused"
    _check_marks(data, prepared, tokenizer)
    if data.is_whole and not problem:
        _check_answers(data, shown)
    return "trained"


def _check_agreement(data: DataSet, shown: Any, refused: str, problem: str) -> None:
    """What the preview refuses, a run refuses with the same words, and nothing else."""
    is_guess = shown is not None and bool(shown["mapping"]) and shown["mapping"]["refused"]
    if refused:
        assert problem, f"the preview alone refuses: {refused}"
        assert is_guess or problem == refused, f"{refused} | {problem}"
    elif is_guess:
        assert problem, "the preview alone refuses the columns"
    elif shown["untrainable"]:
        assert "no token to train on" in problem, f"{shown['untrainable']} | {problem}"
    else:
        assert not problem, f"the preview showed rows, but {problem}"


def _trained_text(prepared: PreparedData, tokenizer: Any) -> str:
    """Returns the trained tokens of all documents, each run of them decoded by itself."""
    texts = []
    for rows in (prepared.train, prepared.eval):
        for start, end in zip(rows.starts, rows.starts[1:]):
            ids, loss_mask = rows.ids[start:end], rows.loss_mask[start:end]
            borders = np.flatnonzero(np.diff(loss_mask.astype(np.int8), prepend=0, append=0))
            texts += [tokenizer.decode(ids[a:b]) for a, b in borders.reshape(-1, 2)]
    return "|".join(texts)


def _check_marks(data: DataSet, prepared: PreparedData, tokenizer: Any) -> None:
    if not data.keeps_parts or prepared.summary["format"] == "text":
        return
    found = marks_in(_trained_text(prepared, tokenizer))
    wrong = {mark for mark in found if mark.startswith((CONTEXT, NEVER))}
    assert not wrong, f"trained, though in no answer: {sorted(wrong)}"


def _check_answers(data: DataSet, shown: dict[str, Any]) -> None:
    """Every answer of a row that is neither skipped nor cut is trained, unless a sentence says
    otherwise.
    """
    if any(_TOLD.search(warning) for warning in shown["warnings"]) or data.format == "tokens":
        return
    for row, given_row in zip(shown["rows"], data.rows):
        if row["skipped"] or row["cut"] or shown["rows_cut"]:
            continue
        pieces = [piece for document in row["documents"] for piece in document]
        loss_mask = marks_in("|".join(piece["text"] for piece in pieces if piece["trained"]))
        given = {mark for mark in marks_in(str(given_row)) if mark.startswith(ANSWER)}
        assert given <= loss_mask, f"not trained, and not told: {sorted(given - loss_mask)}"


def _run(count: int, prefix: str) -> dict[str, int]:
    ends: dict[str, int] = {}
    cache = os.environ["RAMSTREAM_CACHE"]

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=SEED is None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(TOKENIZERS), st.randoms(use_true_random=False))
    def run(name, random):
        folder = Path(tempfile.mkdtemp(prefix=prefix))
        os.environ["RAMSTREAM_CACHE"] = str(folder / "cache")
        try:
            data = invented(random, _tokenizer(name), folder)
            note(f"{name}: {data.story}\n{str(data.rows)[:3000]}")
            end = check(data, _tokenizer(name))
            ends[end] = ends.get(end, 0) + 1
        finally:
            os.environ["RAMSTREAM_CACHE"] = cache
            shutil.rmtree(folder)

    (run if SEED is None else seed(int(SEED))(run))()
    return ends


@pytest.mark.slow("it invents a hundred data sets, for ten seconds")
def test_any_data_set_is_trained_as_it_says_or_refused_in_a_sentence():
    ends = _run(MANY, "fuzz-")
    # Texts go on in more rows, so that few data sets have nothing to train.
    assert min(ends["trained"], ends["refused"]) > MANY // 25
