"""A `dataset_info.json` is the registry of data sets that LLaMA-Factory keeps next to its data.

`path/dataset_info.json:name` names an entry. The entry says where the rows are (`file_name` next to
the registry, or `hf_hub_url`), whether they are `alpaca` or `sharegpt`, what names the file uses
for columns and speakers, and how many of the first rows are read (`num_samples`). Rows are returned
with the names that `formats.py` knows. Unsupported requests in an entry are refused by name.
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
from engine.errors import DataError
from engine.paths import registry_entry
from engine.sources.json_files import Row

_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""For each formatting, these are an entry's name for a column (prompt) and our name for it
(instruction). Our name is also the default name in the file.
"""
_AS_THEY_ARE = ("system", "tools")
"""These columns have the same name in an entry and here."""
_MORE_COLUMNS = {"alpaca": ("history",), "sharegpt": ()}
_TAGS = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
"""For each speaker, this is an entry's name (user_tag) and ShareGPT's name (human)."""
_OF_TURNS = ("role_tag", "content_tag")
_TEXTS = ("formatting", "file_name", "hf_hub_url", "subset", "split")
_KEYS = (*_TEXTS, "ranking", "columns", "tags", "num_samples", "folder")
_RANKINGS = (
    "holds rankings (chosen and rejected answers), which are not trained on; choose an entry with "
    "one answer a row"
)
_NOT_TEXT = (
    "names images, videos or audios, but only text is trained on; choose an entry without them"
)
_REFUSED = {
    "chosen": _RANKINGS,
    "rejected": _RANKINGS,
    "images": _NOT_TEXT,
    "videos": _NOT_TEXT,
    "audios": _NOT_TEXT,
    "kto_tag": (
        "marks answers as good or bad, and all of them would be trained as good; keep the good "
        "rows in a file of their own, and name no kto_tag"
    ),
}
"""An entry that names one of these columns is refused for the given reason, because what the column
says about a row would be lost.
"""


@dataclass(frozen=True)
class Registered:
    """A `Registered` is a data set that a registry names."""

    config: DataConfig
    """These are the settings of the data set itself."""
    row: Callable[[Row, str], Row]
    """It converts a row of the data set to our column names. The second argument is the place of
    the row, for errors. Raises DataError for a row that does not match the entry.
    """
    most: int | None
    """Only this many rows at the start are read; None stands for all."""


@dataclass(frozen=True)
class _Entry:
    """An entry whose contents have been checked."""

    title: str
    """The name of the entry in errors."""
    values: dict[str, Any]
    formatting: str
    columns: dict[str, str]
    """The name in the file for each of an entry's names for a column."""
    tags: dict[str, str]
    """The name in the file for each of an entry's names for a speaker or for a key of a turn."""


def registered(config: DataConfig) -> Registered | None:
    """Returns the data set that `config.source` names in a registry, or None when the source is not
    a registry entry. Raises DataError for a registry or an entry that cannot be used.
    """
    found = registry_entry(config.only_source)
    if found is None:
        return None
    path, name = found
    entry = _checked(_values(path, name), f"The entry {name} of {path.name}")
    split = config.split
    if split == DataConfig.split:  # the user has chosen none
        split = entry.values.get("split") or split
    return Registered(
        dataclasses.replace(config, source=_place(entry, path.parent), split=split),
        _Translation(entry).row,
        entry.values.get("num_samples"),
    )


# ---------------------------------------------------------------------- the entry


def _values(path: Path, name: str) -> dict[str, Any]:
    """Reads the entry `name` of the registry at `path`."""
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        raise DataError(
            f"{path.name} cannot be read as JSON; give a registry of data sets."
        ) from None
    names = sorted(tree)[:20] if isinstance(tree, dict) else []
    if not isinstance(tree, dict) or not isinstance(tree.get(name), dict):
        raise DataError(
            f"There is no entry {name or '(empty)'} in {path.name}; it has "
            f"{', '.join(names) or 'none'}."
        )
    return tree[name]


