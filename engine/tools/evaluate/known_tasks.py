"""Tasks of lm-evaluation-harness that the page offers by name, with what they measure and how much
work they are. This module does not import the harness.
"""

from __future__ import annotations

from dataclasses import dataclass

INSTALL = 'pip install "lm_eval>=0.4.10"'
"""Command that installs the harness."""


@dataclass(frozen=True)
class KnownTask:
    """A task, with its work as it is without solved examples."""

    name: str
    about: str
    samples: int
    """Number of samples of the task."""
    tokens: int
    """Tokens of all rows of a sample, about: a choice has a row for each answer."""
    written: int = 0
    """Tokens of an answer that is written, at most; 0 where answers are scored alone."""

    def work(self, limit: int | None) -> tuple[int, int]:
        """Returns the tokens that are read, and those that are written at most, for at most `limit`
        samples.
        """
        samples = self.samples if limit is None else min(self.samples, limit)
        return samples * self.tokens, samples * self.written


KNOWN_TASKS = (
    KnownTask("arc_easy", "School science, easy: choose the answer", 2376, 140),
    KnownTask("arc_challenge", "School science, hard: choose the answer", 1172, 160),
    KnownTask("hellaswag", "Everyday scenes: choose how they go on", 10042, 420),
    KnownTask("piqa", "Everyday physics: choose the better way", 1838, 90),
    KnownTask("winogrande", "Whom a pronoun means", 1267, 55),
    KnownTask("boolq", "Yes or no, from a passage", 3270, 280),
    KnownTask("openbookqa", "Elementary science: choose the answer", 500, 80),
    KnownTask("truthfulqa_mc2", "Truth against common misbeliefs", 817, 650),
    KnownTask("lambada_openai", "The last word of a passage", 5153, 85),
    KnownTask("gsm8k", "School mathematics in words, answers written out", 1319, 900, 256),
)
