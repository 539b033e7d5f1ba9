"""A conversation with a made-up model, for the page that chats."""

from __future__ import annotations

from types import SimpleNamespace

from engine.errors import DataError, FitError
from engine.tools.chat.chat_sources import folder_of

LETTERS = "abcdefghij"


class FakeChatEngine:
    """Answers with the requested number of letters; `gate`, if given, lets each one pass."""

    held_bytes = 1 << 20

    def __init__(self, engine, source):
        self.engine, self.label, self.source = engine, source.label, source
        self.prompt_builder = SimpleNamespace(text=lambda ids: "".join(LETTERS[i] for i in ids))

    def slow_note(self):
        return self.engine.slow

    def answer(self, messages, sampling):
        self.engine.heard.append((self.source.kind, messages))
        if messages[-1]["content"] == "too long":
            raise DataError("The conversation is too long.")
        for k in range(sampling.max_new_tokens):
            if self.engine.gate is not None:
                assert self.engine.gate.acquire(timeout=30)
            yield k

    def close(self):
        self.engine.loaded.remove(self.source.kind)


class FakeServedModel:
    """Weights that are served, of which only their memory is followed."""

    def __init__(self, chat_engine):
        self.label, self.held_bytes = chat_engine.label, chat_engine.held_bytes
        self.chat_engine, self.asked, self.is_closed = chat_engine, 0, False
        self.slow_note = chat_engine.slow_note

    def close(self):
        self.is_closed = True
        self.chat_engine.close()


class FakeChatCalls:
    """Replaces what the chat calls in the engine (`ChatCalls`); at most `most` weights fit."""

    folder_of = staticmethod(folder_of)
    serve = FakeServedModel

    def __init__(self):
        self.loaded, self.loads, self.heard, self.gate, self.most = [], [], [], None, 9
        self.slow = ""

    def fit_together(self, sources):
        free = self.most - len(self.loaded)
        if free < 1:
            raise FitError("It needs more RAM than is free.")
        return len(sources) <= free

    def load(self, source, progress):
        progress(1, 2)
        assert len(self.loaded) < self.most
        self.loaded.append(source.kind)
        self.loads.append(source.kind)
        return FakeChatEngine(self, source)
