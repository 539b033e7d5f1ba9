"""A folder of files is a data set. The file names decide which files are read, and for which split.

- A file belongs to a split when its name, without shard numbers, is the split's name or ends with
  it (test, train-00000-of-00002, data_val.3), or when it is in a folder with that name.
- A name with a suffix after the split's name (train_clean) counts only if another split has a file
  with the same suffix (test_clean): dev_ops or training_notes name no split.
- Shards from the hub with a longer name (train_sft-00000-of-00002) form a split of that name.
- If some files name a split but none names train, the remaining files are the train split.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from engine.config.data_settings import DataConfig
from engine.data.sources.kinds import USABLE, is_data, stem_of
from engine.data.sources.search import files_under
from engine.errors import DataError

_SPLITS = {
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
"""Splits by the names of files and folders that stand for them."""
_NO_DATA = ("readme", "license", "dataset_info", "dataset_infos")
_WORD = "|".join(sorted(_SPLITS, key=len, reverse=True))
_HASH = "(?:-[0-9a-f]{16})?"
_NAMED = re.compile(rf"(?:.*[-_. ])?({_WORD})(?:[-_. ]?\d+(?:[-_. ](?:of[-_. ])?\d+)*{_HASH})?")
_SHARD = re.compile(rf"((?:{_WORD})_\w+)-\d{{5}}-of-\d{{5}}{_HASH}")
_LONGER = re.compile(rf"(.*[-_. ]|)({_WORD})[-_. ](.+)")


@dataclass(frozen=True)
class _Choice:
    """The files of a source that are read, and those left out because their names give no split."""

    read: list[Path]
    left_out: list[Path]


def is_saved_by_datasets(path: Path) -> bool:
    """Returns whether `datasets` saved the folder."""
    try:
        return (path / "dataset_dict.json").exists() or (path / "state.json").exists()
    except OSError:  # the folder may not be entered; the search for its files reports why
        return False


def has_splits(path: Path) -> bool:
    """Returns whether any file of a folder belongs to a split of its own."""
    if is_saved_by_datasets(path):
        return (path / "dataset_dict.json").exists()
    return any(_splits([file.relative_to(path) for file in _data_files(path)]))


def files_of(path: Path, config: DataConfig) -> list[Path]:
    """Returns the files from which the source at `path` is read, sorted by name: the file itself,
    all files of a folder that `datasets` saved, or the data files of the wanted split. Raises
    DataError for a folder without data files.
    """
    return _choice(path, config).read


def left_out(path: Path, config: DataConfig) -> list[str]:
    """Returns a sentence about the files left out because their names give no split while other
    names do, or nothing if no files are left out.
    """
    files = _choice(path, config).left_out
    if not files:
        return []
    first = files[0].relative_to(path)
    if len(files) == 1:
        return [
            f"A file of the folder {path.name} is left out, because its name says no split and "
            f"others do: {first}."
        ]
    return [
        f"{len(files):,} files of the folder {path.name} are left out, because their names say no "
        f"split and others do (first {first})."
    ]


def _choice(path: Path, config: DataConfig) -> _Choice:
    if not path.is_dir():
        return _Choice([path], [])
    if is_saved_by_datasets(path):
        return _Choice(files_under(path, lambda _: True), [])
    found = _data_files(path)
    splits = _splits([file.relative_to(path) for file in found])
    named = {split for split in splits if split}
    if not named:
        return _Choice(found, [])
    if None in splits and not any(split.startswith("train") for split in named):
        # Next to test files, files without a split are training data.
        splits = [split or "train" for split in splits]
        named.add("train")
    wanted = _SPLITS.get(config.split.lower(), config.split)
    chosen = [file for file, split in zip(found, splits) if split == wanted]
    if not chosen:
        raise DataError(
            f"The folder {path} has no split {config.split}; its files are called after "
            f"{', '.join(sorted(named))}, set data.split to one of these."
        )
    return _Choice(chosen, [file for file, split in zip(found, splits) if split is None])


def _data_files(folder: Path) -> list[Path]:
    """Returns the data files under `folder`, sorted. Hidden and private files do not count, nor do
    the locks of Excel and files that describe a data set, such as a readme. Raises DataError if
    there are no data files.
    """
    found = files_under(folder, _holds_data, hidden=(".", "_", "~$"))
    if not found:
        raise DataError(f"The folder {folder} holds no data files. {USABLE}")
    return found


def _holds_data(file: Path) -> bool:
    return is_data(file) and stem_of(file).lower() not in _NO_DATA


def _splits(files: list[Path]) -> list[str | None]:
    """Returns the split of each file according to its path in the folder, or None."""
    splits = [_split(file) for file in files]
    # Names with a suffix after the split's name count if such names give several splits. They are
    # grouped by folder, by the text before the split's name and by the text after it.
    alike: dict[tuple[str, ...], dict[int, str]] = {}
    for place, file in enumerate(files):
        longer = _LONGER.fullmatch(stem_of(file).lower())
        if splits[place] is None and longer:
            before, word, after = longer.groups()
            alike.setdefault((str(file.parent), before, after), {})[place] = _SPLITS[word]
    for group in alike.values():
        if len(set(group.values())) > 1:
            for place, split in group.items():
                splits[place] = split
    return splits


def _split(file: Path) -> str | None:
    """Returns the split given by the file's own name, or else by the nearest folder."""
    name = stem_of(file).lower()
    named = _NAMED.fullmatch(name)
    if named:
        return _SPLITS[named[1]]
    shard = _SHARD.fullmatch(name)
    if shard:
        return shard[1]
    for folder in reversed(file.parent.parts):
        if folder.lower() in _SPLITS:
            return _SPLITS[folder.lower()]
    return None
