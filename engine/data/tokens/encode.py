"""Examples as token ids, with a mark on every token that carries loss."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.config.data_settings import DataConfig
from engine.data.formats.example import (
    Conversation,
    Example,
    Labeled,
    Pair,
    Preference,
    Segments,
    Single,
    Text,
    Tokens,
)
from engine.data.tokens.documents import AcceptedExample, Document, answers_of, marked, pair_of
from engine.data.tokens.render import ChatRenderer
from engine.data.tokens.rendered import Handling, RejectedExample, Rendered, common_prefix
from engine.data.tokens.text_tokens import TextTokens, no_pause
from engine.errors import DataError

_FAILED = RejectedExample("the tokenizer fails on its text")
_PLAIN_WORDS = "The quick brown fox, 123."
_Read = list[Rendered] | RejectedExample | Text | Segments | Tokens
"""An example as texts from a template, or as it is."""


@dataclass(frozen=True)
class TokenizedText:
    """The text of a document, with its tokens."""

    text: str
    ids: list[int]
    """Its tokens, cut to max_seq_len."""
    is_framed: bool
    """Whether the text itself has its begin and end tokens, as text from a template does."""
    is_typed: bool
    """Whether characters in the text stand in for special tokens that a person typed."""


class Encoder:
    """Turns examples into documents, in batches.

    The last two arguments are settings of `DataConfig`. Raises DataError when the tokenizer lacks a
    feature that the data needs.
    """

    def __init__(self, tokenizer: Any, handling: Handling, max_seq_len: int):
        self.tokenizer = tokenizer
        self.settings = (handling, max_seq_len)
        self.train_on = handling.train_on
        self.max_seq_len = max_seq_len
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} does not tell which characters a token "
                "covers, so answers cannot be masked; use a model with a fast tokenizer "
                "(tokenizer.json)."
            )
        self.renderer = ChatRenderer(tokenizer, handling)
        self._tokens = TextTokens(tokenizer, self.renderer, max_seq_len)
        self._prefix, self._suffix = self._frame()

    @classmethod
    def of(cls, config: DataConfig, tokenizer: Any) -> Encoder:
        """Returns the encoder that the settings of a data set ask for."""
        handling = Handling(
            config.train_on, config.dropped_turns, config.typed_tokens, config.add_tokens
        )
        return cls(tokenizer, handling, config.max_seq_len)

    def encode(
        self, examples: list[Example], pause: Callable[[], None] = no_pause
    ) -> list[AcceptedExample | RejectedExample]:
        """Returns each example encoded, or the reason why it is skipped. Both answers of a pair are
        encoded, the rejected one first. `pause` is called now and then while a long text is read;
        if it raises an exception, the work ends.
        """
        each: list[Single] = []
        completions: set[int] = set()
        for example in examples:
            answers = answers_of(example)
            if isinstance(example, Preference | Labeled):
                completions.update(range(len(each), len(each) + len(answers)))
            each += answers
        encoded = iter(self._encode(each, completions, pause))
        found = []
        for example in examples:
            first = next(encoded)
            if isinstance(example, Preference):
                first = pair_of(example, first, next(encoded))
            elif isinstance(example, Labeled):
                first = marked(example, first)
            found.append(first)
        return found

    def _encode(
        self, examples: list[Single], completions: set[int], pause: Callable[[], None]
    ) -> list[AcceptedExample | RejectedExample]:
        """Returns each example that is no pair encoded, or the reason why it is skipped. Those at
        the places `completions` are of preferences: everything behind the prompt counts.
        """
        rendered = self._render(examples, completions)
        texts: list[Rendered] = []
        for example in rendered:
            if isinstance(example, list):
                texts.extend(example)
        tokenized = self._tokenize(texts)
        plain_texts = [example for example in examples if isinstance(example, Text)]
        whole = zip(plain_texts, self._tokens.whole(plain_texts, pause))
        found = []
        for example in rendered:
            if isinstance(example, Text):
                found.append(self._of_text(*next(whole)))
            else:
                found.append(self._encoded(example, tokenized))
        return found

    def tokenized(self, example: Single) -> list[TokenizedText]:
        """Returns the documents of an example that is no pair, as texts with their tokens; none of
        one that is skipped, or that has no text of its own.
        """
        (read,) = self._render([example], set())
        if isinstance(read, list):
            found = [(text, next(self._tokenize([text]))) for text in read]
            return [
                TokenizedText(text.text, each.ids.tolist(), text.framed, text.typed)
                for text, documents in found
                if not isinstance(documents, RejectedExample)
                for each in documents
            ]
        (encoded,) = self.encode([example])
        if not isinstance(read, Text) or isinstance(encoded, RejectedExample):
            return []
        ids = encoded.documents[0].ids.tolist()
        return [TokenizedText(read.text, ids, is_framed=False, is_typed=False)]

    def _of_text(self, text: Text, ids: np.ndarray | None) -> AcceptedExample | RejectedExample:
        """Returns a text with its tokens, int32[T], as one document, however long it is. Only where
        the text begins and ends does it have begin and end tokens.
        """
        if ids is None:
            return _FAILED
        if text.before and text.after:
            document = Document(ids, np.ones(len(ids), dtype=bool), None, len(ids))
            return AcceptedExample([document], cut=False, answer=None)
        tokens, loss_mask, _ = self._framed(ids, np.ones(len(ids), dtype=bool), None)
        if text.before:
            tokens, loss_mask = tokens[len(self._prefix) :], loss_mask[len(self._prefix) :]
        else:
            loss_mask[:1] = False
        if text.after:
            end = len(tokens) - len(self._suffix)
            tokens, loss_mask = tokens[:end], loss_mask[:end]
        document = Document(tokens, loss_mask, None, len(tokens))
        is_passage = text.before or text.after
        return (
            AcceptedExample([document], cut=False, answer=None)
            if is_passage
            else self._kept([document])
        )

    def _encoded(
        self,
        example: list[Rendered] | RejectedExample | Segments | Tokens,
        tokenized: Iterator[list[Document] | RejectedExample],
    ) -> AcceptedExample | RejectedExample:
        if isinstance(example, RejectedExample):
            return example
        if isinstance(example, Tokens):
            return self._of_tokens(example)
        if isinstance(example, Segments):
            return self._of_segments(example)
        documents: list[Document] = []
        skipped = None
        for _ in example:
            found = next(tokenized)
            if isinstance(found, RejectedExample):
                skipped = found
            else:
                documents.extend(found)
        return skipped or self._kept(documents)

    def _of_tokens(self, example: Tokens) -> AcceptedExample | RejectedExample:
        """Returns the tokens of another program as a document."""
        ids = np.asarray(example.ids, dtype=np.int64)
        size = len(self.tokenizer)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < size:
            wrong = int(ids.min()) if ids.min() < 0 else int(ids.max())
            return RejectedExample(
                f"The tokenizer has no token {wrong:,} (it has {size:,})",
                "tokenize the rows with the tokenizer of this model, or give their text",
                refused=True,
            )
        return self._kept([self._document(ids, np.asarray(example.loss_mask, dtype=bool))])

    def _of_segments(self, example: Segments) -> AcceptedExample | RejectedExample:
        """Tokenizes each segment by itself, so that no token is in two of them."""
        ids: list[int] = []
        loss_mask: list[bool] = []
        for encoding, (_, is_trained) in zip(
            self._tokens.plain([text for text, _ in example.parts]),
            example.parts,
        ):
            if encoding is None:
                return _FAILED
            ids += encoding[0]
            loss_mask += [is_trained] * len(encoding[0])
        return self._kept([self._document(np.array(ids), np.array(loss_mask, dtype=bool))])

    def _document(self, ids: np.ndarray, loss_mask: np.ndarray) -> Document:
        """Returns a document of complete tokens, int[T] and bool[T], cut to max_seq_len."""
        loss_mask[:1] = False
        limit = self.max_seq_len
        return Document(ids[:limit].astype(np.int32), loss_mask[:limit], None, len(ids))

    @functools.cached_property
    def _special(self) -> list[int]:
        """Tokens that occur in no text."""
        return sorted({*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder})

    @functools.cached_property
    def _is_mute(self) -> bool:
        """Whether the tokenizer makes no tokens of plain words."""
        return not self.tokenizer(_PLAIN_WORDS, add_special_tokens=False)["input_ids"]

    def _no_tokens(self) -> RejectedExample:
        name = type(self.tokenizer).__name__
        return RejectedExample(
            f"The tokenizer (a {name}) makes no tokens of the text",
            "transformers chose this class by the model's type, and the tokenizer.json is of "
            "another kind: use the tokenizer that the model was published with",
            refused=True,
        )

    def _untrained(self, documents: list[Document]) -> RejectedExample:
        """Returns why none of the documents of an example has a trained token."""
        if any(document.cut for document in documents):
            return RejectedExample("no trained token is left within max_seq_len")
        ids = np.concatenate([np.empty(0, np.int32), *(document.ids for document in documents)])
        if np.isin(ids, self._special).all():
            return RejectedExample("the tokenizer makes no tokens of its text")
        if len(ids) == len(documents):
            return RejectedExample(
                "its text is a single token, and nothing predicts the first token"
            )
        return RejectedExample("none of its tokens is to be trained")

    def _kept(self, documents: list[Document]) -> AcceptedExample | RejectedExample:
        """Keeps the documents of one example that have a trained token."""
        kept = [document for document in documents if document.loss_mask.any()]
        if self._is_mute and all(np.isin(each.ids, self._special).all() for each in documents):
            return self._no_tokens()
        if not kept:
            return self._untrained(documents)
        left_out = [document for document in documents if not document.loss_mask.any()]
        unseen_answers = sum(document.cut for document in left_out)
        if unseen_answers:
            warning = "An answer is left out, because it begins after data.max_seq_len tokens"
            self.renderer.warn(warning, unseen_answers)
        last_is_kept = kept[-1] is documents[-1]
        return AcceptedExample(
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
        if isinstance(asked, RejectedExample):
            detail = f" ({asked.detail})" if asked.detail else ""
            raise DataError(f"This cannot be asked: {asked.reason}{detail}.")
        if self.renderer.control.is_placeholder(asked):
            encoding = self._tokens.typed(asked)
        else:
            (encoding,) = self._tokens.plain([asked])
        if encoding is None:
            raise DataError(f"This cannot be asked: {_FAILED.reason}.")
        ids = encoding[0]
        return ids if framed else [*self._prefix, *ids]

    def continued(self, text: str) -> list[int]:
        """Returns the ids of a text that a model continues as it stands, without a chat template:
        what the tokenizer sets before a text, and special tokens that are written in it.
        """
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return [*self._prefix, *ids]

    def template_use(self, data_format: str) -> str:
        """Returns what wraps the text: `tokenizer` for its chat template, or `none`."""
        is_written = data_format not in ("text", "segments", "tokens")
        return "tokenizer" if is_written and self.renderer.available else "none"

    # ------------------------------------------------------------------ text

    def _render(self, examples: list[Single], completions: set[int]) -> list[_Read]:
        """Returns the texts of each example: one, or one per turn if the template requires it.
        Those at the places `completions` have one. Plain texts, segments and tokens are unchanged.
        """
        chats: dict[int, Conversation] = {}
        results: list[_Read] = [[]] * len(examples)
        for place, example in enumerate(examples):
            if isinstance(example, Text | Segments | Tokens):
                results[place] = example
            elif isinstance(example, Conversation):
                chats[place] = example
            elif self.renderer.available:
                chats[place] = example.conversation()
            else:
                results[place] = self._join(example, place in completions)
        if chats and not self.renderer.available:
            raise DataError(
                "The tokenizer has no chat template, so conversations cannot be written as its "
                "model expects; choose an instruct model, or data of format prompt_completion or "
                "text."
            )
        whole = {place: chat for place, chat in chats.items() if place not in completions}
        for place, documents in zip(whole, self.renderer.render(list(whole.values()))):
            results[place] = documents
        behind = {place: chat for place, chat in chats.items() if place in completions}
        for place, text in zip(behind, self.renderer.render_completions(list(behind.values()))):
            results[place] = text
        return results

    def _join(self, pair: Pair, is_completion: bool) -> list[Rendered] | RejectedExample:
        """Renders a pair for a tokenizer without a chat template: prompt, separator, completion,
        and the end of sequence that `_framed` adds. is_completion: it is of a preference.
        """
        prompt = f"{pair.system}\n\n{pair.prompt}" if pair.system else pair.prompt
        whole = self.renderer.plain(prompt + pair.separator + pair.completion)
        asked = self.renderer.plain(prompt + pair.separator)
        if isinstance(whole, RejectedExample):
            return whole
        if isinstance(asked, RejectedExample):
            return asked
        # A special token may begin in the prompt and end in the completion. Its stand-in then
        # represents text from the completion too, so the answer begins where the two texts differ.
        answer = (len(common_prefix(whole, asked)), len(whole))
        loss_mask = (0, len(whole)) if self.train_on == "all" else answer
        typed = self.renderer.control.is_placeholder(whole)
        rendered = Rendered(whole, (loss_mask,), answer, framed=False, typed=typed)
        return [replace(rendered, prompt=asked) if is_completion else rendered]

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

    def _tokenize(self, texts: list[Rendered]) -> Iterator[list[Document] | RejectedExample]:
        """Yields the documents of each text."""
        plain = iter(self._tokens.plain([text.text for text in texts if not text.typed]))
        prompts = self._prompts(texts)
        for rendered in texts:
            encoding = self._tokens.typed(rendered.text) if rendered.typed else next(plain)
            prompt = None if rendered.prompt is None else prompts[rendered.prompt]
            if encoding is None or (rendered.prompt is not None and prompt is None):
                yield _FAILED
            else:
                yield self._documents(rendered, *encoding, prompt)

    def _prompts(self, texts: list[Rendered]) -> dict[str, np.ndarray | None]:
        """Returns the tokens of each prompt of `texts`, int32[T], or None where the tokenizer
        fails. The answers of a pair share theirs.
        """
        asked = {text.prompt: text.typed for text in texts if text.prompt is not None}
        plain = iter(self._tokens.plain([prompt for prompt, typed in asked.items() if not typed]))
        found: dict[str, np.ndarray | None] = {}
        for prompt, typed in asked.items():
            encoding = self._tokens.typed(prompt) if typed else next(plain)
            found[prompt] = None if encoding is None else np.asarray(encoding[0], dtype=np.int32)
        return found

    def _documents(
        self,
        rendered: Rendered,
        ids: list[int],
        offsets: list[tuple[int, int]],
        prompt: np.ndarray | None,
    ) -> list[Document]:
        """Returns the text as a document, cut to max_seq_len. `prompt` has the tokens of its
        prompt, int32[T], if it has one.
        """
        tokens = np.asarray(ids, dtype=np.int32)
        bounds = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)
        bounds = self.renderer.control.without_space(rendered.text, tokens, bounds)
        loss_mask = np.zeros(len(tokens), dtype=bool)
        weights = np.ones(len(tokens), np.float32) if rendered.weights else None
        for place, span in enumerate(rendered.spans):
            covered = _covered(bounds, span)
            loss_mask |= covered
            if weights is not None:  # a text from a template, which needs no frame
                weights[covered] = rendered.weights[place]
        answer = None
        if rendered.answer:
            places = np.flatnonzero(_covered(bounds, rendered.answer))
            if len(places):
                answer = (int(places[0]), int(places[-1]) + 1)
        if prompt is not None:
            begin = _shared(tokens, prompt)
            loss_mask = np.arange(len(tokens)) >= begin
            answer = (begin, answer[1]) if answer else None
        if not rendered.framed:
            tokens, loss_mask, answer = self._framed(tokens, loss_mask, answer)
        loss_mask[:1] = False
        limit = self.max_seq_len
        if answer and answer[1] > limit:
            answer = None
        weights = None if weights is None else weights[:limit]
        return [Document(tokens[:limit], loss_mask[:limit], answer, len(tokens), weights=weights)]

    def _framed(
        self, tokens: np.ndarray, loss_mask: np.ndarray, answer: tuple[int, int] | None
    ) -> tuple[np.ndarray, np.ndarray, tuple[int, int] | None]:
        """Puts the begin and end tokens around a text. The end-of-sequence token is trained and
        belongs to the answer.
        """
        prefix, suffix = np.array(self._prefix, np.int32), np.array(self._suffix, np.int32)
        tokens = np.concatenate([prefix, tokens, suffix])
        before = np.full(len(self._prefix), self.train_on == "all")
        after = np.ones(len(self._suffix), dtype=bool)
        loss_mask = np.concatenate([before, loss_mask, after])
        if answer:
            answer = (answer[0] + len(self._prefix), len(tokens))
        return tokens, loss_mask, answer


def _shared(ids: np.ndarray, others: np.ndarray) -> int:
    """Returns how many tokens both texts begin with, int32[T] each."""
    length = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:length] != others[:length])
    return int(differ[0]) if len(differ) else length


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
