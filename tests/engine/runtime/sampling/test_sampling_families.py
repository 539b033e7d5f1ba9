"""Greedy answers of every supported family equal transformers' generate, through the family's own
cache where it has one that can be trusted.
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.choices import PlanChoices
from engine.runtime.sampling.answers import AnswerLimits
from tests.support.families import tiny_family_config
from tests.support.family_parity import SUPPORTED
from tests.support.library_version import AS_RECORDED, another_version_may_refuse
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED, plain_model, streamed

pytestmark = pytest.mark.computing

UNTRUSTED = {
    "bamba": "its logits with a cache are 0.4 % off in transformers itself",
    "moshi": "its logits with a cache are 40 % off in transformers itself",
    "openai-gpt": "it has no cache",
    "rwkv": "its state is no cache that the blocks are given",
    "xlstm": "its own cache refuses its states",
}
"""Families that are answered without a cache, and why; they are compared with generate without a
cache.
"""
CHANGES = {"jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}}
"""generate itself needs a layer of attention."""

NEW_TOKENS = 10


@pytest.mark.parametrize("family", slow_but(SUPPORTED, MOST_USED, FAMILY_SWEEP))
def test_greedy_answers_equal_generate(family):
    config = tiny_family_config(family, **CHANGES.get(family, {}))
    plain = plain_model(config).eval()
    with another_version_may_refuse():
        run = streamed(plain, PlanChoices(), config=config)
    try:
        if AS_RECORDED:
            assert bool(run.sampler.slow_note) == (family in UNTRUSTED)
        answers = run.sampler.generate(PROMPTS, AnswerLimits(NEW_TOKENS, {2}))
        assert answers == [
            plain_answer(plain, prompt, NEW_TOKENS, use_cache=family not in UNTRUSTED)
            for prompt in PROMPTS
        ]
    finally:
        run.close()
