"""An `Encoder` turns examples into token ids, with a mark on every token that carries loss."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.render import ChatRenderer, Rendered, Skipped, common_prefix
from engine.errors import DataError
from engine.examples.example import Conversation, Example, Pair, Text


@dataclass(frozen=True)
class Document:
    """A document consists of T tokens that attend to each other and to nothing else."""

    ids: np.ndarray
    """The token ids are int32[T], with T at most max_seq_len."""
    trained: np.ndarray
    """It marks the tokens that are training targets, bool[T]. The first token never is one, because
    nothing predicts it.
    """
    answer: tuple[int, int] | None
    """This is the token range of the last answer, or None if there is no answer or if part of it
    was cut.
    """
    length: int
    """The document had this many tokens before the cut to max_seq_len."""

    @property
    def cut(self) -> bool:
        return self.length > len(self.ids)


@dataclass(frozen=True)
class Kept:
    """A `Kept` is an example that is trained on, as one or several documents."""

    documents: list[Document]
    """There is at least one document, and several if turns are trained one at a time. Each document
    has at least one trained token.
    """
    cut: bool
    """It is true when part of the example is left out, because it is longer than max_seq_len."""
    answer: tuple[int, int] | None
    """This is the token range of the example's last answer in the last document, or None if there
    is no answer or if part of it is left out.
    """


@dataclass(frozen=True)
class Documents:
    """These flat arrays hold the documents of several rows."""

    ids: np.ndarray
    """The token ids are int32[tokens]."""
    trained: np.ndarray
    """It marks the tokens that are training targets, bool[tokens]."""
    lengths: np.ndarray
    """These are the lengths of the documents in tokens, int64[documents]."""
    counts: np.ndarray
    """Each row has this many documents, or 0 if it is skipped: int64[rows]."""

    @classmethod
    def joined(cls, rows: list[list[Document]]) -> Documents:
        documents = [document for row in rows for document in row]
        ids = [document.ids for document in documents]
        trained = [document.trained for document in documents]
        # An empty array comes first in each list, because numpy cannot concatenate an empty list.
        return cls(
            np.concatenate([np.empty(0, np.int32), *ids]),
            np.concatenate([np.empty(0, bool), *trained]),
            np.array([len(document.ids) for document in documents], dtype=np.int64),
            np.array([len(row) for row in rows], dtype=np.int64),
        )

    def of_rows(self, wanted: np.ndarray) -> Documents:
        """Returns the documents of the rows that `wanted` (bool[rows]) marks."""
        documents = np.repeat(wanted, self.counts)
        tokens = np.repeat(documents, self.lengths)
        return Documents(
            self.ids[tokens], self.trained[tokens], self.lengths[documents], self.counts[wanted]
        )


_Encoding = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the characters [start, end) that each token covers."""


