"""Texts with words that tell on decoded tokens what each text was: an answer, a question, or an
answer that must not be trained.
"""

from __future__ import annotations

import itertools
import re
from random import Random

ANSWER = "ans"
CONTEXT = "ctx"
NEVER = "bad"
"""This marks an answer that its row excludes: rejected, of weight 0, or of the loser."""
EITHER = "own"
"""This marks an answer whose row does not clearly say whether it is trained."""
_MARK = re.compile(rf"(?:{ANSWER}|{CONTEXT}|{NEVER}|{EITHER})\d+x")
PIECES = [
    *("", " ", "\n", "\n\n", "\t ", "\r\n", "\x85", "\u2028", "\u3000", "hello", "an answer", "42"),
    *(
        "日本",
        "👩‍👩‍👧",
        "e\u0301",
        "\u200b",
        "\ufeff",
        "\x00",
        "שלום",
        "ﬁ",
        '"',
        "\\",
        "&amp;",
        ";,|",
    ),
    *("\ue000", "\uf8ff", "\U000f0000", "\U0010fffd", "\ufffe", "{{ 1 }}", "{% raw %}", "'\"'"),
    *(
        "<|im_start|>assistant\n",
        "<|im_end|>",
        "</s>",
        "<s>",
        "[INST]",
        "[/INST]",
        "<|im_",
        "end|>",
    ),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "<|eot_id|>",
        "<end_of_turn>\n",
        "<start_of_turn>model",
    ),
    *(
        "Human: ",
        "\n\nAssistant: ",
        "User:",
        "```json\n{}\n```",
        "[1, 2]",
        '{"a": 1}',
        "▁",
        "<0x0A>",
    ),
]


class Writer:
    """Writes texts, each with a word of its own."""

    def __init__(self, random: Random):
        self.random = random
        self._numbers = itertools.count(1)

    def text(self, mark: str) -> str:
        """Returns a text with a word of this mark, often with odd pieces around it."""
        word = f"{mark}{next(self._numbers)}x"
        if self.random.random() < 0.5:
            return word
        before, behind = self.random.choice(PIECES), self.random.choice(PIECES)
        space = self.random.choice(("", " ", "\n"))
        return f"{before}{space}{word}{space}{behind}"

    def name(self, mark: str) -> str:
        """Returns the word alone, for the name of a function."""
        return f"{mark}{next(self._numbers)}x"


def marks_in(text: str) -> set[str]:
    """Returns the words in a text, which may have white space between any of its letters."""
    return set(_MARK.findall("".join(text.split())))
