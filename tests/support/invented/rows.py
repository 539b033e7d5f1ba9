"""Rows of each format, as their users write them, with marked texts."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from tests.support.invented.texts import ANSWER, CONTEXT, EITHER, NEVER, Writer

Row = dict[str, Any]
_NOT_TRAINED = (("weight", 0), ("train", False), ("training", False), ("loss_weight", 0.0))
_PAIRS = (
    ("prompt", "completion"),
    ("question", "answer"),
    ("query", "response"),
    ("input", "output"),
    ("Prompt", "Completion"),
    ("INPUT", "OUTPUT"),
    ("Question", "Answer"),
)


class Rows:
    """Draws rows of a format. All rows of a data set have the same columns."""

    def __init__(self, random: Random, name: str):
        self.random = random
        writer = Writer(random)
        self.text, self.word = writer.text, writer.name
        self._make: Callable[[], Row] = getattr(self, f"_{name}")
        self._more = {key: self._seldom(0.2) for key in ("system", "tools", "history", "input")}
        self._column = random.choice(("messages", "conversation", "chat", "items"))
        self._pair = random.choice(_PAIRS)
        self._variant = random.randrange(3)
        self.are_of_lists = name in ("messages", "images") and self._variant == 1
        """The turns are an object of lists: a change of one list may shift texts to other roles."""

    def row(self) -> Row:
        """Draws a row."""
        row = self._make()
        if self._seldom(0.2):
            row["note"] = self.text(CONTEXT)
        return row

    def _seldom(self, share: float) -> bool:
        return self.random.random() < share

    # ------------------------------------------------------------------ conversations

    def _messages(self) -> Row:
        turns = self._turns()
        value: Any = turns
        if self._variant == 1:
            keys = dict.fromkeys(key for turn in turns for key in turn)
            value = {key: [turn.get(key) for turn in turns] for key in keys}
        elif self._variant == 2:
            value = json.dumps(turns)
        return {self._column: value} | self._beside()

    def _beside(self) -> Row:
        row: Row = {}
        if self._more["system"]:
            row["system"] = self.text(CONTEXT)
        if self._more["tools"]:
            function = {"name": self.word(CONTEXT), "description": self.text(CONTEXT)}
            tools = [{"type": "function", "function": function | {"parameters": {}}}]
            row["tools"] = self.random.choice((tools, [function], json.dumps(tools)))
        return row

    def _turns(self) -> list[Row]:
        turns: list[Row] = []
        if self._seldom(0.3):
            turns.append({"role": "system", "content": self._content(CONTEXT)})
        for _ in range(self.random.randint(1, 3)):
            turns.append({"role": "user", "content": self._content(CONTEXT)})
            if self._seldom(0.15):
                turns += self._called()
            turns.append(self._answer())
        return turns

    def _content(self, mark: str) -> Any:
        text = self.text(mark)
        return [{"type": "text", "text": text}] if self._seldom(0.1) else text

    def _answer(self) -> Row:
        is_left_out = self._seldom(0.2)
        mark = NEVER if is_left_out else ANSWER
        turn = {"role": "assistant", "content": self._content(mark)}
        if is_left_out:
            key, value = self.random.choice(_NOT_TRAINED)
            turn[key] = value
        elif self._seldom(0.1):
            turn["weight"] = 1
        if self._seldom(0.1):
            turn["reasoning_content"] = self.text(mark)
        return turn

    def _called(self) -> list[Row]:
        name, shown = self.word(ANSWER), {"a": self.text(ANSWER)}
        arguments = self.random.choice((shown, json.dumps(shown), json.dumps(json.dumps(shown))))
        function = {"name": name, "arguments": arguments}
        if self._seldom(0.5):
            calls = {"tool_calls": [{"type": "function", "function": function}]}
            role = "tool"
        else:
            calls, role = {"function_call": function}, "function"
        return [
            {"role": "assistant", "content": None, **calls},
            {"role": role, "content": self.text(CONTEXT), "name": name},
        ]

    def _sharegpt(self) -> Row:
        turns = []
        if self._seldom(0.3):
            turns.append({"from": "system", "value": self.text(CONTEXT)})
        for _ in range(self.random.randint(1, 3)):
            turns.append({"from": "human", "value": self.text(CONTEXT)})
            if self._seldom(0.15):
                call = {"name": self.word(ANSWER), "arguments": {"a": self.text(ANSWER)}}
                turns.append({"from": "function_call", "value": json.dumps(call)})
                turns.append({"from": "observation", "value": self.text(CONTEXT)})
            turns.append({"from": "gpt", "value": self.text(ANSWER)})
            if self._seldom(0.15):
                turns[-1] = {"from": "gpt", "value": self.text(NEVER), "weight": 0}
        return {"conversations": turns} | self._beside()

    def _gemini(self) -> Row:
        contents = []
        for _ in range(self.random.randint(1, 2)):
            contents.append({"role": "user", "parts": [{"text": self.text(CONTEXT)}]})
            if self._seldom(0.2):
                name = self.word(ANSWER)
                call = {"name": name, "args": {"a": self.text(ANSWER)}}
                answer = {"name": name, "response": {"b": self.text(CONTEXT)}}
                contents.append({"role": "model", "parts": [{"functionCall": call}]})
                contents.append({"role": "user", "parts": [{"functionResponse": answer}]})
            parts = [{"text": self.text(ANSWER)} for _ in range(self.random.randint(1, 2))]
            contents.append({"role": "model", "parts": parts})
        row: Row = {"contents": contents}
        if self._more["system"]:
            row["systemInstruction"] = {"parts": [{"text": self.text(CONTEXT)}]}
        return row

    def _oasst(self) -> Row:
        def reply(depth: int, mark: str, other: str) -> Row:
            replies = []
            if depth:
                mine = CONTEXT if depth % 2 else mark
                best = reply(depth - 1, mark, other) | {"rank": 0}
                worse = reply(0, other, other) | {"rank": 1}
                replies = self.random.choice(([best, worse], [worse, best]))
            else:
                mine = mark
            role = "prompter" if depth % 2 else "assistant"
            return {"text": self.text(mine), "role": role, "replies": replies}

        depth = self.random.choice((1, 3))
        return {"message_tree_id": "t", "prompt": reply(depth, ANSWER, EITHER)}

    # ------------------------------------------------------------------ pairs

    def _alpaca(self) -> Row:
        row = {"instruction": self.text(CONTEXT), "output": self.text(ANSWER)}
        if self._more["input"]:
            row["input"] = self.text(CONTEXT)
        return row | self._with_history()

    def _with_history(self) -> Row:
        row: Row = {"system": self.text(CONTEXT)} if self._more["system"] else {}
        if self._more["history"]:
            row["history"] = [[self.text(CONTEXT), self.text(ANSWER)]]
        return row

    def _pairs(self) -> Row:
        prompt, completion = self._pair
        return {prompt: self.text(CONTEXT), completion: self.text(ANSWER)} | self._with_history()

    def _kto(self) -> Row:
        is_desirable = self._seldom(0.5)
        label: Any = int(is_desirable) if self._variant == 1 else is_desirable
        name = "kto_tag" if self._variant == 2 else "label"
        completion = self.text(ANSWER if is_desirable else NEVER)
        return {"prompt": self.text(CONTEXT), "completion": completion, name: label}

    def _preference(self) -> Row:
        asked, better, worse = self.text(CONTEXT), self.text(ANSWER), self.text(NEVER)
        if self._variant == 0:
            return {"prompt": asked, "chosen": better, "rejected": worse} | self._with_system()
        if self._variant == 1:
            shared = [{"role": "user", "content": asked}]
            return {
                key: [*shared, {"role": "assistant", "content": text}]
                for key, text in (("chosen", better), ("rejected", worse))
            }
        shared_text = f"\n\nHuman: {self.word(CONTEXT)}\n\nAssistant: "
        return {
            "chosen": shared_text + self.word(ANSWER),
            "rejected": shared_text + self.word(NEVER),
        }

    def _with_system(self) -> Row:
        return {"system": self.text(CONTEXT)} if self._more["system"] else {}

    def _arena(self) -> Row:
        winner = self.random.choice(("model_a", "model_b", "tie"))
        row: Row = {"winner": winner}
        for letter in "ab":
            mark = ANSWER if winner == f"model_{letter}" else NEVER
            row[f"conversation_{letter}"] = [
                {"role": "user", "content": self.text(CONTEXT)},
                {"role": "assistant", "content": self.text(mark)},
            ]
        return row

    # ------------------------------------------------------------------ texts

    def _segments(self) -> Row:
        marks = [CONTEXT, *self.random.choices((ANSWER, CONTEXT), k=3)]
        return {"segments": [{"label": mark == ANSWER, "text": self.text(mark)} for mark in marks]}

    def _text(self) -> Row:
        return {"text": " ".join(self.text(EITHER) for _ in range(self.random.randint(1, 4)))}

    def _images(self) -> Row:
        return self._messages() | {"images": [self.random.choice(("a.png", "b.jpg"))]}

    def _tokens(self) -> Row:
        """The texts become tokens once the tokenizer is known."""
        marks = [CONTEXT, *self.random.choices((ANSWER, CONTEXT), k=2)]
        return {"input_ids": [(self.word(mark), mark == ANSWER) for mark in marks]}


FORMATS = (
    *("messages", "sharegpt", "gemini", "oasst", "alpaca", "pairs", "kto", "preference"),
    *("arena", "segments", "text", "images", "tokens"),
)


def with_tokens(row: Row, tokenizer: Any) -> Row:
    """Returns a row of tokens, made of its texts."""
    pieces = [
        (tokenizer(text, add_special_tokens=False)["input_ids"], is_trained)
        for text, is_trained in row["input_ids"]
    ]
    ids = [token for tokens, _ in pieces for token in tokens]
    labels = [token if is_trained else -100 for tokens, is_trained in pieces for token in tokens]
    return row | {"input_ids": ids, "labels": labels}
