"""Answers of a conversation with a model."""

from __future__ import annotations

from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import Sampling

QUESTION = [{"role": "user", "content": "say after three"}]
GREEDY = Sampling(max_new_tokens=6)


def text_of(chat_engine, messages=QUESTION, sampling=GREEDY):
    ids = list(chat_engine.answer(messages, sampling))
    return chat_engine.prompt_builder.text(ids)


def answer_of(source, messages=QUESTION, sampling=GREEDY):
    chat_engine = load(source)
    try:
        return text_of(chat_engine, messages, sampling)
    finally:
        chat_engine.close()
