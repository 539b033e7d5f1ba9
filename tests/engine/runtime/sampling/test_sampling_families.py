"""Greedy answers of every supported family equal transformers' generate, through the family's own
cache where it has one that can be trusted.
"""

from __future__ import annotations

import pytest

from engine.paths import PROGRAM_ROOT
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.sampling.answers import AnswerLimits
from tests.support.answer_ways import (
    NONE,
    OWN,
    SHARED,
    tiny_config_for_answers,
    way_of,
    ways_text,
)
from tests.support.family_parity import SUPPORTED
from tests.support.library_version import AS_RECORDED, another_version_may_refuse
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import MOST_USED, plain_model, streamed

pytestmark = pytest.mark.computing

UNCACHED = {
    "bamba": "its logits with a cache are 0.4 % off in transformers itself",
    "openai-gpt": "it has no cache",
    "rwkv": "its state is no cache that the blocks are given",
    "xlstm": "its own cache refuses its states",
}
"""Families that are answered without a cache, and why."""
OWN_CACHES = {
    "axk2",
    "bailing_hybrid",
    "bloom",
    "deepseek_v32",
    "deepseek_v4",
    "doge",
    "dots3_note",
    "dots3_note_text",
    "falcon",
    "falcon_h1",
    "falcon_mamba",
    "glm_moe_dsa",
    "gpt_neo",
    "gpt_neox_japanese",
    "granitemoehybrid",
    "hy_v4",
    "inkling_text",
    "jamba",
    "kimi_linear",
    "lara_mini",
    "lfm2",
    "lfm2_moe",
    "lfm3",
    "mamba",
    "mamba2",
    "minimax",
    "mpt",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen4_exp",
    "qwen4_exp_text",
    "trocr",
    "xglm",
    "zamba",
    "zamba2",
    "zaya",
}
"""Families that are answered with the caches of their own code. The others share one."""
PLAIN_UNCACHED = UNCACHED | {
    "moshi": "its logits with a cache of its own are 40 % off in transformers itself"
}
"""These are compared with generate without a cache."""

NEW_TOKENS = 10


def expected_way(family: str) -> str:
    if family in UNCACHED:
        return NONE
    return OWN if family in OWN_CACHES else SHARED


def test_the_page_of_families_says_how_each_is_answered():
    page = (PROGRAM_ROOT / "docs/families.md").read_text()
    inside = page.split("<!-- answers -->")[1].split("<!-- /answers -->")[0].strip()
    assert inside == ways_text({family: expected_way(family) for family in SUPPORTED})


@pytest.mark.parametrize("family", slow_but(SUPPORTED, MOST_USED, FAMILY_SWEEP))
def test_greedy_answers_equal_generate(family):
    config = tiny_config_for_answers(family)
    plain = plain_model(config).eval()
    with another_version_may_refuse():
        run = streamed(plain, PlanChoices(), config=config)
    try:
        if AS_RECORDED:
            assert way_of(run.sampler) == expected_way(family)
            assert bool(run.sampler.slow_note) == (family in UNCACHED)
        answers = run.sampler.generate(PROMPTS, AnswerLimits(NEW_TOKENS, {2}))
        assert answers == [
            plain_answer(plain, prompt, NEW_TOKENS, use_cache=family not in PLAIN_UNCACHED)
            for prompt in PROMPTS
        ]
    finally:
        run.close()
