"""Data sets by name from a `dataset_info.json`, the registry that LLaMA-Factory keeps beside its data.

`path/dataset_info.json:name` names an entry: where the rows are (`file_name` beside the registry, or `hf_hub_url`),
whether they are `alpaca` or `sharegpt`, and what their columns and speakers are called there. Rows come out with the
names that `formats` knows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.config import DataConfig
from engine.errors import DataError
from engine.paths import registry_entry

Row = dict[str, Any]

_COLUMNS = {"alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
            "sharegpt": {"messages": "conversations"}}
"""What an entry's columns are called when it does not say, and what they are called here."""
_AS_THEY_ARE = ("system", "tools")
_TAGS = {"user_tag": "human", "assistant_tag": "gpt", "observation_tag": "observation", "function_tag": "function_call",
         "system_tag": "system"}


def registered(config: DataConfig) -> tuple[DataConfig, Callable[[Row], Row]] | None:
    """The settings of the data set that `config.source` names in a registry and what makes its rows ours; None when it
    names no registry. Raises DataError for a registry or an entry that cannot be used."""
    found = registry_entry(config.source)
    if found is None:
        return None
    path, name = found
    entry = _entry(path, name)
    known = f"The entry {name} of {path.name}"
    formatting = entry.get("formatting", "alpaca")
    if formatting not in _COLUMNS:
        raise DataError(f"{known} has the formatting {formatting}; use alpaca or sharegpt.")
    if entry.get("ranking"):
        raise DataError(f"{known} holds rankings (chosen and rejected answers), which are not trained on; choose an entry "
                        "with one answer a row.")
    columns, tags = _names(entry, "columns", known), _names(entry, "tags", known)
    if isinstance(entry.get("file_name"), str):
        source = path.parent / entry["file_name"]
        if not source.exists():
            raise DataError(f"{known} names the file {entry['file_name']}, which is not beside it; put it there.")
        place = str(source)
    elif isinstance(entry.get("hf_hub_url"), str):
        place = entry["hf_hub_url"] + (f":{entry['subset']}" if entry.get("subset") else "")
    else:
        raise DataError(f"{known} has neither file_name nor hf_hub_url; say where its rows are.")
    split = entry["split"] if isinstance(entry.get("split"), str) and config.split == DataConfig.split else config.split
    renamed = {columns.get(part, ours): ours for part, ours in _COLUMNS[formatting].items()}
    renamed |= {columns[part]: part for part in _AS_THEY_ARE if part in columns}

    taken = {*renamed.values(), *_AS_THEY_ARE}

    def ours(row: Row) -> Row:
        made = {renamed.get(column, f"{column} (not named)" if column in taken else column): value
                for column, value in row.items()}
        if formatting == "sharegpt":
            return made | {"conversations": _turns(made.get("conversations"), tags)}
        history = row.get(columns["history"]) if "history" in columns else None
        return _with_history(made, history) if "history" in columns else made

    return dataclasses.replace(config, source=place, split=split), ours


def _entry(path: Path, name: str) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        raise DataError(f"{path.name} cannot be read as JSON; give a registry of data sets.") from None
    if not isinstance(tree, dict) or not isinstance(tree.get(name), dict):
        has = ", ".join(sorted(tree)[:20]) if isinstance(tree, dict) else "none"
        raise DataError(f"There is no entry {name or '(empty)'} in {path.name}; it has {has or 'none'}.")
    return tree[name]


def _names(entry: dict[str, Any], key: str, known: str) -> dict[str, str]:
    names = entry.get(key) or {}
    if not isinstance(names, dict) or not all(isinstance(value, str) for value in names.values()):
        raise DataError(f"The {key} of {known[0].lower() + known[1:]} are not names; write them as {{name: name}}.")
    return names


def _turns(turns: Any, tags: dict[str, str]) -> Any:
    """Turns as {from, value}, with the speakers that ShareGPT has; what is no turn is left for its reader to refuse."""
    role_tag, content_tag = tags.get("role_tag", "from"), tags.get("content_tag", "value")
    speakers = {tags.get(tag, speaker): speaker for tag, speaker in _TAGS.items()}
    if not isinstance(turns, list):
        return turns
    return [{"from": speakers.get(turn[role_tag], turn[role_tag]), "value": turn.get(content_tag)}
            if isinstance(turn, dict) and isinstance(turn.get(role_tag), str) else turn for turn in turns]


def _with_history(row: Row, history: Any) -> Row:
    """A row with earlier questions and answers as a conversation."""
    prompt = "\n\n".join(text for text in (row.get("instruction"), row.get("input")) if isinstance(text, str) and text)
    pairs = [*(history or []), (prompt, row.get("output"))]
    turns = [{"role": role, "content": text} for pair in pairs for role, text in zip(("user", "assistant"), pair)]
    return {"messages": turns} | ({"system": row["system"]} if "system" in row else {})
