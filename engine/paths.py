"""Functions of this module find bundled files and turn a user's source string into a path."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shlex
import sys
import tomllib
from pathlib import Path
from typing import Any

from engine.errors import RunError, first_line

PROGRAM_ROOT = Path(__file__).resolve().parent.parent


def program_command() -> str:
    """Returns the words with which this program was started, for a command that a person may type.

    They are `ramstream` for the installed command, and otherwise `python` and the path of
    `launch.py` as it was given.
    """
    started = Path(sys.argv[0])
    if started.name == "ramstream":
        return "ramstream"
    return f"python {shlex.quote(str(started)) if started.name == 'launch.py' else 'launch.py'}"


def program_version() -> str:
    """Returns the version of this code: in a source tree that of its pyproject.toml, whatever else
    is installed, and otherwise that of the installed distribution.
    """
    project = PROGRAM_ROOT / "pyproject.toml"
    if project.is_file():
        version: str = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["version"]
        return version
    return importlib.metadata.version("ramstream")


def preset_file(given: Path) -> Path:
    """Returns the preset that a person named, such as ``presets/starter.yaml``.

    The path is resolved like a source: first against the working directory, then against the
    program's folder, where bundled presets are. A path that names neither is returned unchanged.
    """
    return resolve_source(str(given)) or given


def cache_folder() -> Path:
    """Returns the cache folder, for files that are slow to make and can be made again.

    It is `RAMSTREAM_CACHE`, or else `ramstream` in the user's cache folder (`XDG_CACHE_HOME`, by
    default ``~/.cache``).
    """
    own = os.environ.get("RAMSTREAM_CACHE")
    if own:
        return Path(own).expanduser()
    shared = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification requires relative paths to be ignored.
    if not shared.is_absolute():
        shared = Path("~/.cache").expanduser()
    return shared / "ramstream"


def lasting_source(source: str) -> str:
    """Returns `source` in a form that works from any working directory.

    Bundled assets and hub ids are returned unchanged.
    """
    registry = registry_entry(source)
    if registry is not None:
        file, name = registry
        return f"{lasting_source(str(file))}:{name}"
    path = resolve_source(source)
    if path is None:
        return source
    is_bundled = not Path(source).expanduser().is_absolute() and path == PROGRAM_ROOT / source
    return source if is_bundled else str(path)


def lasting_sources(source: Any) -> Any:
    """Applies `lasting_source` to a data set, or to each part of a mix of `DataSource`s."""
    if isinstance(source, str):
        return lasting_source(source)
    return [dataclasses.asdict(part) | {"source": lasting_source(part.source)} for part in source]


def registry_entry(source: str) -> tuple[Path, str] | None:
    """Returns the registry file and the entry that ``path/dataset_info.json:name`` names, or None
    if there is no such file.
    """
    file, colon, name = source.rpartition(".json:")
    if not colon:
        return None
    path = resolve_source(f"{file}.json")
    if path is None or not path.is_file():
        return None
    return path, name


def resolve_source(source: str) -> Path | None:
    """Returns the existing local path that `source` names.

    The path is resolved first against the working directory, then against the program's folder,
    where bundled assets are. Returns None if no accessible path has this name; the name must then
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


def is_path(source: str) -> bool:
    """Returns whether a source can only mean a path of this machine, whether or not there is
    anything: no id of the hub looks like that.
    """
    return source.startswith((".", "/", "~")) or "\\" in source or source.count("/") > 1


def named_folder(text: str) -> Path:
    """Returns the folder that a person named, whether or not it exists.

    Raises RunError for a text that cannot be a path, and for a path that this user may not access.
    """
    try:
        path = Path(text).expanduser().resolve()
        path.exists()  # raises if the path may not be accessed
    except _NO_PATH as error:
        reason = (isinstance(error, OSError) and error.strerror) or first_line(error)
        raise RunError(f"{text[:200]!r} cannot be used here ({reason}); name another.") from None
    return path


_NO_PATH = (OSError, ValueError, RuntimeError)
"""pathlib raises these: OSError for a name that is too long or that may not be accessed, ValueError
for a zero byte, and RuntimeError for the home folder of an unknown user.
"""
