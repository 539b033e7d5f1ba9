"""A text that is divided around runs of characters, and then by a pattern, is divided by one table
as the library divides it step by step.
"""

from __future__ import annotations

import random

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.data.dividing.automaton import automaton_of
from engine.data.dividing.pattern import UnknownPattern
from engine.data.dividing.runs_first import in_pieces, read_runs

pytestmark = pytest.mark.computing
WORDS = r" ?[ab]+|\s+(?!\S)|\s+|\S"
STEPS = {
    "each digit": ([r"\p{N}"], WORDS),
    "runs of digits": ([r"\p{N}+"], WORDS),
    "three digits": ([r"\p{N}{1,3}"], r" ?[ab]+|\s+(?!\S)|\s+|[^\p{N}\s]"),
    "two kinds of runs": ([r"\p{N}{1,2}", "[一-龥]+"], r" ?[ab一]+|\s+(?!\S)|[^\p{N}]"),
    "letters too": (["[a]+", r"\p{N}"], WORDS),
}


@pytest.mark.parametrize("name", STEPS)
def test_words_are_those_of_the_library(name):
    first, last = STEPS[name]
    patterns = [*first, last]
    there = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    )
    ours = in_pieces(automaton_of(last), list(map(read_runs, first)))
    draw = random.Random(name)
    for length in range(1, 1500):
        text = "".join(draw.choices("aab1234٣ 　\n.一丁", k=length % 24 + 1))
        found = [word for word, _ in there.pre_tokenize_str(text)]
        assert ours.words(text) == found, repr(text)


def test_a_border_ends_a_word_that_may_begin_anew_in_its_middle():
    """The table of `a*b` is in its first state again behind each `a`."""
    ours = in_pieces(automaton_of("a*b"), [read_runs(r"\p{N}")])
    assert ours.words("a1b") == ["a", "1", "b"] and ours.words("aab1") == ["aab", "1"]


@pytest.mark.parametrize(
    "first, last",
    [
        ([r"\p{N}", "[1-3]"], WORDS),  # a character is in both
        ([r"\p{N}{1,3}"], WORDS),  # pieces of three are divided once more
        ([r"\p{N}{2,3}"], WORDS),
        ([r"\p{N}*"], WORDS),
        (["ab"], WORDS),
        (["a|b"], WORDS),
    ],
)
def test_what_one_table_cannot_do_is_left_to_the_tokenizer(first, last):
    with pytest.raises(UnknownPattern):
        in_pieces(automaton_of(last), list(map(read_runs, first)))
