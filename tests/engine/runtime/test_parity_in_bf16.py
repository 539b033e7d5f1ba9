"""Law 1 in bf16: streamed training is as good as plain transformers in bf16 with fp32 masters, and
differs from it by less than one rounding in the first step.
"""

from __future__ import annotations

import pytest

from engine.planning.schedule.choices import PlanChoices
from tests.support.bf16_parity import DENSE, MIXTURE, ROWS, compare_in_bf16
from tests.support.tiny import MOST_USED, tiny_config

pytestmark = pytest.mark.computing


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", MOST_USED)
def test_streamed_training_equals_plain_training_in_bf16(family: str, tied: bool):
    config = tiny_config(family, tie_word_embeddings=tied)
    bounds = MIXTURE if family == "mixtral" else DENSE
    compare_in_bf16(config, ROWS, PlanChoices().changed(micro_batches=2), bounds=bounds)
