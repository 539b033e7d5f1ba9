"""The language model of a model that also reads images is trained on text as the whole model of
transformers is, whose other weights are frozen.
"""

from __future__ import annotations

import pytest

from engine.config.settings import ModelConfig
from engine.model.build.build import build_model
from engine.paths import PROGRAM_ROOT
from engine.planning.fit.sampling_memory import CacheCost
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.sampling.answers import AnswerLimits
from tests.support.family_parity import law_one
from tests.support.library_version import AS_RECORDED, NOT_AS_RECORDED
from tests.support.multimodal import CONFIGS, multimodal_config, multimodal_model, multimodal_table
from tests.support.plain_answers import PROMPTS, plain_answer
from tests.support.sets import FAMILY_SWEEP, slow_but
from tests.support.tiny import streamed

pytestmark = pytest.mark.computing

PLAIN = ("qwen2_5_vl",)
"""A plain run of the tests trains this one."""
AMPLIFIES = ("gemma4",)
"""As in test_families.py."""
STEPS = 10
NEW_TOKENS = 10


def frozen_but_its_language_model(config):
    """The whole model of transformers, in which nothing that text does not reach is trained."""
    whole = multimodal_model(config)
    non_text = build_model(config, ModelConfig(source="tiny", dtype="float32")).non_text
    for name, parameter in whole.named_parameters():
        parameter.requires_grad_(name not in non_text)
    return whole, non_text


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", slow_but(CONFIGS, PLAIN, FAMILY_SWEEP))
def test_training_on_text_equals_training_of_the_whole_model(family, tied):
    config = multimodal_config(family, tied)
    whole, non_text = frozen_but_its_language_model(config)
    assert any("vis" in name for name in non_text)
    assert not any("lm_head" in name or "language_model" in name for name in non_text)
    law_one(config, family in AMPLIFIES, steps=STEPS, plain=whole)


@pytest.mark.parametrize("family", slow_but(CONFIGS, PLAIN, FAMILY_SWEEP))
def test_greedy_answers_equal_generate_of_the_whole_model(family):
    config = multimodal_config(family)
    whole = multimodal_model(config)
    run = streamed(whole, PlanChoices(), config=config)
    try:
        assert isinstance(run.sampler.cache_cost, CacheCost)
        answers = run.sampler.generate(PROMPTS, AnswerLimits(NEW_TOKENS, {2}))
        assert answers == [plain_answer(whole, prompt, NEW_TOKENS) for prompt in PROMPTS]
    finally:
        run.close()


def test_the_architecture_decides_which_class_a_configuration_has():
    """Some families have a class for text with the configuration of the whole model."""
    config = multimodal_config("qwen3_5")
    classes = {}
    for name in ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM", None):
        config.architectures = [name] if name else None
        model = build_model(config, ModelConfig(source="tiny", dtype="float32"))
        classes[name] = type(model.skeleton.model).__name__, bool(model.non_text)
    assert classes == {
        "Qwen3_5ForConditionalGeneration": ("Qwen3_5ForConditionalGeneration", True),
        "Qwen3_5ForCausalLM": ("Qwen3_5ForCausalLM", False),
        None: ("Qwen3_5ForCausalLM", False),
    }


@pytest.mark.slow(FAMILY_SWEEP)
@pytest.mark.skipif(not AS_RECORDED, reason=NOT_AS_RECORDED)
def test_the_page_of_families_has_the_table_of_today():
    page = (PROGRAM_ROOT / "docs/families.md").read_text()
    inside = page.split("<!-- multimodal -->")[1].split("<!-- /multimodal -->")[0].strip()
    assert inside == multimodal_table(), (
        "run python -m tests.support.multimodal and put its output into docs/families.md"
    )
