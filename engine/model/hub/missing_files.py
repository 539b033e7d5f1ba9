"""Files of a model that are neither on this machine nor to be had, found before a run begins."""

from __future__ import annotations

from engine.data.sources.hub_connection import OFFLINE, why_cut_off, why_cut_off_lately
from engine.errors import ModelError
from engine.model.hub.hub import is_hub_id
from engine.model.hub.hub_cache import cached_config, cached_weights, is_offline


def lacks_files(source: str, weights: bool) -> bool:
    """Returns whether this is a model of the hub that is not on this machine, its `weights`
    included if they are needed.
    """
    if not is_hub_id(source):
        return False
    return cached_config(source) is None or (weights and cached_weights(source) is None)


def refuse_missing_files(source: str, weights: bool, waits: bool = True) -> None:
    """Raises ModelError for a model of the hub that is not on this machine, its `weights` included
    if they are needed, while the hub cannot be reached.

    A hub that does not answer is waited for some seconds or, unless this `waits`, for a moment
    only; then its last answer counts.
    """
    if not lacks_files(source, weights):
        return
    reason = _why_cut_off(waits)
    if reason is not None:
        has_config = cached_config(source) is not None
        what = f"the weights of {source} are" if has_config else f"{source} is"
        raise ModelError(
            f"model.source: {what} not downloaded yet, and this computer cannot reach Hugging Face "
            f"({reason})."
        )


def _why_cut_off(waits: bool) -> str | None:
    if is_offline():
        return OFFLINE
    return why_cut_off() if waits else why_cut_off_lately()
