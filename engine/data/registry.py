"""Data sets by name from a `dataset_info.json`, the registry that LLaMA-Factory keeps beside its
data.

`path/dataset_info.json:name` names an entry: where the rows are (`file_name` beside the registry,
or `hf_hub_url`), whether they are `alpaca` or `sharegpt`, what their columns and speakers are
called there, and how many of them are read (`num_samples`: the first ones). Rows come out with the
names that `formats` knows. What an entry asks for and is not done here is refused by name.
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

Row = dict[str, Any]

_COLUMNS = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""What an entry's columns are called when it does not say, and what they are called here."""
_AS_THEY_ARE = ("system", "tools")
_MORE_COLUMNS = {"alpaca": ("history",), "sharegpt": ()}
_TAGS = {
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
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
    "kto_tag": "marks answers as good or bad, and all of them would be trained as good; keep the good rows in a file "
    "of their own, and name no kto_tag",
}
"""Columns that say something about rows that would be lost."""


@dataclass(frozen=True)
class Registered:
    """A data set that a registry names."""

    config: DataConfig
    """The settings of the data set itself."""
    row: Callable[[Row, str], Row]
    """Makes its rows ours. The second argument is where the row is, as an error names it: raises
    DataError for a row that does not hold what the entry says.
    """
    most: int | None
    """The first so many rows are read; None for all."""


def registered(config: DataConfig) -> Registered | None:
    """The data set that `config.source` names in a registry; None when it names no registry. Raises
    DataError for a registry or an entry that cannot be used.
    """
    found = registry_entry(config.source)
    if found is None:
        return None
    path, name = found
    entry = _entry(path, name)
    known = f"The entry {name} of {path.name}"
    _check(entry, known)
    formatting = entry.get("formatting") or "alpaca"
    columns = _names(
        entry, "columns", known, (*_COLUMNS[formatting], *_AS_THEY_ARE, *_MORE_COLUMNS[formatting])
    )
    tags = _names(entry, "tags", known, (*_OF_TURNS, *_TAGS))
    if entry.get("file_name"):
        source = path.parent / entry["file_name"]
        if not source.exists():
            raise DataError(
                f"{known} names the file {entry['file_name']}, which is not beside it; put it "
                "there."
            )
        place = str(source)
    elif entry.get("hf_hub_url"):
        place = entry["hf_hub_url"] + (f":{entry['subset']}" if entry.get("subset") else "")
    else:
        raise DataError(f"{known} has neither file_name nor hf_hub_url; say where its rows are.")
    split = (
        entry["split"] if entry.get("split") and config.split == DataConfig.split else config.split
    )
    renamed = {columns.get(part, ours): ours for part, ours in _COLUMNS[formatting].items()}
    renamed |= {columns[part]: part for part in _AS_THEY_ARE if part in columns}

    taken = {*renamed.values(), *_AS_THEY_ARE}

    def ours(row: Row, where: str) -> Row:
        made = {
            renamed.get(column, f"{column} (not named)" if column in taken else column): value
            for column, value in row.items()
        }
        if formatting == "sharegpt":
            return made | {"conversations": _turns(made.get("conversations"), tags)}
        if "history" not in columns and "tools" not in columns:
            return made
        return _conversation(made, _history(row, columns.get("history"), where))

    return Registered(
        dataclasses.replace(config, source=place, split=split), ours, entry.get("num_samples")
    )


def _entry(path: Path, name: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        raise DataError(
            f"{path.name} cannot be read as JSON; give a registry of data sets."
        ) from None
    if not isinstance(tree, dict) or not isinstance(tree.get(name), dict):
        has = ", ".join(sorted(tree)[:20]) if isinstance(tree, dict) else "none"
        raise DataError(
            f"There is no entry {name or '(empty)'} in {path.name}; it has {has or 'none'}."
        )
    return tree[name]


def _check(entry: dict[str, Any], known: str) -> None:
    """Raises DataError for what an entry says of all its rows and cannot be done."""
    for key in entry:
        if key not in _KEYS and (meant := difflib.get_close_matches(key, _KEYS, 1, 0.8)):
            raise DataError(
                f"{known} has {key}, which is not known; write {meant[0]} if that is meant, or "
                "remove it."
            )
    for key in _TEXTS:
        if not isinstance(entry.get(key), str | None):
            raise DataError(f"{known} has a {key} that is not text; write it as text.")
    if (entry.get("formatting") or "alpaca") not in _COLUMNS:
        raise DataError(
            f"{known} has the formatting {entry['formatting']}; use alpaca or sharegpt."
        )
    if entry.get("ranking"):
        raise DataError(f"{known} {_RANKINGS}.")
    if entry.get("folder"):
        raise DataError(
            f"{known} has folder, which is not supported; name a subset instead, or files that are "
            "here."
        )
    most = entry.get("num_samples")
    if most is not None and (not isinstance(most, int) or isinstance(most, bool) or most < 1):
        raise DataError(
            f"{known} has num_samples {json.dumps(most)}; write a whole number from 1 on, or "
            "remove it."
        )


def _names(
    entry: dict[str, Any], key: str, known: str, expected: Collection[str]
) -> dict[str, str]:
    names = entry.get(key) or {}
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise DataError(
            f"The {key} of {known[0].lower() + known[1:]} are not names; write them as {{name: "
            "name}."
        )
    for name in names:
        if key == "columns" and name in _REFUSED:
            if names[name]:
                raise DataError(f"{known} has columns.{name}: it {_REFUSED[name]}.")
        elif name not in expected:
            (nearest,) = difflib.get_close_matches(name, expected, 1, 0.0)
            raise DataError(
                f"{known} has {key}.{name}, which is not known there; write {nearest} if that is "
                "meant, or remove it."
            )
    return names


def _turns(turns: Any, tags: dict[str, str]) -> Any:
    """Turns as {from, value}, with the speakers that ShareGPT has; what is no turn is left for its
    reader to refuse.
    """
    role_tag, content_tag = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    speakers = {tags.get(tag, speaker): speaker for tag, speaker in _TAGS.items()}
    if not isinstance(turns, list):
        return turns
    return [
        {"from": speakers.get(turn[role_tag], turn[role_tag]), "value": turn.get(content_tag)}
        if isinstance(turn, dict) and isinstance(turn.get(role_tag), str)
        else turn
        for turn in turns
    ]


def _history(row: Row, column: str | None, where: str) -> list[list[str]]:
    """Earlier questions and answers."""
    history = row.get(column) if column else None
    if history is None or history == "":  # an empty cell of a table
        return []
    pairs = history if isinstance(history, list) else [history]
    if not all(
        isinstance(pair, list) and [type(text) for text in pair] == [str, str] for pair in pairs
    ):
        raise DataError(
            f"The column {column} in {where} is not a list of pairs of texts; write the earlier "
            "turns as [[question, answer], ...]."
        )
    return pairs


def _conversation(row: Row, history: list[list[str]]) -> Row:
    """A row and what was said before it as a conversation; without turns where it has no answer.
    What is no text is left for its reader to refuse.
    """
    asked = [part for part in (row.get("instruction"), row.get("input")) if not _blank(part)]
    others = [part for part in asked if not isinstance(part, str)]
    prompt = others[0] if others else "\n\n".join(asked)
    pairs = [] if _blank(row.get("output")) else [*history, (prompt, row["output"])]
    turns = [
        {"role": role, "content": text}
        for pair in pairs
        for role, text in zip(("user", "assistant"), pair)
    ]
    return {"messages": turns} | {part: row[part] for part in _AS_THEY_ARE if part in row}


def _blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
