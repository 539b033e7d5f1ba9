"""Rotary embeddings are scaled for rows that are longer than those that a model was trained for
(`model.rope_scaling`).

Only the configuration changes, as transformers and vLLM read it; transformers computes the
frequencies (`modeling_rope_utils.py`).

- `linear` divides all positions by the factor. `max_position_embeddings` stays the model's own:
  vLLM multiplies it by the factor.
- `yarn` divides the slow frequencies alone, and makes attention a little sharper.
  `max_position_embeddings` becomes the factor times the model's own, which is kept as
  `original_max_position_embeddings`.
- `dynamic` changes nothing up to `max_position_embeddings`, which stays. Beyond it, frequencies
  depend on the longest row that came before, so no such row is trained.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from engine.config.rope_settings import ROPE_SCALING, positions_with
from engine.config.settings import ModelConfig
from engine.errors import ConfigError, first_line
from engine.machine.short_memory import refuse_short_memory
from engine.model.build.library import empty_model, reads_more_than_text
from engine.model.build.tiny_config import shrunk

_PLAIN_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def scaled(config: Any, model: ModelConfig) -> Any:
    """Returns a configuration of transformers with the rotary embeddings that the settings ask for.
    Raises ConfigError for a model that has none, or none that can be scaled so.
    """
    if model.rope_scaling == "none":
        return config
    problem = _why_not(config)
    if problem:
        raise ConfigError(
            ROPE_SCALING,
            f"the rotary embeddings of {model.source} cannot be scaled, because {problem}; set it "
            "to none.",
        )
    changed = _scaled(config, model.rope_scaling, model.rope_factor)
    # At the length of the model, dynamic frequencies are the plain ones.
    probed = changed
    if model.rope_scaling == "dynamic":
        probed = _scaled(config, "linear", model.rope_factor)
    if not _differ(config, probed):
        raise ConfigError(
            ROPE_SCALING,
            f"{config.model_type} computes its positions in a way of its own, which cannot be "
            "scaled; set it to none.",
        )
    return changed


def note_of(model: ModelConfig, own: int) -> list[str]:
    """Returns a sentence on what was scaled. own: as in `refuse_longer_rows`."""
    return [
        f"Rotary embeddings are scaled ({model.rope_scaling}, factor {model.rope_factor:g}): rows "
        f"may have {positions_with(model, own):,} tokens in training, and the model without it is "
        f"for {own:,}. The export's config.json says so too."
    ]


def _why_not(config: Any) -> str:
    """Returns why the rotary embeddings of a model cannot be scaled, as the end of a sentence; an
    empty text where its configuration has nothing against it.
    """
    text = config.get_text_config()
    given = getattr(text, "rope_parameters", None) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    others = sorted(given.keys() - _PLAIN_KEYS)
    has_length = isinstance(getattr(text, "max_position_embeddings", None), int)
    reasons = {
        "it also reads images or sound, and its configuration is exported as it is": (
            reads_more_than_text(config)
        ),
        f"the configuration of {config.model_type} names none": not given,
        "it has others for each kind of its layers": any(
            isinstance(part, dict) for part in given.values()
        ),
        f"they are scaled already ({kind})": kind != "default",
        f"they have {', '.join(others)}, which is not known here": others,
        "its configuration does not say how long its rows are (max_position_embeddings)": (
            not has_length
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _scaled(config: Any, kind: str, factor: float) -> Any:
    """Returns a copy of a configuration with scaled rotary embeddings."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    own = text.max_position_embeddings
    given = {name: value for name, value in text.rope_parameters.items() if name != "type"}
    given |= {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn":
        given["original_max_position_embeddings"] = own
        text.max_position_embeddings = int(own * factor)
    text.rope_parameters = given
    if getattr(text, "head_dim", 1) is None:
        # transformers reads it there alone for the frequencies of yarn and dynamic.
        text.head_dim = text.hidden_size // text.num_attention_heads
    try:
        text.validate_rope()
        _frequencies(changed)
    except Exception as error:  # a family's own rules raise errors of many kinds
        refuse_short_memory(error, "while the model's positions were scaled")
        raise ConfigError(
            ROPE_SCALING,
            f"{config.model_type} cannot be scaled by {kind} ({first_line(error)}); choose another "
            "way, or none.",
        ) from error
    return changed


def _differ(one: Any, other: Any) -> bool:
    """Returns whether small models of two configurations turn positions differently."""
    pairs = zip(_frequencies(one), _frequencies(other), strict=True)
    return any(not torch.equal(before, after) for before, after in pairs)


def _frequencies(config: Any) -> list[torch.Tensor]:
    """Returns the frequencies, [n] each, by which a small model of a configuration turns."""
    tiny = empty_model(shrunk(config), torch.float32)
    return [buffer for name, buffer in tiny.named_buffers() if "inv_freq" in name]
