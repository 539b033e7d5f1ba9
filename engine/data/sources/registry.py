"""A `dataset_info.json` is the registry of data sets that LLaMA-Factory keeps next to its data.

`path/dataset_info.json:name` names an entry. The entry says where the rows are (`file_name` next to
the registry, or `hf_hub_url`), whether they are `alpaca`, `sharegpt` or `openai`, what names the
file uses for columns and speakers, and how many of the first rows are read (`num_samples`).
`registry_rows.py` says which column holds what. Unsupported requests in an entry are refused by
name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.config.data_settings import DataConfig
from engine.data.sources.json_files import Row
from engine.data.sources.not_trained import MARKS, MEDIA_COLUMNS, WITHOUT
from engine.data.sources.registry_rows import (
    ALPACA,
    SHARED,
    SHAREGPT,
    SPEAKERS,
    Entry,
    Translation,
)
from engine.errors import DataError
from engine.paths import registry_entry, resolve_source

_COLUMNS = {"alpaca": ALPACA, "sharegpt": SHAREGPT, "openai": SHAREGPT}
_OF_TURNS = ("role_tag", "content_tag")
_OTHER_HUBS = {"ms_hub_url": "ModelScope", "om_hub_url": "Modelers"}
_PLACES = ("file_name", "hf_hub_url", *_OTHER_HUBS, "script_url", "cloud_file_name")
"""Keys of an entry that name the place of its rows."""
_OF_THE_HUB = ("folder", "revision")
_TEXTS = ("formatting", "subset", "split", *_PLACES, *_OF_THE_HUB)
_KEYS = (*_TEXTS, "ranking", "columns", "tags", "num_samples")
_REFUSED = {
    **{name: f"holds {MEDIA_COLUMNS[name]}, {WITHOUT}" for name in ("images", "videos", "audios")},
    "kto_tag": MARKS,
}
"""Reasons for refusing an entry that names one of these columns, because what the column means for
a row would be lost.
"""
_MOST_NAMES = 20
_LARGEST = 8 << 20
"""Largest number of bytes of a registry. A larger file is not read as one."""


@dataclass(frozen=True)
class Registered:
    """A data set that a registry names."""

    config: DataConfig
    """The settings of the data set itself."""
    row: Callable[[Row, str], Row]
    """Gives the speakers of a row their usual names. The second argument is the place of the row,
    for errors. Raises DataError for a row that does not match the entry.
    """
    format: str
    """The format of the rows."""
    columns: dict[str, str]
    """Column of each part of an example."""
    most: int | None
    """Number of rows that are read from the start; None for all."""
    outside: str = ""
    """A sentence, where the rows are in a file outside of the folder of the registry."""
    hub: dict[str, str] = dataclasses.field(default_factory=dict)
    """`datasets.load_dataset` is given these too: the folder and the revision in a repository."""


def registered(config: DataConfig) -> Registered | None:
    """Returns the data set that `config.source` names in a registry, or None when the source is not
    a registry entry. The data set itself is not opened. Raises DataError for an entry that cannot
    be used, and for a registry without the name of an entry.
    """
    found = registry_entry(config.only_source)
    if found is None:
        _refuse_unnamed(config.only_source)
        return None
    path, name = found
    entry = _checked(_values(path, name), f"The entry {name} of {path.name}")
    split = config.split
    if split == DataConfig.split:  # the user has chosen none
        split = entry.values.get("split") or split
    source = _place(entry, path.parent)
    hub = {"data_dir": entry.values.get("folder"), "revision": entry.values.get("revision")}
    return Registered(
        dataclasses.replace(config, source=source, split=split),
        Translation(entry).row,
        entry.format,
        entry.parts(),
        entry.values.get("num_samples"),
        _outside(entry, source, path.parent),
        {key: value for key, value in hub.items() if value},
    )


# ---------------------------------------------------------------------- the entry


def _values(path: Path, name: str) -> dict[str, Any]:
    """Reads the entry `name` of the registry at `path`."""
    tree = _parsed(path)
    if tree is None:
        raise DataError(f"{path.name} cannot be read as JSON; give a registry of data sets.")
    entries = tree if isinstance(tree, dict) else {}
    if not isinstance(entries.get(name), dict):
        raise DataError(
            f"There is no entry {name or '(empty)'} in {path.name}; it has {_listed(entries)}."
        )
    return entries[name]


def _parsed(path: Path) -> Any:
    """Returns the value of a JSON file, or None if it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return None


def _listed(entries: dict[str, Any]) -> str:
    names = sorted(entries)
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return (", ".join(names[:_MOST_NAMES]) or "none") + more


