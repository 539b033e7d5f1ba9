"""Examples as token ids with a mark on every token that carries loss."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.data.formats import Example, Pair, Text
from engine.data.render import ChatRenderer, Rendered, Skipped
from engine.errors import DataError


@dataclass(frozen=True)
class Document:
    """Tokens that attend to each other and to nothing else."""

    ids: np.ndarray
    """int32[T], at most max_seq_len."""
    trained: np.ndarray
    """bool[T]: the token is a target. The first token never is: nothing predicts it."""
    answer: tuple[int, int] | None
    """Token range of the last answer; None when there is none or some of it was cut."""
    length: int
    """Tokens before the cut to max_seq_len."""

    @property
    def cut(self) -> bool:
        return self.length > len(self.ids)


@dataclass(frozen=True)
class Kept:
    """What an example is trained as."""

    documents: list[Document]
    """Those with a trained token, at least one; several where turns are trained one at a time."""
    cut: bool
    """Some of it is left out, because it is longer than max_seq_len."""
    answer: tuple[int, int] | None
    """Token range of the example's last answer in the last document; None when there is none or
    some is left out.
    """


@dataclass(frozen=True)
class Documents:
    """Documents of several rows as flat arrays."""

    ids: np.ndarray
    """int32[tokens]"""
    trained: np.ndarray
    """bool[tokens]"""
    lengths: np.ndarray
    """int64[documents]"""
    counts: np.ndarray
    """int64[rows]: documents of each row, 0 for one that is skipped."""

    @classmethod
    def joined(cls, rows: list[list[Document]]) -> Documents:
        documents = [document for row in rows for document in row]
        return cls(
            np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)]),
            np.concatenate([np.empty(0, bool), *(document.trained for document in documents)]),
            np.array([len(document.ids) for document in documents], dtype=np.int64),
            np.array([len(row) for row in rows], dtype=np.int64),
        )

    def of_rows(self, wanted: np.ndarray) -> Documents:
        """Those of the rows that bool[rows] `wanted` marks."""
        documents = np.repeat(wanted, self.counts)
        tokens = np.repeat(documents, self.lengths)
        return Documents(
            self.ids[tokens], self.trained[tokens], self.lengths[documents], self.counts[wanted]
        )


class Encoder:
    """Examples to documents, in batches. Raises DataError when the tokenizer cannot do what the
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
        """What each example is trained as, or why it is skipped."""
        rendered = self._render(examples)
        texts = [text for texts in rendered if not isinstance(texts, Skipped) for text in texts]
        documents = iter(self._tokenise(texts))
        results: list[Kept | Skipped] = []
        for texts_or_reason in rendered:
            if isinstance(texts_or_reason, Skipped):
                results.append(texts_or_reason)
                continue
            made = [document for _ in texts_or_reason for document in next(documents)]
            kept = [document for document in made if document.trained.any()]
            if not kept:
                results.append(Skipped("no trained token is left within max_seq_len"))
                continue
            if unseen := sum(document.cut for document in made) - sum(
                document.cut for document in kept
            ):
                warning = "An answer is left out, because it begins after data.max_seq_len tokens"
                self.renderer.warn(warning, unseen)
            results.append(
                Kept(
                    kept,
                    any(document.cut for document in made),
                    kept[-1].answer if made[-1] is kept[-1] else None,
                )
            )
        return results

    def question(self, text: str) -> list[int]:
        """Ids of a person's question up to where its answer is due, as in the examples of training:
        through the chat template where there is one, and special tokens that were typed are text.
        Raises DataError where it is refused.
        """
        framed = self.renderer.available
        asked = self.renderer.question(text) if framed else self.renderer.plain(text)
        if isinstance(asked, Skipped):
            raise DataError(
                "This cannot be asked: "
                f"{asked.reason}{f' ({asked.detail})' if asked.detail else ''}."
            )
        typed = self.renderer.control.stands_in(asked)
        ids, _ = self.renderer.control.encode(asked) if typed else self._call([asked])[0]
        return ids if framed else [*self._prefix, *ids]

    def template_use(self, data_format: str) -> str:
        """Where the frame around the text comes from: `tokenizer` (its chat template) or `none`."""
        return "tokenizer" if data_format != "text" and self.renderer.available else "none"

    # ------------------------------------------------------------------ text

    def _render(self, examples: list[Example]) -> list[list[Rendered] | Skipped]:
        chats = {}
        results: list[list[Rendered] | Skipped] = [[]] * len(examples)
        for place, example in enumerate(examples):
            if isinstance(example, Text):
                results[place] = [
                    Rendered(
                        example.text, ((0, len(example.text)),), None, framed=False, divided=True
                    )
                ]
            elif isinstance(example, Pair) and not self.renderer.available:
                results[place] = self._join(example)
            else:
                chats[place] = example.conversation() if isinstance(example, Pair) else example
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
        """A pair for a tokenizer without a chat template: prompt, separator, completion, end of
        sequence.
        """
        prompt = f"{pair.system}\n\n{pair.prompt}" if pair.system else pair.prompt
        whole = self.renderer.plain(prompt + pair.separator + pair.completion)
        asked = self.renderer.plain(prompt + pair.separator)
        if isinstance(whole, Skipped) or isinstance(asked, Skipped):
            return whole
        # A special token may begin in the prompt and end in the completion: it is text of the
        # completion then.
        span = (len(os.path.commonprefix([whole, asked])), len(whole))
        return [
            Rendered(
                whole,
                ((0, len(whole)) if self.train_on == "all" else span,),
                span,
                framed=False,
                typed=self.renderer.control.stands_in(whole),
            )
        ]

    # ------------------------------------------------------------------ tokens

    def _frame(self) -> tuple[list[int], list[int]]:
        """What the tokenizer puts before a text, and the end of sequence that closes one."""
        bare = self.tokenizer("a", add_special_tokens=False)["input_ids"]
        framed = self.tokenizer("a")["input_ids"]
        start = next((i for i in range(len(framed)) if framed[i : i + len(bare)] == bare), 0)
        eos = self.tokenizer.eos_token_id
        return framed[:start], [] if eos is None else [eos]

    def _tokenise(self, texts: list[Rendered]) -> list[list[Document]]:
        if not texts:
            return []
        control = self.renderer.control
        plain = iter(self._call([rendered.text for rendered in texts if not rendered.typed]))
        return [
            self._documents(
                rendered, *(control.encode(rendered.text) if rendered.typed else next(plain))
            )
            for rendered in texts
        ]

    def _call(self, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        if not texts:
            return []
        batch = self.tokenizer(
            texts, add_special_tokens=False, split_special_tokens=False, verbose=False
        )
        return [(encoding.ids, encoding.offsets) for encoding in batch.encodings]

    def _documents(
        self, rendered: Rendered, ids: list[int], offsets: list[tuple[int, int]]
    ) -> list[Document]:
        tokens = np.asarray(ids, dtype=np.int32)
        bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        bounds = self.renderer.control.without_space(rendered.text, tokens, bounds)
        trained = np.zeros(len(tokens), dtype=bool)
        for span in rendered.spans:
            trained |= _covered(bounds, span)
        places = (
            np.flatnonzero(_covered(bounds, rendered.answer))
            if rendered.answer
            else np.empty(0, dtype=int)
        )
        answer = (int(places[0]), int(places[-1]) + 1) if len(places) else None
        if not rendered.framed:
            tokens = np.concatenate([self._prefix, tokens, self._suffix]).astype(np.int32)
            trained = np.concatenate(
                [
                    np.full(len(self._prefix), self.train_on == "all"),
                    trained,
                    np.ones(len(self._suffix), dtype=bool),
                ]
            )
            if answer:
                answer = (answer[0] + len(self._prefix), len(tokens))
        if len(trained):
            trained[0] = False
        limit = self.max_seq_len
        if rendered.divided and len(tokens) > limit:
            return [
                self._part(tokens[i : i + limit], trained[i : i + limit])
                for i in range(0, len(tokens), limit)
            ]
        answer = answer if answer and answer[1] <= limit else None
        return [Document(tokens[:limit], trained[:limit], answer, len(tokens))]

    @staticmethod
    def _part(tokens: np.ndarray, trained: np.ndarray) -> Document:
        trained = trained.copy()
        trained[0] = False
        return Document(tokens, trained, None, len(tokens))


def _covered(bounds: np.ndarray, span: tuple[int, int]) -> np.ndarray:
    """Tokens (character bounds [T, 2]) with a character in `span`. Some tokenizers trim white space
    from the bounds, so a token of white space alone is empty and stands at its end: it counts when
    that end lies in the span.
    """
    start, end = span
    return (bounds[:, 1] > start) & (
        (bounds[:, 0] < end) & (bounds[:, 0] < bounds[:, 1])
        | (bounds[:, 0] == bounds[:, 1]) & (bounds[:, 1] <= end)
    )
