"""Where bundled files live, and how a user's source string becomes a path."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from engine.errors import RunError

PROGRAM_ROOT = Path(__file__).resolve().parent.parent


def cache_folder() -> Path:
    """What can be made again, and takes time: in `RAMSTREAM_CACHE`, or in `ramstream` in the user's
    cache folder.
    """
    own, shared = os.environ.get("RAMSTREAM_CACHE"), os.environ.get("XDG_CACHE_HOME", "")
    if own:
        return Path(own).expanduser()
    return (Path(shared) if os.path.isabs(shared) else Path("~/.cache").expanduser()) / "ramstream"


def lasting_source(source: str) -> str:
    """`source` as it can be found again from another working directory; bundled assets and hub ids
    stay as they are.
    """
    registry = registry_entry(source)
    if registry is not None:
        return f"{lasting_source(str(registry[0]))}:{registry[1]}"
    path = resolve_source(source)
    if path is None or (
        not Path(source).expanduser().is_absolute() and path == PROGRAM_ROOT / source
    ):
        return source
    return str(path)


def lasting_sources(source: Any) -> Any:
    """`lasting_source` of a data set, or of each of a mix of `DataSource`s."""
    if isinstance(source, str):
        return lasting_source(source)
    return [dataclasses.asdict(part) | {"source": lasting_source(part.source)} for part in source]


def registry_entry(source: str) -> tuple[Path, str] | None:
    """The registry file and the entry that `path/dataset_info.json:name` names, or None where there
    is no such file.
    """
    file, colon, name = source.rpartition(".json:")
    path = resolve_source(f"{file}.json") if colon else None
    return None if path is None or not path.is_file() else (path, name)


def resolve_source(source: str) -> Path | None:
    """The existing local path that `source` names (from the working directory first, then beside
    the program, for bundled assets), or None when it names none that can be looked at and so must
    be a hub id.
    """
    try:
        given = Path(source).expanduser()
        if given.exists():
            return given.resolve()
        bundled = PROGRAM_ROOT / source
        if not given.is_absolute() and bundled.exists():
            return bundled
    except _NO_PATH:
        pass
    return None


def named_folder(text: str) -> Path:
    """The folder that a person named, whether it is there or not. Raises RunError for what no
    folder can be called, or what may not be looked at.
    """
    try:
        path = Path(text).expanduser().resolve()
        path.exists()
    except _NO_PATH as error:
        reason = error.strerror if isinstance(error, OSError) else "that is no path"
        raise RunError(
            f"{text[:200]!r} cannot be a folder here ({reason}); name another."
        ) from None
    return path


_NO_PATH = (OSError, ValueError, RuntimeError)
"""What pathlib raises for a name that is too long or may not be looked at, for a zero byte, and for
the home of nobody.
"""