def _refuse_unnamed(source: str) -> None:
    """Raises DataError if the source is a registry without the name of an entry. Its entries would
    be read as the columns of one row.
    """
    path = resolve_source(source)
    if path is None or path.suffix.lower() != ".json" or not path.is_file():
        return
    tree = _parsed(path)
    if not isinstance(tree, dict) or not tree:
        return
    for values in tree.values():
        if not isinstance(values, dict) or not any(key in values for key in _PLACES):
            return
    raise DataError(
        f"{path.name} is a registry of data sets, not one of them; write {source}:{min(tree)} to "
        f"read an entry (it has {_listed(tree)})."
    )


def _checked(values: dict[str, Any], title: str) -> Entry:
    """Checks an entry and returns it. Raises DataError if it requests something for all its rows
    that is not supported.
    """
    _check_keys(values, title)
    formatting = values.get("formatting") or "alpaca"
    if formatting not in _COLUMNS:
        raise DataError(f"{title} has the formatting {formatting}; use alpaca, sharegpt or openai.")
    most = values.get("num_samples")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise DataError(
            f"{title} has num_samples {json.dumps(most)}; write a whole number from 1 on, or "
            "remove it."
        )
    return Entry(
        title,
        values,
        formatting,
        _names(values, "columns", title, (*_COLUMNS[formatting], *SHARED)),
        _names(values, "tags", title, (*_OF_TURNS, *SPEAKERS)),
    )


def _check_keys(values: dict[str, Any], title: str) -> None:
    for key in values:
        if key in _KEYS:
            continue
        meant = difflib.get_close_matches(key, _KEYS, 1, 0.8)
        if meant:
            raise DataError(
                f"{title} has {key}, which is not known; write {meant[0]} if that is meant, or "
                "remove it."
            )
    for key in _TEXTS:
        if not isinstance(values.get(key), str | None):
            raise DataError(f"{title} has a {key} that is not text; write it as text.")


def _names(
    values: dict[str, Any], key: str, title: str, expected: Collection[str]
) -> dict[str, str]:
    """Returns `columns` or `tags` of an entry, without those that name nothing."""
    names = values.get(key) or {}
    if not isinstance(names, dict) or not all(
        isinstance(name, str | None) for name in names.values()
    ):
        raise DataError(
            f"The {key} of {title[0].lower() + title[1:]} are not names; write them as {{name: "
            "name}."
        )
    found = {name: value for name, value in names.items() if value}
    for name in found:
        if key == "columns" and name in _REFUSED:
            raise DataError(f"{title} has columns.{name}: it {_REFUSED[name]}.")
    for name in names:
        if name not in (*expected, *(_REFUSED if key == "columns" else ())):
            (nearest,) = difflib.get_close_matches(name, expected, 1, 0.0)
            raise DataError(
                f"{title} has {key}.{name}, which is not known there; write {nearest} if that is "
                "meant, or remove it."
            )
    return found


def _place(entry: Entry, folder: Path) -> str:
    """Returns the location of the rows, in the form of `data.source`."""
    values = entry.values
    file, hub = values.get("file_name"), values.get("hf_hub_url")
    if file and (not hub or (folder / file).exists()):
        return _file(entry, folder / file, [key for key in _OF_THE_HUB if values.get(key)])
    if hub:
        subset = f":{values['subset']}" if values.get("subset") else ""
        return hub + subset
    if values.get("script_url"):
        raise DataError(
            f"{entry.title} makes its rows with a script (script_url), and scripts of data sets "
            "are not run; save the rows as a file, and name that in file_name."
        )
    others = [f"{name} ({key})" for key, name in _OTHER_HUBS.items() if values.get(key)]
    if values.get("cloud_file_name"):
        others.append("a cloud store (cloud_file_name)")
    if others:
        raise DataError(
            f"{entry.title} has its rows at {' and '.join(others)}, which is not read from here; "
            "download them, and name the file in file_name."
        )
    raise DataError(f"{entry.title} has neither file_name nor hf_hub_url; say where its rows are.")


def _outside(entry: Entry, source: str, folder: Path) -> str:
    """Returns a sentence where a file is not below the folder of its registry, which may be a
    stranger's.
    """
    path = resolve_source(source) if entry.values.get("file_name") else None
    if path is None or path.resolve().is_relative_to(folder.resolve()):
        return ""
    return f"{entry.title} reads {path.resolve()}, which is outside of its folder."


def _file(entry: Entry, path: Path, of_the_hub: list[str]) -> str:
    """Returns the location of a file, or of a folder of files, beside the registry."""
    if of_the_hub:
        raise DataError(
            f"{entry.title} has {of_the_hub[0]}, which is not supported for a file; remove it."
        )
    if not path.exists():
        raise DataError(
            f"{entry.title} names the file {entry.values['file_name']}, which is not beside it; "
            "put it there."
        )
    return str(path)
