"""The kind of a file, by its name and by its first bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine.errors import DataError

TABLE_SUFFIXES = (".csv", ".tsv")
PLAIN_TEXT_SUFFIXES = (".txt", ".md")
LINES_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines")
TEXT_SUFFIXES = (".json", *LINES_SUFFIXES, *TABLE_SUFFIXES, *PLAIN_TEXT_SUFFIXES)
ARROW_SUFFIXES = (".arrow", ".feather")
DATA_SUFFIXES = (*TEXT_SUFFIXES, ".parquet", *ARROW_SUFFIXES, ".xlsx")
COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")
"""Endings of compressed text files, which follow the file's own ending."""
USABLE = "Use JSON, JSONL, CSV, Parquet, Excel or text (.gz is fine)."
"""What to use instead of a file that is no data file."""


def suffixes_of(path: Path) -> tuple[str, str]:
    """Returns the suffix of a file and, if it is compressed, the suffix of the compression: (.csv,
    .gz) for a.csv.gz and (.csv, "") for a.csv.
    """
    suffix = path.suffix.lower()
    if suffix in COMPRESSIONS:
        return Path(path.stem).suffix.lower(), suffix
    return suffix, ""


def is_data(path: Path) -> bool:
    """Returns whether the name is that of a file that is read."""
    suffix, compression = suffixes_of(path)
    return suffix in (TEXT_SUFFIXES if compression else DATA_SUFFIXES)


def without_rows(name: str) -> str:
    """Returns the sentence about a data set of this name that has no rows."""
    is_table = suffixes_of(Path(name))[0] in TABLE_SUFFIXES
    return f"{name} has a header but no rows." if is_table else f"{name} has no rows."


def stem_of(path: Path) -> str:
    """Returns the name without the suffixes of its kind: train for train.jsonl.gz."""
    return Path(path.stem).stem if suffixes_of(path)[1] else path.stem


# ---------------------------------------------------------------------- what the content shows


@dataclass(frozen=True)
class _Content:
    """A file whose content begins with `magic` is `kind`, which names with `suffixes` may have."""

    magic: bytes
    suffixes: tuple[str, ...]
    kind: str
    remedy: str


_RENAME = "give it a name that ends in "
_FETCH = "fetch the data file again"
_UNPACK = "unpack it and give the files in it"
_CONTENTS = (
    _Content(
        b"version https://git-lfs.github.com/spec/",
        (),
        "a Git LFS pointer and not the data",
        "run `git lfs pull` in its folder",
    ),
    _Content(b"\x1f\x8b", (".gz",), "compressed with gzip", _RENAME + ".gz"),
    _Content(b"\x28\xb5\x2f\xfd", (".zst",), "compressed with zstd", _RENAME + ".zst"),
    _Content(b"BZh", (".bz2",), "compressed with bzip2", _RENAME + ".bz2"),
    _Content(b"\xfd7zXZ\0", (".xz",), "compressed with xz", _RENAME + ".xz"),
    _Content(b"PAR1", (".parquet",), "a Parquet file", _RENAME + ".parquet"),
    _Content(b"ARROW1", ARROW_SUFFIXES, "an Arrow file", _RENAME + ".arrow"),
    _Content(  # pyarrow ends the process when such a file is damaged, and will soon read none
        b"FEA1",
        (),
        "in the first version of Feather, which is not read",
        "write it again as .parquet or as a new .feather",
    ),
    _Content(b"PK\x03\x04", (".xlsx",), "a zip archive or an Office document", _UNPACK),
    _Content(b"7z\xbc\xaf\x27\x1c", (), "a 7z archive", _UNPACK),
    _Content(b"Rar!", (), "a RAR archive", _UNPACK),
    _Content(b"%PDF-", (), "a PDF", "give its text as .txt"),
    _Content(
        b"\xd0\xcf\x11\xe0",
        (),
        "an old Office document (such as .xls) or one with a password",
        "save it as .xlsx without a password, or as .csv",
    ),
    _Content(b"SQLite format 3\0", (), "an SQLite database", "export its table as .csv"),
    _Content(b"\x89PNG", (), "a picture", _FETCH),
    _Content(b"\xff\xd8\xff", (), "a picture", _FETCH),
    _Content(b"\x7fELF", (), "a program", _FETCH),
)
_TAR = 257
"""Offset of the magic of a tar archive."""
_PAGES = (b"<!doctype html", b"<html")
LONGEST_MAGIC = 512
"""Number of first bytes that `refuse_other_content` reads."""


def refuse_other_content(head: bytes, name: str, suffix: str) -> None:
    """Raises DataError if the first bytes of a file are those of another kind than its `suffix`.
    For a compressed file, this is the suffix of the compression.
    """
    for content in _CONTENTS:
        if head.startswith(content.magic) and suffix not in content.suffixes:
            text = f"{name} is {content.kind}"
            if content.suffixes:
                text += ", which its name does not say"
            raise DataError(f"{text}; {content.remedy}.")
    if head[_TAR : _TAR + 5] == b"ustar":
        raise DataError(f"{name} is a tar archive; {_UNPACK}.")
    is_page = head.lstrip()[:20].lower().startswith(_PAGES)
    if is_page and suffix not in PLAIN_TEXT_SUFFIXES:
        raise DataError(
            f"{name} is a page of the web (HTML), perhaps the error of a download; {_FETCH}."
        )


def refuse_no_compression(head: bytes, name: str, compression: str) -> None:
    """Raises DataError if a file is not compressed although its name ends so."""
    (content,) = (content for content in _CONTENTS if compression in content.suffixes)
    if not head.startswith(content.magic):
        raise DataError(
            f"{name} is not {content.kind}, as its name says; remove {compression} from its name, "
            "or write it again."
        )
