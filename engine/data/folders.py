"""Which files of a folder are a data set, and which split their names say they hold.

A file belongs to a split when its name is the split's or ends with it, shard numbers aside (test,
train-00000-of-00002, data_val.3), or when it lies in a folder that is called so. A name that goes
on after the split's (train_clean) counts only where another split has a file whose name goes on
alike (test_clean): dev_ops or training_notes say nothing. The hub's shards of a longer name
(train_sft-00000-of-00002) are a split of that name. Where some files say a split and none says
train, the others are to train on.
"""

from __future__ import annotations

import re
from pathlib import Path

from engine.config.data_settings import DataConfig
from engine.errors import DataError

DATA_SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".md")
_WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "eval": "test",
    "evaluation": "test",
    "validation": "validation",
    "valid": "validation",
    "val": "validation",
    "dev": "validation",
}
"""What files and folders are called after, and the split that they hold then."""
_WORD = "|".join(sorted(_WORDS, key=len, reverse=True))
_HASH = "(?:-[0-9a-f]{16})?"
_NAMED = re.compile(rf"(?:.*[-_. ])?({_WORD})(?:[-_. ]?\d+(?:[-_. ](?:of[-_. ])?\d+)*{_HASH})?")
_SHARD = re.compile(rf"((?:{_WORD})_\w+)-\d{{5}}-of-\d{{5}}{_HASH}")
_LONGER = re.compile(rf"(.*[-_. ]|)({_WORD})[-_. ](.+)")


def is_saved_by_datasets(path: Path) -> bool:
    """Whether `datasets` saved the folder."""
    return (path / "dataset_dict.json").exists() or (path / "state.json").exists()


def files_of(path: Path, config: DataConfig) -> list[Path]:
    """The files that the source at `path` is read from, in the order of their names: itself, all of
    a folder that `datasets` saved, or the data files of the wanted split. Raises DataError for a
    folder without any.
    """
    return _chosen(path, config)[0]


def left_out(path: Path, config: DataConfig) -> str | None:
    """A sentence about the files that are not read because their names say no split, while others'
    do.
    """
    files = _chosen(path, config)[1]
    if not files:
        return None
    first = files[0].relative_to(path)
    if len(files) == 1:
        return (
            f"A file of the folder {path.name} is left out, because its name says no split and "
            f"others do: {first}."
        )
    return (
        f"{len(files):,} files of the folder {path.name} are left out, because their names say no "
        f"split and others do (first {first})."
    )


def _chosen(path: Path, config: DataConfig) -> tuple[list[Path], list[Path]]:
    """The files that are read, and those left out that belong to no split."""
    if not path.is_dir():
        return [path], []
    if is_saved_by_datasets(path):
        return sorted(file for file in path.rglob("*") if file.is_file()), []
    found = sorted(
        file
        for file in path.rglob("*")
        if file.is_file()
        and file.suffix.lower() in DATA_SUFFIXES
        and not any(part.startswith((".", "_")) for part in file.relative_to(path).parts)
        and file.stem.lower() not in ("readme", "license", "dataset_info", "dataset_infos")
    )
    if not found:
        raise DataError(
            f"The folder {path} holds no data files; give .json, .jsonl, .parquet, .csv, .tsv, "
            ".txt or .md files."
        )
    splits = _splits([file.relative_to(path) for file in found])
    if not any(splits):
        return found, []
    if not any(split and split.startswith("train") for split in splits):
        splits = [
            split or "train" for split in splits
        ]  # the others are to train on, beside those to test on
    wanted = _WORDS.get(config.split.lower(), config.split)
    chosen = [file for file, split in zip(found, splits) if split == wanted]
    if chosen:
        return chosen, [file for file, split in zip(found, splits) if split is None]
    has = ", ".join(sorted({split for split in splits if split}))
    raise DataError(
        f"The folder {path} has no split {config.split}; its files are called after {has}, set "
        "data.split to one of these."
    )


def _splits(files: list[Path]) -> list[str | None]:
    """The split that each file (its path in the folder) says it holds, or None."""
    splits = [_split(file) for file in files]
    alike: dict[tuple[str, ...], dict[int, str]] = {}
    for place, file in enumerate(files):
        longer = _LONGER.fullmatch(file.stem.lower())
        if splits[place] is None and longer:
            before, word, after = longer.groups()
            alike.setdefault((str(file.parent), before, after), {})[place] = _WORDS[word]
    for group in alike.values():
        if len(set(group.values())) > 1:
            for place, split in group.items():
                splits[place] = split
    return splits


def _split(file: Path) -> str | None:
    name = file.stem.lower()
    if named := _NAMED.fullmatch(name):
        return _WORDS[named[1]]
    if shard := _SHARD.fullmatch(name):
        return shard[1]
    return next(
        (_WORDS[part.lower()] for part in reversed(file.parent.parts) if part.lower() in _WORDS),
        None,
    )
