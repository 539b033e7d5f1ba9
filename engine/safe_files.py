"""Files in folders that others may have written: run folders, uploads, the queue, caches.

A run folder may come from a stranger, and a name in it may be a link, a pipe, a device or a file of
any size and content. So nothing else in the program opens a path inside such folders.

- Each function is given a `path` and the folder `within` which it is. That folder is the owner's:
  it may itself be a link, for example to a bigger disk. Below it, no link is followed: each part of
  the path is opened relative to the descriptor of the part before it.
- Files of models that a person named may be reached by links, as those of the hub's cache are; the
  functions for them have no `within` and only read.
- Only regular files are opened, without waiting (a pipe would never answer), and small files are
  read up to a limit and by type.
- A file is written whole under another name and then renamed, so that what had its name, a link for
  example, is replaced and not written through. What is written in place has no second name.
- A folder is made for its owner alone. A new file has the mode that the umask gives, since its
  folder protects it, or `PRIVATE`.

A name that is not what it must be raises FileFault; the system's own errors are OSError, as for any
file. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from engine.errors import RunError

T = TypeVar("T")

SMALL = 4 << 20
"""Bytes of a small file, at most."""
MEDIUM = 64 << 20
"""Bytes of a tokenizer's files, and of what is kept of large data sets, at most."""
LARGE = 16 << 30
"""Bytes of a record that is read line by line, at most."""
BY_UMASK = 0o666
"""Mode of a file that others may read according to the umask, if its folder lets them in."""
PRIVATE = 0o600
"""Mode of a file that is its owner's alone."""

_PART = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_LISTED = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISLNK, "a link, which is not followed here"),
    (stat.S_ISDIR, "a folder, not a file"),
    (stat.S_ISFIFO, "a pipe, not a file"),
    (stat.S_ISSOCK, "a socket, not a file"),
    (stat.S_ISREG, "a file, not a folder"),
)


class FileFault(RunError, OSError):
    """Raised for a file in a folder that others may have written, if it is not what it must be.

    It is a RunError, whose sentence names the file, and an OSError, whose `strerror` is the cause,
    for callers that have more to report of the file.
    """

    def __init__(self, path: str | os.PathLike[str], problem: str, code: int = errno.EINVAL):
        """`problem` continues the sentence after the file's name, such as "is a link"."""
        self._sentence = f"{os.fspath(path)} {problem}."
        super().__init__(self._sentence)
        self.errno = code
        self.strerror = f"it {problem}"
        self.filename = os.fspath(path)

    def __str__(self) -> str:
        return self._sentence


# ---------------------------------------------------------------------- descending


def _fault_of_kind(path: Path, mode: int) -> FileFault:
    for is_kind, words in _KINDS:
        if is_kind(mode):
            return FileFault(path, f"is {words}", errno.ELOOP)
    return FileFault(path, "is a device, not a file")


