"""Sentences that refuse content that is not trained on here, for registries and files."""

from __future__ import annotations

from typing import Any

MEDIA_COLUMNS = {
    "image": "an image",
    "images": "images",
    "image_url": "an image",
    "video": "a video",
    "videos": "videos",
    "audio": "a sound",
    "audios": "sounds",
}
"""Names of columns and keys that hold something other than text."""
WITHOUT = "but only text is trained on; choose rows without that"
MARKS = (
    "marks answers as good or bad (KTO), and all of them would be trained as good; keep the good "
    "rows in a file of their own, without that mark"
)


def medium(value: Any) -> str | None:
    """Returns the name of a value of a row, if it is an image or a sound as `datasets` gives them,
    or None.
    """
    if isinstance(value, list | tuple) and value:
        value = value[0]
    if isinstance(value, dict):
        keys = set(value)
        if keys == {"bytes", "path"} and any(value.values()):
            return "an image or a sound"
        return "a sound" if {"array", "sampling_rate"} <= keys else None
    library = type(value).__module__.split(".")[0]
    return {"PIL": "an image", "torchcodec": "a sound or a video"}.get(library)