def _checked(values: dict[str, Any], title: str) -> _Entry:
    """Checks an entry and returns it. Raises DataError if it requests something for all its rows
    that is not supported.
    """
    _check_keys(values, title)
    formatting = values.get("formatting") or "alpaca"
    if formatting not in _COLUMNS:
        raise DataError(f"{title} has the formatting {formatting}; use alpaca or sharegpt.")
    if values.get("ranking"):
        raise DataError(f"{title} {_RANKINGS}.")
    if values.get("folder"):
        raise DataError(
            f"{title} has folder, which is not supported; name a subset instead, or files that are "
            "here."
        )
    most = values.get("num_samples")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise DataError(
            f"{title} has num_samples {json.dumps(most)}; write a whole number from 1 on, or "
            "remove it."
        )
    columns = (*_COLUMNS[formatting], *_AS_THEY_ARE, *_MORE_COLUMNS[formatting])
    return _Entry(
        title,
        values,
        formatting,
        _names(values, "columns", title, columns),
        _names(values, "tags", title, (*_OF_TURNS, *_TAGS)),
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
    """Returns `columns` or `tags` of an entry."""
    names = values.get(key) or {}
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise DataError(
            f"The {key} of {title[0].lower() + title[1:]} are not names; write them as {{name: "
            "name}."
        )
    for name, value in names.items():
        if key == "columns" and name in _REFUSED:
            if value:
                raise DataError(f"{title} has columns.{name}: it {_REFUSED[name]}.")
        elif name not in expected:
            (nearest,) = difflib.get_close_matches(name, expected, 1, 0.0)
            raise DataError(
                f"{title} has {key}.{name}, which is not known there; write {nearest} if that is "
                "meant, or remove it."
            )
    return names


def _place(entry: _Entry, folder: Path) -> str:
    """Returns the location of the rows, in the form of `data.source`."""
    values = entry.values
    if values.get("file_name"):
        source = folder / values["file_name"]
        if not source.exists():
            raise DataError(
                f"{entry.title} names the file {values['file_name']}, which is not beside it; put "
                "it there."
            )
        return str(source)
    if values.get("hf_hub_url"):
        subset = f":{values['subset']}" if values.get("subset") else ""
        return values["hf_hub_url"] + subset
    raise DataError(f"{entry.title} has neither file_name nor hf_hub_url; say where its rows are.")


# ---------------------------------------------------------------------- rows


class _Translation:
    """Renames the columns of an entry's rows to our names."""

    def __init__(self, entry: _Entry):
        self._entry = entry
        columns = entry.columns
        self._our_names = {
            columns.get(part, ours): ours for part, ours in _COLUMNS[entry.formatting].items()
        }
        for part in _AS_THEY_ARE:
            if part in columns:
                self._our_names[columns[part]] = part
        self._taken = {*self._our_names.values(), *_AS_THEY_ARE}

    def row(self, row: Row, where: str) -> Row:
        """Returns a row of the data set, found at `where`, under our names."""
        columns = self._entry.columns
        renamed: Row = {}
        for column, value in row.items():
            # Another column that happens to have one of our names must not be mistaken for ours.
            other = f"{column} (not named)" if column in self._taken else column
            renamed[self._our_names.get(column, other)] = value
        if self._entry.formatting == "sharegpt":
            turns = _turns(renamed.get("conversations"), self._entry.tags)
            return renamed | {"conversations": turns}
        if "history" not in columns and "tools" not in columns:
            return renamed
        return _conversation(renamed, _history(row, columns.get("history"), where))


def _turns(turns: Any, tags: dict[str, str]) -> Any:
    """Returns turns as {from, value}, with ShareGPT's names of speakers. Values that are not turns
    are left unchanged; `turns.py` refuses them.
    """
    if not isinstance(turns, list):
        return turns
    role_tag = tags.get("role_tag", "from")
    content_tag = tags.get("content_tag", "value")
    speakers = {tags.get(tag, speaker): speaker for tag, speaker in _TAGS.items()}
    found = []
    for turn in turns:
        if isinstance(turn, dict) and isinstance(turn.get(role_tag), str):
            speaker = speakers.get(turn[role_tag], turn[role_tag])
            found.append({"from": speaker, "value": turn.get(content_tag)})
        else:
            found.append(turn)
    return found


def _history(row: Row, column: str | None, where: str) -> list[list[str]]:
    """Returns the earlier questions and answers from a row."""
    history = row.get(column) if column else None
    if history is None or history == "":  # an empty cell in a table
        return []
    pairs = history if isinstance(history, list) else [history]
    for pair in pairs:
        if not isinstance(pair, list) or [type(text) for text in pair] != [str, str]:
            raise DataError(
                f"The column {column} in {where} is not a list of pairs of texts; write the "
                "earlier turns as [[question, answer], ...]."
            )
    return pairs


def _conversation(row: Row, history: list[list[str]]) -> Row:
    """Returns a row and its history as a conversation, without turns if the row has no answer. A
    prompt or an answer that is not text is left unchanged; `turns.py` refuses it.
    """
    turns: list[dict[str, Any]] = []
    if not _is_blank(row.get("output")):
        for question, answer in [*history, (_prompt(row), row["output"])]:
            turns.append({"role": "user", "content": question})
            turns.append({"role": "assistant", "content": answer})
    others = {part: row[part] for part in _AS_THEY_ARE if part in row}
    return {"messages": turns} | others


def _prompt(row: Row) -> Any:
    """Returns the instruction and the input as one text, or the first of them that is not text."""
    texts = []
    for part in (row.get("instruction"), row.get("input")):
        if _is_blank(part):
            continue
        if not isinstance(part, str):
            return part
        texts.append(part)
    return "\n\n".join(texts)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