class _Above:
    """The folder that holds the last name of `path`, open as long as this context is.

    It is a class, since a list of a thousand runs opens thousands of them. The system's errors get
    the whole path, which the call did not know.
    """

    def __init__(self, path: Path, within: Path):
        self._path, self._within = path, within
        *self._parts, self._name = _parts(path, within)
        self._folder = -1

    def __enter__(self) -> tuple[str, int]:
        try:
            self._folder = os.open(self._within, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            for place, part in enumerate(self._parts):
                below = self._open(place, part)
                os.close(self._folder)
                self._folder = below
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self._name, self._folder

    def _open(self, place: int, part: str) -> int:
        try:
            return os.open(part, _PART, dir_fd=self._folder)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            mode = os.stat(part, dir_fd=self._folder, follow_symlinks=False).st_mode
            reached = self._within.joinpath(*self._parts[: place + 1])
            raise _fault_of_kind(reached, mode) from None

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if self._folder >= 0:
            os.close(self._folder)
            self._folder = -1
        if isinstance(error, OSError) and not isinstance(error, FileFault):
            raise OSError(error.errno, error.strerror, str(self._path)) from None


def _parts(path: Path, within: Path) -> tuple[str, ...]:
    """Returns the names that lead from `within` to `path`, at least one."""
    try:
        parts = Path(path).relative_to(within).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts:
        raise FileFault(path, f"is not inside {within}")
    return parts


def _refuse_other_kinds(path: Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise _fault_of_kind(path, status.st_mode)


def _opened(path: Path, name: str, folder: int, flags: int) -> int:
    """Returns a descriptor of the regular file `name` in `folder`. A device is not even opened."""
    with contextlib.suppress(FileNotFoundError):
        _refuse_other_kinds(path, os.stat(name, dir_fd=folder, follow_symlinks=False))
    descriptor = os.open(name, flags | _FILE, BY_UMASK, dir_fd=folder)
    try:
        _refuse_other_kinds(path, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def refuse_other_kinds(
    path: Path, found: Mapping[str, os.stat_result], names: Iterable[str]
) -> None:
    """Raises FileFault if one of these names in the folder `path`, as `entries` found them, is no
    regular file.
    """
    for name in names:
        if name in found:
            _refuse_other_kinds(path / name, found[name])


def refuse_other_than_files(path: Path, within: Path) -> None:
    """Raises FileFault if a folder has anything but regular files and folders of these, before a
    library that opens files itself gets it. Raises OSError if there is no such folder.
    """
    waiting = [path]
    while waiting:
        folder = waiting.pop()
        for name, status in entries(folder, within).items():
            if stat.S_ISDIR(status.st_mode):
                waiting.append(folder / name)
            else:
                _refuse_other_kinds(folder / name, status)


# ---------------------------------------------------------------------- names


def lstat(path: Path, within: Path) -> os.stat_result | None:
    """Returns what the system knows of a name, of a link itself and not of where it leads, or None
    if there is no such name. Raises OSError, and FileFault where a folder above it is none.
    """
    try:
        with _Above(path, within) as (name, folder):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def is_file(path: Path, within: Path) -> bool:
    """Returns whether `path` is a regular file that can be reached without a link."""
    return _is(stat.S_ISREG, path, within)


def is_folder(path: Path, within: Path) -> bool:
    """Returns whether `path` is a folder that can be reached without a link."""
    return _is(stat.S_ISDIR, path, within)


def _is(is_kind: Callable[[int], bool], path: Path, within: Path) -> bool:
    try:
        status = lstat(path, within)
    except OSError:
        return False
    return status is not None and is_kind(status.st_mode)


def size_of(path: Path, within: Path) -> int:
    """Returns the size of a file in bytes, or 0 if there is none. Raises OSError, and FileFault for
    a name that is no regular file.
    """
    status = lstat(path, within)
    if status is None:
        return 0
    _refuse_other_kinds(path, status)
    return status.st_size


def entries(path: Path, within: Path) -> dict[str, os.stat_result]:
    """Returns the names in a folder with what the system knows of each, of links themselves.

    Names that go away meanwhile are left out. Raises OSError, and FileFault for a name that is no
    folder.
    """
    found = {}
    folder = _opened_folder(path, within)
    try:
        with os.scandir(folder) as names:
            for entry in names:
                with contextlib.suppress(OSError):
                    found[entry.name] = entry.stat(follow_symlinks=False)
    finally:
        os.close(folder)
    return found


def _opened_folder(path: Path, within: Path) -> int:
    """Returns a descriptor by which a folder can be listed and synced. `path` may be `within`."""
    if path == within:
        return os.open(path, _LISTED & ~os.O_NOFOLLOW)
    with _Above(path, within) as (name, above):
        try:
            return os.open(name, _LISTED, dir_fd=above)
        except OSError as error:
            if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                raise
            mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
            raise _fault_of_kind(path, mode) from None


# ---------------------------------------------------------------------- reading


def open_to_read(path: Path, within: Path, most: int = LARGE, buffering: int = -1) -> BinaryIO:
    """Opens a file of at most `most` bytes. Raises OSError, and FileFault."""
    with _Above(path, within) as (name, folder):
        descriptor = _opened(path, name, folder, os.O_RDONLY)
        try:
            _refuse_large(path, os.fstat(descriptor), most)
        except FileFault:
            os.close(descriptor)
            raise
        return os.fdopen(descriptor, "rb", buffering=buffering)


def read_bytes(path: Path, within: Path, most: int = SMALL) -> bytes:
    """Returns the content of a file of at most `most` bytes. Raises OSError, and FileFault."""
    with open_to_read(path, within, most, buffering=0) as file:
        content = bytearray()
        # A file may grow while it is read.
        while chunk := file.read(min(1 << 20, most + 1 - len(content))):
            content += chunk
            if len(content) > most:
                raise FileFault(path, f"grows; at most {most:,} bytes are read", errno.EFBIG)
        return bytes(content)


def open_linked(path: Path, most: int = LARGE) -> BinaryIO:
    """Opens a file of at most `most` bytes to which links may lead, as those of the hub's cache do.

    It is for files of models and data that a person named, which are read and never written.
    Raises OSError, and FileFault.
    """
    _refuse_other_kinds(path, path.stat())  # a device is not even opened
    descriptor = os.open(path, os.O_RDONLY | _FILE & ~os.O_NOFOLLOW)
    try:
        status = os.fstat(descriptor)
        _refuse_other_kinds(path, status)
        _refuse_large(path, status, most)
    except BaseException:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_linked(path: Path, most: int = SMALL) -> bytes:
    """Returns the content of a file as `open_linked` opens it."""
    with open_linked(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise FileFault(path, f"grows; at most {most:,} bytes are read", errno.EFBIG)
    return content


def refuse_unlike_files(path: Path, most: int) -> None:
    """Raises FileFault for a name that leads to anything but a file of at most `most` bytes, before
    a library opens it. A name that leads nowhere is none.
    """
    with contextlib.suppress(FileNotFoundError):
        status = path.stat()
        _refuse_other_kinds(path, status)
        _refuse_large(path, status, most)


def _refuse_large(path: Path, status: os.stat_result, most: int) -> None:
    if status.st_size > most:
        raise FileFault(
            path, f"has {status.st_size:,} bytes; at most {most:,} are read", errno.EFBIG
        )


def read_text(path: Path, within: Path, most: int = SMALL) -> str:
    """Returns the text of a small file. Raises OSError, and FileFault, also for bytes that are no
    UTF-8.
    """
    try:
        return read_bytes(path, within, most).decode()
    except UnicodeDecodeError:
        raise FileFault(path, "is no text in UTF-8") from None


def read_json(path: Path, within: Path, kind: type[T], most: int = SMALL) -> T:
    """Returns the content of a small JSON file as `kind`, which msgspec checks.

    Raises OSError, and FileFault for what is no JSON or has other types.
    """
    return decoded(path, read_bytes(path, within, most), kind)


def decoded(path: Path, content: bytes, kind: type[T] | Any) -> T:
    """Returns JSON that was read from `path` as `kind`. Raises FileFault."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.ValidationError as error:
        raise FileFault(path, f"is not as this program writes it ({_short(error)})") from None
    except ValueError as error:
        raise FileFault(path, f"is not valid JSON ({_short(error)})") from None
    except RecursionError:
        raise FileFault(path, "is not valid JSON (it is nested too deeply)") from None


def _short(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200].rstrip(". ")


# ---------------------------------------------------------------------- writing


def write_whole(
    path: Path,
    content: str | bytes,
    within: Path,
    durable: bool = True,
    mode: int = BY_UMASK,
) -> None:
    """Writes a file so that every reader finds either the old content or the new one, and after a
    power failure the new one.

    `durable=False` does not wait for the disk; it is for content that may be lost in a power
    failure. If it raises OSError, no partial file is left behind.
    """
    partial = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex[:8]}.partial")
    encoded = content.encode() if isinstance(content, str) else content
    folder = _opened_folder(path.parent, within)
    try:
        # The content must be on the disk before the name points to it: a rename that survived a
        # power failure would otherwise leave an empty file.
        _write_new(partial, folder, encoded, durable, mode)
        os.replace(partial.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        if durable:
            sync(folder)
    except BaseException as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial.name, dir_fd=folder)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    finally:
        os.close(folder)


def write_new(path: Path, content: bytes, within: Path) -> None:
    """Writes a file that does not exist yet; its content is on the disk when this returns, its name
    once its folder is synced. Raises OSError.
    """
    with _Above(path, within) as (_, folder):
        _write_new(path, folder, content, durable=True, mode=BY_UMASK)


def _write_new(path: Path, folder: int, content: bytes, durable: bool, mode: int) -> None:
    with os.fdopen(_created(path, folder, mode), "wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def _created(path: Path, folder: int, mode: int) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FILE
    return os.open(path.name, flags, mode, dir_fd=folder)


def create(path: Path, within: Path) -> int:
    """Returns a descriptor of a new, empty file, for reading and writing. Raises OSError, also if
    the name exists.
    """
    with _Above(path, within) as (_, folder):
        return _created(path, folder, BY_UMASK)


def open_to_append(path: Path, within: Path) -> int:
    """Returns a descriptor for reading and appending; a file that does not exist is made.

    A file that has a second name (a hard link), which may be outside, is copied first and the copy
    takes its place here. Raises OSError, and FileFault.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
    with _Above(path, within) as (name, folder):
        descriptor = _opened(path, name, folder, flags)
        if os.fstat(descriptor).st_nlink < 2:
            return descriptor
        try:
            _separate(path, descriptor, folder)
        finally:
            os.close(descriptor)
        return _opened(path, name, folder, flags)


def _separate(path: Path, descriptor: int, folder: int) -> None:
    status = os.fstat(descriptor)
    if status.st_size > LARGE:
        raise FileFault(path, f"has a second name and {status.st_size:,} bytes, too many to copy")
    copy = path.with_name(f".{path.name[:40]}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with (
            os.fdopen(_created(copy, folder, stat.S_IMODE(status.st_mode)), "wb") as target,
            os.fdopen(os.dup(descriptor), "rb") as source,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        os.replace(copy.name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy.name, dir_fd=folder)
        raise


def open_lock(path: Path, within: Path, makes: bool) -> int:
    """Returns a descriptor of a file that is locked. makes: it may be created and written; without
    that, it is opened for reading alone. Raises OSError, and FileFault.
    """
    flags = os.O_RDWR | os.O_CREAT if makes else os.O_RDONLY
    with _Above(path, within) as (name, folder):
        return _opened(path, name, folder, flags)


def truncate(path: Path, within: Path, size: int) -> None:
    """Shortens a file that has no second name. Raises OSError, and FileFault."""
    with _Above(path, within) as (name, folder):
        descriptor = _opened(path, name, folder, os.O_WRONLY)
        try:
            if os.fstat(descriptor).st_nlink > 1:
                raise FileFault(path, "has a second name, so it is not changed here")
            os.ftruncate(descriptor, size)
        finally:
            os.close(descriptor)


def write_over(descriptor: int, content: bytes) -> None:
    """Replaces the content of an open file, unless it has a second name. Raises OSError."""
    if os.fstat(descriptor).st_nlink == 1:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, content, 0)


def sync(folder: int) -> None:
    """Waits until the names in an open folder are on the disk, where the file system can do that.
    Raises OSError.
    """
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise


def sync_folder(path: Path, within: Path) -> None:
    """Waits until a folder's entries are on the disk: the names that were created, renamed or
    removed. `path` may be `within`. Raises OSError.
    """
    folder = _opened_folder(path, within)
    try:
        sync(folder)
    finally:
        os.close(folder)


# ---------------------------------------------------------------------- folders and names


def make_folder(path: Path, within: Path, exist_ok: bool = False) -> None:
    """Makes a folder in a folder that exists, for its owner alone. Raises OSError, and FileFault
    for a name that exists and is no folder.
    """
    with _Above(path, within) as (name, folder):
        try:
            os.mkdir(name, 0o700, dir_fd=folder)
        except FileExistsError:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
            if not exist_ok:
                raise
            if not stat.S_ISDIR(found):
                raise _fault_of_kind(path, found) from None


def rename(path: Path, other: Path, within: Path) -> None:
    """Renames a file, a folder or a link itself; both names are below `within`. Raises OSError."""
    with _Above(path, within) as (name, folder), _Above(other, within) as (to, other_folder):
        os.rename(name, to, src_dir_fd=folder, dst_dir_fd=other_folder)


def set_aside(path: Path, within: Path) -> Path:
    """Gives a file that cannot be read a name of its own beside it, such as queue.damaged.json, so
    that nothing of it is lost. Returns the new path. Raises OSError.
    """
    number = 1
    while True:
        more = f"-{number}" if number > 1 else ""
        aside = path.with_name(f"{path.stem}.damaged{more}{path.suffix}")
        if lstat(aside, within) is None:
            rename(path, aside, within)
            return aside
        number += 1


def link(path: Path, other: Path, within: Path) -> None:
    """Gives a file a second name, `other` (a hard link); both names are below `within`. Raises
    OSError, and FileFault for what is no regular file.
    """
    with _Above(path, within) as (name, folder), _Above(other, within) as (to, other_folder):
        _refuse_other_kinds(path, os.stat(name, dir_fd=folder, follow_symlinks=False))
        os.link(name, to, src_dir_fd=folder, dst_dir_fd=other_folder, follow_symlinks=False)


def remove(path: Path, within: Path) -> None:
    """Removes a file or a link itself, if it exists. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _Above(path, within) as (name, folder):
        os.unlink(name, dir_fd=folder)


def remove_oldest(folder: Path, names: re.Pattern[str], most: int) -> None:
    """Removes the oldest files of a folder beyond `most`, of those whose whole names match `names`.
    Raises OSError for a folder that cannot be read.
    """
    found = [
        (status.st_mtime_ns, name)
        for name, status in entries(folder, folder).items()
        if names.fullmatch(name)
    ]
    for _, name in sorted(found)[:-most]:
        with contextlib.suppress(OSError):  # another process is removing files too
            remove(folder / name, folder)


def remove_tree(path: Path, within: Path) -> None:
    """Removes a folder with all that is in it, or a file, or a link itself; nothing that a link
    leads to. Raises OSError.
    """
    _remove_tree(path, within, ignores=False)


def try_to_remove_tree(path: Path, within: Path) -> None:
    """Removes as much of a tree as possible, and raises nothing."""
    with contextlib.suppress(OSError):
        _remove_tree(path, within, ignores=True)


def _remove_tree(path: Path, within: Path, ignores: bool) -> None:
    with contextlib.suppress(FileNotFoundError), _Above(path, within) as (name, folder):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            try:
                shutil.rmtree(name, ignores, dir_fd=folder)
            except RecursionError:
                raise FileFault(path, "has too many folders in each other") from None
        else:
            os.unlink(name, dir_fd=folder)
