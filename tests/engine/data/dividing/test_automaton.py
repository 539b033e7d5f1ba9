"""A table made of a pattern divides texts as the library does that tokenizers use."""

from __future__ import annotations

import random
import unicodedata

import pytest
from tokenizers import Regex, pre_tokenizers

from engine.data.dividing.automaton import automaton_of
from engine.data.dividing.pattern import CODES, UnknownPattern, read_pattern

pytestmark = pytest.mark.computing
PATTERNS = (
    "a|ab|abc|c|b",
    r"(?:a|ab)c|[abc]|\s+",
    "(?:ab|a)(?:bc|b)?|[abc]{2,3}",
    "a{2}|a{3,}b",
    r"ab?c*|b{0,2}c|\s+(?!\S)",
    r"[^\S\n]+|\n",
    r"(?i:'s|k)|[abcks']+(?!a)",
    r" ?[abc]+|\s+(?!\S)|\s*[\r\n]+",
    r"[a-c](?![r-t])|[^b-r]{2}|[a-aS-k]+",
)
REST = r"|\S|\s"


def by_the_library(pattern, text):
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    return [word for word, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize("pattern", PATTERNS, ids=range(len(PATTERNS)))
def test_words_are_those_of_the_library(pattern):
    pattern += REST
    automaton, draw = automaton_of(pattern), random.Random(pattern)
    for length in range(1, 400):
        text = "".join(draw.choices("aabbcc  \n\r'sSkK\u212aſ", k=length % 20 + 1))
        assert automaton.words(text) == by_the_library(pattern, text), repr(text)


@pytest.mark.parametrize(
    "pattern",
    ["a++", "a+?", "(a)", "(?=a)", "(?!ab)", "(?<!a)b", r"\bA", "[z-a]", "[-a]", "[a-]", "[a-",
     r"[\n-a]", r"[a-\n]", "(?i:[a-c])", "[a", "(?:a", "a)", "\\",
     "*", "a*", "^a", "a$", ".", r"\d", r"\p{Han}", r"\p{C}", "(?:ab)*", "a{40}", "(?i:é)", "{",
     ""],
)  # fmt: skip
def test_what_is_not_understood_is_left_to_the_tokenizer(pattern):
    with pytest.raises(UnknownPattern):
        automaton_of(pattern)


def test_each_character_is_of_its_category():
    members = read_pattern(r"\p{Lu}").parts[0].members
    for code in range(0, CODES, 97):
        assert members[code] == (unicodedata.category(chr(code)) == "Lu"), hex(code)
