"""What was trained to end an answer ends it: in the answers that a run draws, and in those of plain
transformers from the exported folder. The end token of the model is another one, as where a base
model is trained on conversations.
"""

from __future__ import annotations

import pytest

from tests.support.ended_answers import (
    CAPITALS,
    OWN_END,
    Learned,
    config_of,
    learned,
    model_folder,
    question,
    tokenizer_for,
)
from tests.support.published import template
from tests.support.references.trl_pairs import PAIRS

FEW = ("glm4moe", "qwen2_5")


def families() -> list:
    """Returns all templates; most of them are for the second tier."""
    reason = "it trains a model for each of 29 chat templates; a plain run has two"
    later = pytest.mark.everything(reason)
    return [pytest.param(name, marks=() if name in FEW else later) for name in PAIRS]


def asked(found: Learned, country: str, capital: str):
    """Returns the tokens of a prompt: the template's own, or what it writes before the answer where
    it begins an answer otherwise than it asks for one (a block of reasoning, in some families).
    """
    turns = [{"role": "user", "content": question(country)}]
    prompt = found.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    turns.append({"role": "assistant", "content": capital})
    whole = found.tokenizer.apply_chat_template(turns, tokenize=False)
    if not whole.startswith(prompt):
        prompt = whole.rpartition(capital)[0]
    return found.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]


def assert_ends_by_itself(found: Learned) -> set[str]:
    """Asserts that a run and its export answer all questions rightly, and returns what ended the
    answers of the export.
    """
    correct, total = found.exact
    assert correct == total == 12
    ends = set()
    for country, capital in CAPITALS.items():
        answer, end = found.answer(asked(found, country, capital))
        assert answer.endswith(capital) and end, (country, answer, end)
        ends.add(end)
    return ends


@pytest.mark.parametrize("name", families())
def test_answers_end_by_themselves_with_every_template(tmp_path, name):
    tokenizer = tokenizer_for(template(name))
    model_folder(tmp_path / "model", tokenizer)
    found = learned(config_of(tmp_path), tmp_path / "runs")
    (end,) = assert_ends_by_itself(found)
    assert end != OWN_END or name.startswith("phi3")  # Phi's template ends with it what it writes
    assert found.ends[0] == OWN_END and end in found.ends
