"""How the answers of each family are drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from engine.planning.fit.sampling_memory import CacheCost
from engine.planning.schedule.choices import PlanChoices
from tests.support.families import PAGE_WIDTH, tiny_family_config
from tests.support.tiny import plain_model, streamed

SHARED, OWN, NONE = "shared", "own", "none"
CHANGES = {"jamba": {"attn_layer_period": 2, "attn_layer_offset": 1}}
"""generate itself needs a layer of attention."""


def tiny_config_for_answers(family: str) -> Any:
    return tiny_family_config(family, **CHANGES.get(family, {}))


def way_of(sampler: Any) -> str:
    """With one cache for all rows, with caches of the family's own code, or without any."""
    if isinstance(sampler.rows_cost, CacheCost):
        return SHARED
    return OWN if isinstance(sampler.cache_cost, CacheCost) else NONE


def way_of_family(family: str) -> str:
    config = tiny_config_for_answers(family)
    run = streamed(plain_model(config).eval(), PlanChoices(), config=config)
    try:
        return way_of(run.sampler)
    finally:
        run.close()


def ways_text(ways: Mapping[str, str]) -> str:
    """What docs/families.md says of the way of each family, in Markdown."""
    own, none = (sorted(f for f, way in ways.items() if way == each) for each in (OWN, NONE))
    text = (
        f"**Answers** of {len(ways) - len(own) - len(none)} of the families that train are drawn "
        f"with one cache for all rows. {len(own)} decode with the caches of their own code: "
        f"{', '.join(own)}. {len(none)} have no cache that can be used, and are slow: "
        f"{', '.join(none)}."
    )
    return textwrap.fill(text, PAGE_WIDTH, break_on_hyphens=False)
