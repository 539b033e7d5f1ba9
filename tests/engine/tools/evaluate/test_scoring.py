"""Scores of continuations are those of plain transformers, and rows are shared where they can be.

Nothing here needs lm-evaluation-harness.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import DataError, FitError, GpuMemoryError
from engine.runtime.sampling.answers import AnswerLimits
from engine.runtime.sampling.drawing import Drawing
from engine.tools.chat.chat_engines import load
from engine.tools.chat.chat_sources import folder_of
from engine.tools.evaluate.answering import WantedAnswers
from engine.tools.evaluate.scoring import Continuation, score
from tests.support.folders import make_model, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("scoring") / "model")


@pytest.fixture(scope="module")
def sampler(folder):
    chat_engine = load(folder_of(str(folder)))
    yield chat_engine.sampler()
    chat_engine.close()


class Watched:
    """An engine whose micro-batches are noted, and which has the memory for `most` positions."""

    def __init__(self, engine, most=None):
        self.engine, self.most, self.shapes = engine, most, []

    def scores(self, batches):
        given = list(batches)
        for rows in given:
            if self.most is not None and rows.input_ids.size > self.most:
                raise GpuMemoryError("7 GiB in use of 8")
            self.shapes.append(rows.input_ids.shape)
            yield from self.engine.scores([rows])


def some_continuations(count=40):
    drawn = np.random.default_rng(5)
    return [
        Continuation(
            drawn.integers(0, 17, 1 + k % 11).tolist(), drawn.integers(0, 17, 1 + k % 4).tolist()
        )
        for k in range(count)
    ]


def test_likelihoods_are_those_of_plain_transformers(folder, sampler):
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    asked = some_continuations()
    for one, found in zip(asked, score(sampler.engine, asked), strict=True):
        ids = torch.tensor([[*one.context, *one.tokens]])
        with torch.no_grad():
            logs = plain(ids).logits[0, len(one.context) - 1 : -1].log_softmax(-1)
        tokens = torch.tensor(one.tokens)
        assert found.log == pytest.approx(float(logs.gather(1, tokens[:, None]).sum()), abs=1e-4)
        assert found.is_greedy == bool((logs.argmax(-1) == tokens).all())


def test_choices_of_one_token_share_the_row_of_their_question(sampler):
    watched = Watched(sampler.engine)
    vocabulary = sampler.engine.model.config.vocab_size
    asked = [Continuation([3, 4, 5], [token]) for token in range(vocabulary)]
    found = score(watched, asked)
    assert watched.shapes == [(1, 3)]
    assert sum(np.exp(one.log) for one in found) == pytest.approx(1, abs=1e-5)
    assert [one.is_greedy for one in found].count(True) == 1


def test_the_head_sees_few_positions_at_once(sampler, monkeypatch):
    skeleton, seen = sampler.engine.model.skeleton, []
    logits = type(skeleton).logits

    def noted(self, states):
        seen.append(len(states))
        return logits(self, states)

    monkeypatch.setattr(type(skeleton), "logits", noted)
    score(sampler.engine, [Continuation([k], [5] * 30) for k in range(17)])
    assert max(seen) <= 256 and sum(seen) == 17 * 30


def test_memory_that_does_not_last_is_met_with_smaller_micro_batches(sampler):
    asked = some_continuations()
    reported = []
    watched = Watched(sampler.engine, most=60)
    found = score(watched, asked, progress=lambda done, total, _="": reported.append((done, total)))
    expected = score(sampler.engine, asked)
    assert [one.log for one in found] == pytest.approx([one.log for one in expected], abs=1e-5)
    assert [one.is_greedy for one in found] == [one.is_greedy for one in expected]
    assert max(rows * tokens for rows, tokens in watched.shapes) <= 60
    assert reported[-1] == (40, 40)
    with pytest.raises(FitError, match=r"7 GiB in use of 8\) with a single row of a task"):
        score(Watched(sampler.engine, most=5), asked)


def test_a_long_context_loses_its_beginning_and_a_long_continuation_is_refused(sampler):
    long = Continuation([1, 2, 3, 4, 5, 6, 7], [8, 9])
    (found,) = score(sampler.engine, [long], longest=4)
    (short,) = score(sampler.engine, [Continuation([5, 6, 7], [8, 9])])
    assert found.log == pytest.approx(short.log, abs=1e-5)
    with pytest.raises(DataError, match="has 5 tokens and this model takes 4 at most"):
        score(sampler.engine, [Continuation([1], [2] * 5)], longest=4)


def test_an_empty_continuation_is_certain(sampler):
    (found, _) = score(sampler.engine, [Continuation([1, 2], []), Continuation([1], [2])])
    assert (found.log, found.is_greedy) == (0.0, True)


# ---------------------------------------------------------------------- answers in words


def test_an_answer_ends_at_its_text_and_no_later(sampler):
    limits = AnswerLimits(12, set(), None)
    prompts = [[7, 8], [9], [3, 4, 5], [16, 16]]
    whole = sampler.generate(prompts, limits)
    last = whole[0][4]
    ended = sampler.generate(
        prompts, AnswerLimits(12, set(), None, lambda tokens: tokens[-1] == last)
    )
    for answer, all_of_it in zip(ended, whole, strict=True):
        count = all_of_it.index(last) + 1 if last in all_of_it else 12
        assert answer == all_of_it[:count]
    (one, *_), limits = prompts, AnswerLimits(12, set(), None, lambda tokens: tokens[-1] == last)
    assert list(sampler.stream(one, limits)) == ended[0]


def test_what_a_task_says_of_its_answers_is_read():
    wanted = WantedAnswers.of({"until": "six", "max_tokens": 9, "temperature": 0.0})
    assert wanted == WantedAnswers(("six",), 9, Drawing())
    assert WantedAnswers.of({}) == WantedAnswers((), 256, Drawing())
    drawn = WantedAnswers.of({"do_sample": True, "temperature": 0.7, "until": ["", "a"]})
    assert drawn == WantedAnswers(("a",), 256, Drawing(0.7, 1.0))
    assert WantedAnswers.of({"do_sample": False, "temperature": 0.7, "top_k": 4}).drawing == (
        Drawing()
    )
    filtered = WantedAnswers.of({"do_sample": True, "temperature": 1, "top_k": 4, "min_p": 0.1})
    assert filtered.drawing == Drawing(1.0, top_k=4, min_p=0.1)
    with pytest.raises(DataError, match="which the streaming engine does not have"):
        WantedAnswers.of({"num_beams": 3})


def test_a_text_that_ends_an_answer_is_found_across_tokens():
    tokenizer = make_tokenizer()
    wanted = WantedAnswers.of({"until": ["two three"]})
    is_over = wanted.is_over(tokenizer.decode)
    ids = tokenizer.encode("one two three four")
    assert [is_over(ids[:count]) for count in (1, 2, 3, 4)] == [False, False, True, True]
    assert wanted.cut("one two three four") == "one "
