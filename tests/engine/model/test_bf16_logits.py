"""Logits in bf16 are those of plain transformers in bf16, to the bit, for every family that both
compute. `docs/precision.md` has the table.
"""

from __future__ import annotations

import re

import pytest

from engine.config.settings import ModelConfig
from engine.errors import ModelError
from engine.model.build.build import build_model
from engine.paths import PROGRAM_ROOT
from tests.support.bf16_table import BOUND, OTHER_ORDER, REFUSED, UNMEASURED, compare
from tests.support.families import tiny_family_config
from tests.support.family_parity import SUPPORTED
from tests.support.library_version import AS_RECORDED, NOT_AS_RECORDED, another_version_may_refuse
from tests.support.sets import FAMILY_SWEEP, slow_but

pytestmark = pytest.mark.computing

A_FEW = ("llama", "ernie4_5_moe", "deepseek_v3", "apertus", "gptj", "minimax", "xglm")
"""Each of these was once computed in another way, but for the first."""
COMPARED = [family for family in SUPPORTED if family not in {*REFUSED, *UNMEASURED}]
PAGE = PROGRAM_ROOT / "docs/precision.md"


def named_as_equal() -> set[str]:
    """The families that the page names as equal to the bit."""
    inside = PAGE.read_text(encoding="utf-8").split("<!-- logits -->")[1]
    words = re.search(r"that a run uses: (.*?)\.\n\n", inside, re.DOTALL)
    assert words is not None
    return {family.strip() for family in words[1].split(",")}


@pytest.mark.parametrize("family", slow_but(COMPARED, A_FEW, FAMILY_SWEEP))
def test_logits_in_bf16_are_those_of_plain_transformers(family):
    with another_version_may_refuse():
        found = compare(family)
    assert found.alike.same_bits, "with the attention of transformers"
    assert found.chosen.same_bits == (family not in OTHER_ORDER)
    assert found.chosen.ours <= BOUND * found.chosen.theirs


@pytest.mark.skipif(not AS_RECORDED, reason=NOT_AS_RECORDED)
def test_the_page_names_every_family():
    named = named_as_equal()
    assert named == set(COMPARED) - set(OTHER_ORDER)
    inside = PAGE.read_text(encoding="utf-8").split("<!-- logits -->")[1]
    for family in (*OTHER_ORDER, *REFUSED, *UNMEASURED):
        assert f"| {family} |" in inside


@pytest.mark.parametrize("family", REFUSED)
def test_what_fails_in_bf16_is_refused_in_a_sentence(family):
    with pytest.raises(ModelError, match=r"cannot be computed in bfloat16.*float32\.$"):
        build_model(tiny_family_config(family), ModelConfig(source="tiny", dtype="bfloat16"))
