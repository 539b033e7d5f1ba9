"""The rows of the data of a run are counted from their files."""

from __future__ import annotations

from engine.config.data_settings import DataConfig
from engine.errors import RamstreamError
from engine.paths import resolve_source
from engine.sources.open_source import open_source

LARGEST_COUNTED = 4 << 30
"""Files of more bytes are not counted: reading them takes minutes."""


def count_rows(config: DataConfig) -> float | None:
    """Returns how many rows one pass over the data visits: of a mix, the rows of each source times
    its weight. Reading takes about a second for 100 MB.

    Returns None if that is not known before a run: for data sets of the hub, for more than 4 GiB,
    and for rows that cannot be read.
    """
    total = 0.0
    for part, weight in config.parts():
        path = resolve_source(part.only_source)
        if path is None:
            return None
        files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        try:
            if sum(each.stat().st_size for each in files) > LARGEST_COUNTED:
                return None
            rows = open_source(part).total
        except (OSError, RamstreamError):
            return None
        if rows is None:
            return None
        total += rows * weight
    return total