class Encoder:
    """Turns examples into documents, in batches.

    `train_on` is "assistant" or "all". Raises DataError when the tokenizer lacks a feature that the
    data needs.
    """

    def __init__(self, tokenizer: Any, train_on: str, max_seq_len: int):
        self.tokenizer = tokenizer
        self.train_on = train_on
        self.max_seq_len = max_seq_len
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} does not tell which characters a token "
                "covers, so answers cannot be masked; use a model with a fast tokenizer "
                "(tokenizer.json)."
            )
        self.renderer = ChatRenderer(tokenizer, train_on)
        self._prefix, self._suffix = self._frame()

    def encode(self, examples: list[Example]) -> list[Kept | Skipped]:
        """Returns each example encoded, or the reason why it is skipped."""
        rendered = self._render(examples)
        texts: list[Rendered] = []
        for example in rendered:
            if not isinstance(example, Skipped):
                texts.extend(example)
        tokenised = self._tokenise(texts)
        results: list[Kept | Skipped] = []
        for example in rendered:
            if isinstance(example, Skipped):
                results.append(example)
                continue
            documents: list[Document] = []
            for _ in example:
                documents.extend(next(tokenised))
            results.append(self._kept(documents))
        return results

    def _kept(self, documents: list[Document]) -> Kept | Skipped:
        """Keeps the documents of one example that have a trained token."""
        kept = [document for document in documents if document.trained.any()]
        if not kept:
            return Skipped("no trained token is left within max_seq_len")
        left_out = [document for document in documents if not document.trained.any()]
        unseen_answers = sum(document.cut for document in left_out)
        if unseen_answers:
            warning = "An answer is left out, because it begins after data.max_seq_len tokens"
            self.renderer.warn(warning, unseen_answers)
        last_is_kept = kept[-1] is documents[-1]
        return Kept(
            kept,
            cut=any(document.cut for document in documents),
            answer=kept[-1].answer if last_is_kept else None,
        )

    def question(self, text: str) -> list[int]:
        """Returns the ids of a person's question up to where the answer is due. As in training, the
        chat template is used if there is one. Special tokens in the question are treated as text.
        Raises DataError if the template refuses the question.
        """
        framed = self.renderer.available
        asked = self.renderer.question(text) if framed else self.renderer.plain(text)
        if isinstance(asked, Skipped):
            detail = f" ({asked.detail})" if asked.detail else ""
            raise DataError(f"This cannot be asked: {asked.reason}{detail}.")
        if self.renderer.control.stands_in(asked):
            ids, _ = self.renderer.control.encode(asked)
        else:
            ids, _ = self._call([asked])[0]
        return ids if framed else [*self._prefix, *ids]

    def template_use(self, data_format: str) -> str:
        """Returns what wraps the text: `tokenizer` for its chat template, or `none`."""
        return "tokenizer" if data_format != "text" and self.renderer.available else "none"

    # ------------------------------------------------------------------ text

    def _render(self, examples: list[Example]) -> list[list[Rendered] | Skipped]:
        """Returns the texts of each example: one, or one per turn if the template requires it."""
        chats: dict[int, Conversation] = {}
        results: list[list[Rendered] | Skipped] = [[]] * len(examples)
        for place, example in enumerate(examples):
            if isinstance(example, Text):
                results[place] = [_whole_text(example.text)]
            elif isinstance(example, Conversation):
                chats[place] = example
            elif self.renderer.available:
                chats[place] = example.conversation()
            else:
                results[place] = self._join(example)
        if chats and not self.renderer.available:
            raise DataError(
                "The tokenizer has no chat template, so conversations cannot be written as its "
                "model expects; choose an instruct model, or data of format prompt_completion or "
                "text."
            )
        for place, documents in zip(chats, self.renderer.render(list(chats.values()))):
            results[place] = documents
        return results

    def _join(self, pair: Pair) -> list[Rendered] | Skipped:
        """Renders a pair for a tokenizer without a chat template: prompt, separator, completion,
        and the end of sequence that `_framed` adds.
        """
        prompt = f"{pair.system}\n\n{pair.prompt}" if pair.system else pair.prompt
        whole = self.renderer.plain(prompt + pair.separator + pair.completion)
        asked = self.renderer.plain(prompt + pair.separator)
        if isinstance(whole, Skipped):
            return whole
        if isinstance(asked, Skipped):
            return asked
        # A special token may begin in the prompt and end in the completion. Its stand-in then
        # represents text from the completion too, so the answer begins where the two texts differ.
        answer = (len(common_prefix(whole, asked)), len(whole))
        trained = (0, len(whole)) if self.train_on == "all" else answer
        typed = self.renderer.control.stands_in(whole)
        return [Rendered(whole, (trained,), answer, framed=False, typed=typed)]

    # ------------------------------------------------------------------ tokens

    def _frame(self) -> tuple[list[int], list[int]]:
        """Returns the tokens that the tokenizer puts before a text, and the end-of-sequence token
        that closes a text.
        """
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("a")["input_ids"]
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        eos = self.tokenizer.eos_token_id
        return framed[:start], [] if eos is None else [eos]

    def _tokenise(self, texts: list[Rendered]) -> Iterator[list[Document]]:
        """Yields the documents of each text."""
        plain = iter(self._call([rendered.text for rendered in texts if not rendered.typed]))
        for rendered in texts:
            if rendered.typed:
                ids, offsets = self.renderer.control.encode(rendered.text)
            else:
                ids, offsets = next(plain)
            yield self._documents(rendered, ids, offsets)

    def _call(self, texts: list[str]) -> list[_Encoding]:
        """Returns the ids and offsets of plain texts. A single call for many texts lets the library
        use several threads.
        """
        if not texts:
            return []
        batch = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=False, verbose=False
        )
        return [(encoding.ids, encoding.offsets) for encoding in batch.encodings]

    def _documents(
        self, rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]
    ) -> list[Document]:
        """Returns the text as documents: one, cut to max_seq_len, or several if the text may be
        divided.
        """
        tokens = np.asarray(ids, dtype=np.int32)
        bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        bounds = self.renderer.control.without_space(rendered.text, tokens, bounds)
        trained = np.zeros(len(tokens), dtype=bool)
        for span in rendered.spans:
            trained |= _covered(bounds, span)
        answer = None
        if rendered.answer:
            places = np.flatnonzero(_covered(bounds, rendered.answer))
            if len(places):
                answer = (int(places[0]), int(places[-1]) + 1)
        if not rendered.framed:
            tokens, trained, answer = self._framed(tokens, trained, answer)
        trained[:1] = False
        limit = self.max_seq_len
        if rendered.divided and len(tokens) > limit:
            starts = range(0, len(tokens), limit)
            return [
                _part(tokens[start : start + limit], trained[start : start + limit])
                for start in starts
            ]
        if answer and answer[1] > limit:
            answer = None
        return [Document(tokens[:limit], trained[:limit], answer, len(tokens))]

    def _framed(
        self, tokens: np.ndarray, trained: np.ndarray, answer: tuple[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, int] | None]:
        """Puts the begin and end tokens around a text. The end-of-sequence token is trained and
        belongs to the answer.
        """
        tokens = np.concatenate([self._prefix, tokens, self._suffix]).astype(np.int32)
        before = np.full(len(self._prefix), self.train_on == "all")
        after = np.ones(len(self._suffix), dtype=bool)
        trained = np.concatenate([before, trained, after])
        if answer:
            answer = (answer[0] + len(self._prefix), len(tokens))
        return tokens, trained, answer


def _whole_text(text: str) -> Rendered:
    return Rendered(text, ((0, len(text)),), None, framed=False, divided=True)


def _part(tokens: np.ndarray, trained: np.ndarray) -> Document:
    trained = trained.copy()  # the array is a view of the whole text's
    trained[0] = False
    return Document(tokens, trained, None, len(tokens))


def _covered(bounds: np.ndarray, span: tuple[int, int]) -> np.ndarray:
    """Returns bool[T], true for the tokens (character bounds [T, 2]) with a character in `span`.

    Some tokenizers trim white space from the bounds. The bounds of a token of white space alone are
    then empty and placed at its end: the token counts if that end is in the span.
    """
    start, end = span
    begins, ends = bounds[:, 0], bounds[:, 1]
    has_character = (begins < ends) & (begins < end)
    is_space_inside = (begins == ends) & (ends <= end)
    return (ends > start) & (has_character | is_space_inside)
