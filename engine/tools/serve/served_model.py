"""Weights in memory that answer requests of OpenAI's API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from functools import partial
from queue import SimpleQueue
from typing import Any

from engine.errors import RamstreamError
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.tools.chat.chat_engines import ChatEngine
from engine.tools.chat.conversation import Message, Sampling
from engine.tools.serve.answer_request import AnswerRequest
from engine.tools.serve.answer_worker import AnswerWorker, AskedAnswer, Drawn, Post
from engine.tools.serve.answers import Reply


class ServedModel:
    """Weights in memory with the thread that draws their answers. All methods may be called from
    any thread.
    """

    def __init__(self, chat_engine: ChatEngine):
        self.label = chat_engine.label
        self.held_bytes = chat_engine.held_bytes
        self._chat_engine = chat_engine
        try:
            self._slow_note = chat_engine.slow_note()
        except BaseException:
            chat_engine.close()
            raise
        self._worker = AnswerWorker(chat_engine)
        # Tokenizers and templates are used by one thread at a time.
        self._writing = threading.Lock()

    def slow_note(self) -> str:
        """Returns a sentence where these weights answer without a cache, else ""."""
        return self._slow_note

    @property
    def asked(self) -> int:
        """Number of answers that are under way or wait."""
        return self._worker.asked

    def prompts(self, request: AnswerRequest) -> list[list[int]]:
        """Returns the token ids of each prompt of a request. Raises DataError for one that the
        model cannot be given.
        """
        builder = self._chat_engine.prompt_builder
        with self._writing:
            if request.is_chat:
                return [builder.prompt(request.messages)]
            return [builder.continued(prompt) for prompt in request.prompts]

    def reply(self, request: AnswerRequest, prompts: list[list[int]]) -> Reply:
        """Returns the reply to a request whose `prompts` are known, without any answer yet."""
        tokenizer = self._chat_engine.prompt_builder.tokenizer
        return Reply(request, tokenizer, sum(map(len, prompts)))

    def ask(
        self,
        request: AnswerRequest,
        prompts: list[list[int]],
        take: Callable[[int, Drawn], None],
        post: Post,
    ) -> list[AskedAnswer]:
        """Begins all answers of a request; `take` gets the number of the answer and its next token.

        Answers to one prompt differ by their seeds. Raises RunError where this is served no longer.
        """
        limits = self._limits(request.max_tokens)
        asked: list[AskedAnswer] = []
        for prompt in prompts:
            for choice in range(request.choices):
                drawing = Drawing(
                    temperature=request.temperature,
                    top_p=request.top_p,
                    top_k=request.top_k,
                    min_p=request.min_p,
                    seed=request.seed + choice,
                )
                asked.append(
                    AskedAnswer(
                        prompt,
                        limits,
                        drawing,
                        partial(take, len(asked)),
                        post,
                        request.top_logprobs or 0,
                    )
                )
        for each in asked:
            self._worker.ask(each)
        return asked

    def cancel(self, asked: AskedAnswer) -> None:
        """Ends an answer whose tokens nobody takes any more."""
        self._worker.cancel(asked)

    def close(self) -> None:
        """Ends all answers and frees the memory."""
        self._worker.close()
        self._chat_engine.close()

    def _limits(self, max_tokens: int) -> AnswerLimits:
        builder = self._chat_engine.prompt_builder
        with self._writing:
            return AnswerLimits(max_tokens, builder.ends, builder.longest)

    # ------------------------------------------------------------------ for Chat

    @property
    def prompt_builder(self) -> Any:
        return self._chat_engine.prompt_builder

    def answer(self, messages: list[Message], sampling: Sampling) -> Generator[int, None, None]:
        """Yields the token ids of the next answer as they are drawn (`ChatEngine.answer`)."""
        with self._writing:
            prompt = self.prompt_builder.prompt(messages)
        drawn: SimpleQueue[Drawn] = SimpleQueue()
        asked = AskedAnswer(
            prompt,
            self._limits(sampling.max_new_tokens),
            Drawing(temperature=sampling.temperature, top_p=sampling.top_p, seed=sampling.seed),
            drawn.put,
        )
        self._worker.ask(asked)
        try:
            while True:
                token = drawn.get()
                if isinstance(token, RamstreamError):
                    raise token
                if token.finish == "stop":
                    return
                yield token.token
                if token.finish is not None:
                    return
        finally:
            self._worker.cancel(asked)
