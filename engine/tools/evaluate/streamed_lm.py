"""The requests of lm-evaluation-harness, answered with weights that are streamed.

This module imports `lm_eval`, which may not be installed.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from engine.data.tokens.chat_template import ChatTemplate
from engine.data.tokens.template_process import Chat, Refusal
from engine.errors import DataError
from engine.progress import Progress, labeled
from engine.runtime.sampling.answers import AnswerLimits
from engine.tools.chat.chat_engines import ChatEngine
from engine.tools.evaluate.answering import WantedAnswers
from engine.tools.evaluate.scoring import Continuation, score

LONGEST = 2048
"""Tokens of a row at most where the model does not set it, as in the harness itself."""
BORROWED_REQUESTS = 64
"""Number of requests that a paused run answers in one call."""

T = TypeVar("T")


class StreamedLM(TemplateLM):
    """A model for the harness.

    The weights are loaded when the first request arrives, since a task that cannot be read must be
    reported before that. All requests of one kind arrive together, so that a sweep over the layers
    answers as many of them as possible.
    """

    def __init__(
        self,
        load: Callable[[], ChatEngine],
        progress: Progress,
        most_tokens: int | None = None,
        before_answers: Callable[[ChatEngine], None] = lambda _: None,
    ):
        """`load` loads the weights. A row has `most_tokens` tokens at most, if that is less than
        the model takes. `before_answers` is called before answers are drawn.
        """
        super().__init__()
        self._load = load
        self._chat_engine: ChatEngine | None = None
        self.is_asked = False
        """Whether the harness has read its tasks and uses the model."""
        self._progress = progress
        self._most_tokens = most_tokens
        self._before_answers = before_answers

    @property
    def chat_engine(self) -> ChatEngine:
        """The loaded weights."""
        self.is_asked = True
        if self._chat_engine is None:
            self._chat_engine = self._load()
        return self._chat_engine

    @property
    def tokenizer(self) -> Any:
        return self.chat_engine.prompt_builder.tokenizer

    @functools.cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text. Raises DataError if the tokenizer has none."""
        token = self.tokenizer.eos_token_id
        if token is None:
            raise DataError("The tokenizer has no token that ends a text, so no task can be asked.")
        return token

    @property
    def prefix_token_id(self) -> int:
        """Token before a text that has no context."""
        token = self.tokenizer.bos_token_id
        return self.eot_token_id if token is None else token

    @property
    def max_length(self) -> int:
        """Number of tokens of a row, at most."""
        longest = self.chat_engine.prompt_builder.longest or LONGEST
        return min(longest, self._most_tokens or longest)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns the tokens of a text, as the tokenizer writes them by itself. A first token that
        stands in the text already is not added again.
        """
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self._begin):
            options = {"add_special_tokens": False}
        return self.tokenizer.encode(string, verbose=False, **options)

    @property
    def _begin(self) -> str:
        """Text of the token before a text."""
        return self.tokenizer.decode([self.prefix_token_id])

    # ------------------------------------------------------------------ likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns for each context and continuation the logarithm of its probability, and whether
        its tokens are the likeliest ones.
        """
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        return self._scored([(context, tokens) for _, context, tokens in requests])

    def _scored(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Returns the likelihoods of tokens after a context; an empty one is the first token."""
        asked = [
            Continuation(context or [self.prefix_token_id], tokens) for context, tokens in pairs
        ]
        progress = labeled(self._progress, "Scoring")
        found = []
        for part in self._at_once(asked):
            engine = self.chat_engine.sampler().engine
            found += self.chat_engine.call(partial(score, engine, part, self.max_length, progress))
        return [(one.log, one.is_greedy) for one in found]

    def _at_once(self, asked: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yields the requests that the model answers in one call: all of them, unless a paused run
        does, which can be resumed between two calls.
        """
        size = BORROWED_REQUESTS if self.chat_engine.is_borrowed else max(1, len(asked))
        for start in range(0, len(asked), size):
            yield asked[start : start + size]

    def loglikelihood_rolling(self, requests: list[Instance], **_: Any) -> list[float]:
        """Returns for each text the logarithm of its probability, after the token that begins a
        text. A long text is scored in windows, each token once.
        """
        pairs: list[tuple[list[int], list[int]]] = []
        counts = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            of_text = [make_disjoint_window(window) for window in windows]
            pairs += of_text
            counts.append(len(of_text))
        logs = iter([log for log, _ in self._scored(pairs)])
        return [sum(itertools.islice(logs, count)) for count in counts]

    # ------------------------------------------------------------------ answers

    def generate_until(self, requests: list[Instance], **_: Any) -> list[str]:
        """Returns the answer to each question. Questions whose answers are wanted in the same way
        are answered together.
        """
        self._before_answers(self.chat_engine)
        answers = [""] * len(requests)
        alike: dict[str, list[int]] = {}
        for place, request in enumerate(requests):
            key = json.dumps(request.args[1], sort_keys=True, default=str)
            alike.setdefault(key, []).append(place)
        for places in alike.values():
            wanted = WantedAnswers.of(requests[places[0]].args[1])
            texts = self._answers([requests[place].args[0] for place in places], wanted)
            for place, text in zip(places, texts):
                answers[place] = text
        return answers

    def _answers(self, questions: Sequence[str], wanted: WantedAnswers) -> list[str]:
        """Returns the answers to questions. A question that is too long loses its beginning."""
        prompt_builder, tokenizer = self.chat_engine.prompt_builder, self.tokenizer
        room = self.max_length - wanted.max_new_tokens
        if room < 1:
            raise DataError(
                f"A task wants answers of {wanted.max_new_tokens:,} tokens and a row has "
                f"{self.max_length:,} at most; leave the task out."
            )
        limits = AnswerLimits(
            wanted.max_new_tokens,
            prompt_builder.ends,
            self.max_length,
            wanted.is_over(tokenizer.decode),
        )
        most, written = wanted.max_new_tokens * len(questions), 0

        def on_token(_: int, __: int) -> None:
            nonlocal written
            written += 1
            self._progress(written, most, "Answering")

        answers: list[list[int]] = []
        prompts = [self.tok_encode(question)[-room:] for question in questions]
        for part in self._at_once(prompts):
            generate = self.chat_engine.sampler().generate
            answers += self.chat_engine.call(
                partial(generate, part, limits, wanted.drawing, on_token)
            )
        self._progress(most, most, "Answering")
        return [wanted.cut(tokenizer.decode(ids, skip_special_tokens=True)) for ids in answers]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Returns a question with its examples as the model's chat template renders them. Raises
        DataError where there is no template, where it refuses them or where it exceeds its limits.
        """
        chat = Chat(list(chat_history))
        if add_generation_prompt:
            (text,) = self._template.write([chat], generation=True)
        else:
            text = self._template.write_begun(chat)
        if isinstance(text, Refusal):
            raise DataError(
                "The questions cannot be written with the model's chat template "
                f"({text.message.rstrip('. ')}); leave --chat out."
            )
        return text
