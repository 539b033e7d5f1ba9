"""A separate process downloads a model from the Hugging Face hub into the hub's own cache.

engine/model/hub/hub.py starts and ends the process. All requests go through huggingface_hub. When
its `hf_hub_download` is interrupted, it discards the downloaded part of a file. So its `http_get`
is called here to write weights into a separate file in the cache's folder, and the next attempt
resumes that file. The library then finds the complete file in its cache. Nothing here imports
torch.

- The request is one line of JSON on standard input: `{source, weights}`.
- The process reports progress in lines of JSON as bytes arrive: `{done, total, files, of}`.
- The last line is one of `{finished}`, `{unreachable: reason}` and `{error, text}`, where `error`
  names a class of engine.errors.
- When its input ends, the process ends as well.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from engine.errors import first_line
from engine.files import disk_free
from engine.helper_process import take_output
from engine.model.hub.hub_cache import LISTED, weight_files
from engine.model.hub.local_weights import CONFIG, about_gguf, is_gguf
from engine.model.hub.model_files import read_small
from engine.text import in_gib

ANSWER_SECONDS = 10
"""Seconds within which the hub must list the files of a model."""
CHUNK_BYTES = 1 << 18
"""Largest number of bytes of each file that are lost when a download is ended."""
FILES_AT_ONCE = 8
REPORT_EVERY = 0.2
"""Seconds between two reports of the progress."""
RETRY_SECONDS = 1.0
"""Seconds after which a broken connection is reopened."""
_SMALL = re.compile(
    r"[^/]+\.(json|txt|model|jinja|tiktoken|spm|codes)|additional_chat_templates/[^/]+\.jinja"
)
"""Names of files that hold the configuration, or may belong to a tokenizer."""
_LARGE = (".safetensors", ".bin")
"""Endings of files that hold weights. Their downloads continue where they were given up."""
_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""Form of the hashes by which the cache names contents."""


class Refused(Exception):
    """Raised for what a person must fix before a model can be downloaded.

    `kind` names the class in engine.errors that reports the problem.
    """

    def __init__(self, kind: str, text: str):
        self.kind = kind
        super().__init__(text)


class _Transfer:
    """Downloads the files of one model into the cache, and reports how many bytes are there."""

    def __init__(self, source: str, send: Callable[[dict[str, Any]], None]):
        from huggingface_hub import HfApi, constants

        self._source = source
        self._send = send
        info = HfApi().model_info(source, files_metadata=True, timeout=ANSWER_SECONDS)
        self._commit = info.sha
        self._files = {file.rfilename: file for file in info.siblings or ()}
        self._cache = Path(constants.HF_HUB_CACHE)
        model = f"models--{source.replace('/', '--')}"
        self._blobs = self._cache / model / "blobs"
        self._folder = self._cache / model / "snapshots" / str(self._commit)
        self._locks = self._cache / ".locks" / model
        self._come: dict[str, int] = {}
        """The number of bytes present for each wanted file. The threads of all files update it."""
        self._counting = threading.Lock()

    def run(self, weights: bool) -> None:
        """Runs the download of missing files: configuration, tokenizer and, with `weights`, the
        weights.
        """
        if CONFIG not in self._files:
            self._refuse_gguf()
        wanted = [name for name in self._files if _SMALL.fullmatch(name)]
        if weights:
            wanted = list(dict.fromkeys([*wanted, *self._weights()]))
        missing = [name for name in wanted if not (self._folder / name).exists()]
        if missing:
            self._come = {name: self._size(name) for name in wanted}
            self._come |= {name: self._there(name) for name in missing}
            self._check_disk_space(sum(self._size(name) - self._come[name] for name in missing))
            self._report()
            self._bring_all(missing)
        if wanted:  # from now on the cache serves this commit without a network
            self._library_download(wanted[0], None)

    def _bring_all(self, missing: list[str]) -> None:
        # After an error, the other threads are not waited for: the process ends with `os._exit`.
        threads = ThreadPoolExecutor(FILES_AT_ONCE)
        coming = {threads.submit(self._bring, name) for name in missing}
        while coming:
            ended, coming = wait(coming, REPORT_EVERY, FIRST_EXCEPTION)
            for file in ended:
                file.result()
            self._report()

    def _weights(self) -> list[str]:
        """Returns the names of the weight files. Raises Refused if the hub lacks one or all."""
        # The first of LISTED that is there is the only one that is read.
        first = next((name for name in LISTED if name in self._files), "")
        for name in (CONFIG, first):
            if name in self._files and name.endswith(".json"):
                self._library_download(name, self._commit)
        found = weight_files(self._files, lambda name: read_small(self._folder / name))
        if not found:
            self._refuse_gguf()
            raise Refused(
                "ModelError",
                f"model.source: {self._source} has no weights on the hub ({LISTED[0]}); choose "
                "another model.",
            )
        lacking = [name for name in found if name not in self._files]
        if lacking:
            raise Refused(
                "ModelError",
                f"model.source: the weights of {self._source} are not whole on the hub "
                f"({lacking[0]} is missing there); choose another model.",
            )
        return found

    def _refuse_gguf(self) -> None:
        """Raises Refused where the hub has the model in the format of llama.cpp."""
        if any(map(is_gguf, self._files)):
            raise Refused("ModelError", about_gguf(f"{self._source} has its weights"))

    def _size(self, name: str) -> int:
        return self._files[name].size or 0

    def _content_name(self, name: str) -> str:
        """Returns the cache's name for the content of a file, or an empty name if the hub does not
        report it.

        The name is the content's SHA-256, or git's SHA-1 for a file that git itself stores.
        """
        file = self._files[name]
        found = file.lfs.sha256 if file.lfs is not None else file.blob_id
        return found if found and _NAME.fullmatch(found) else ""

    def _partial(self, content: str) -> Path:
        return self._blobs / f"{content}.incomplete"

    def _there(self, name: str) -> int:
        """Returns the number of bytes of a file that need not be downloaded again."""
        content = self._content_name(name)
        if not content:
            return 0
        if (self._blobs / content).exists():
            return self._size(name)
        partial = self._partial(content)
        return min(self._size(name), partial.stat().st_size) if partial.exists() else 0

    def _check_disk_space(self, needed: int) -> None:
        if needed > disk_free(self._cache):
            raise _too_little_disk_space(
                f"{in_gib(needed)} of {self._source} are still to be downloaded", self._cache
            )

    def _bring(self, name: str) -> None:
        if name.endswith(_LARGE):
            self._bring_content(name)
        # The library finds the content in its cache, or downloads it, and links the file's name to
        # it.
        self._library_download(name, self._commit)
        self._count(name, self._size(name) - self._come[name])

    def _library_download(self, name: str, revision: str | None) -> None:
        """Makes the library download a file. The revision None means the newest commit, which the
        cache then records under the branch's name.
        """
        from huggingface_hub import hf_hub_download

        hf_hub_download(self._source, name, revision=revision)

    def _bring_content(self, name: str) -> None:
        """Puts the content of a file into the cache, under the content's name.

        A file whose download cannot be resumed is left to the library.
        """
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import get_hf_file_metadata
        from huggingface_hub.utils import WeakFileLock

        url = hf_hub_url(self._source, name, revision=self._commit)
        content = self._content_name(name)
        if self._size(name) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            # The hub serves such a file only over the library's other protocol, which cannot resume
            # a file.
            return
        if not content or get_hf_file_metadata(url, timeout=ANSWER_SECONDS).etag != content:
            return  # this server names contents differently
        for folder in (self._blobs, self._locks):
            folder.mkdir(parents=True, exist_ok=True)
        # The library takes the same lock, so that two processes never write the same file.
        with WeakFileLock(self._locks / f"{content}.lock"):
            if not (self._blobs / content).exists():
                self._stream(name, url, content)

    def _stream(self, name: str, url: str, content: str) -> None:
        """Downloads the missing part of a content, verifies all of it and moves it into place."""
        partial = self._partial(content)
        size = self._size(name)
        with partial.open("a+b") as file:
            if file.tell() > size:
                file.truncate(0)
            hashed = _Hashed(file, content, size, lambda count: self._count(name, count))
            # Another process may have written to the file since the bytes were counted.
            self._count(name, file.tell() - self._come[name])
            _receive(url, hashed, size)
        if hashed.digest() != content:
            partial.unlink()
            raise Refused(
                "ModelError",
                f"model.source: {name} of {self._source} arrived damaged and was thrown away; try "
                "again.",
            )
        partial.replace(self._blobs / content)

    def _count(self, name: str, more: int) -> None:
        """Adds `more` to the number of bytes present of a file."""
        with self._counting:
            self._come[name] += more

    def _report(self) -> None:
        with self._counting:
            come = dict(self._come)
        self._send(
            {
                "done": sum(come.values()),
                "total": sum(map(self._size, come)),
                "files": sum(count >= self._size(name) for name, count in come.items()),
                "of": len(come),
            }
        )


def _receive(url: str, hashed: _Hashed, size: int) -> None:
    """Downloads the rest of a content of `size` bytes into `hashed`.

    A broken connection is reopened as long as bytes keep arriving.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    file: Any = hashed  # it has all file methods that `http_get` uses
    while True:
        before = hashed.tell()
        try:
            http_get(url, file, resume_size=before, headers=build_hf_headers(), expected_size=size)
            return
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) or hashed.tell() <= before:
                raise
            time.sleep(RETRY_SECONDS)


class _Hashed:
    """An instance wraps a file that is open for appending, and hashes the content as `http_get`
    writes to it.

    The hash is SHA-256, or the SHA-1 of a git blob of `size` bytes, depending on `content`. The
    existing content of the file is read first. `written` is called with the number of bytes added,
    which is negative when bytes were removed.
    """

    def __init__(self, file: BinaryIO, content: str, size: int, written: Callable[[int], None]):
        self._file = file
        self._written = written
        self._is_sha256 = len(content) == 64
        self._size = size
        self._read_again()

    def _read_again(self) -> None:
        if self._is_sha256:
            self._hash = hashlib.sha256()
        else:
            self._hash = hashlib.sha1(b"blob %d\0" % self._size)
        self._file.seek(0)
        while chunk := self._file.read(1 << 20):
            self._hash.update(chunk)

    def write(self, chunk: bytes) -> int:
        count = self._file.write(chunk)
        self._hash.update(chunk)
        self._written(len(chunk))
        return count

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Truncates the file. This is needed when a server sends a file from the start although
        only the rest was requested.
        """
        size = self._file.tell() if size is None else size
        before = self._file.seek(0, os.SEEK_END)
        left = self._file.truncate(size)
        self._read_again()
        self._written(left - before)
        return left

    def digest(self) -> str:
        return self._hash.hexdigest()


def answer_of(error: Exception, source: str, has_begun: bool) -> dict[str, Any]:
    """Returns the final line of output for an error.

    has_begun: the hub has already listed its files.
    """
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    refused = error if isinstance(error, Refused) else _refusal(error, source)
    if refused is not None:
        return {"error": refused.kind, "text": str(refused)}
    if isinstance(error, HfHubHTTPError):
        reason = f"it answered {error.response.status_code}"
    else:
        reason = first_line(error)
    if not has_begun and isinstance(error, (HTTPError, LocalEntryNotFoundError, OSError)):
        return {"unreachable": reason}
    return {
        "error": "ModelError",
        "text": f"model.source: the connection to the hub was lost while {source} was downloaded "
        f"({reason}); try again when it is back: what has come is kept.",
    }


def _refusal(error: Exception, source: str) -> Refused | None:
    """Returns what a person has to fix, if the error is about a name, permissions or the disk; None
    for other errors.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    login = "log in with `hf auth login` or set HF_TOKEN"
    cache = Path(constants.HF_HUB_CACHE)
    is_gated = isinstance(error, GatedRepoError)
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)) and not is_gated:
        return Refused(
            "ModelError",
            f"model.source: {source!r} is neither a local folder nor a model that the hub gave (it "
            f"knows none of this name, or keeps it private); check the name, and {login} if it is "
            "private.",
        )
    is_forbidden = isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
    if is_gated or is_forbidden:
        return Refused(
            "ModelError",
            f"model.source: the hub gives {source} only to those who have accepted its license; "
            f"do so on {constants.ENDPOINT}/{source}, then {login}, and try again.",
        )
    if not isinstance(error, OSError):
        return None
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _too_little_disk_space(f"{source} cannot be downloaded as a whole", cache)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR):
        return Refused(
            "ModelError",
            f"model.source: {source} cannot be written to {cache} ({error.strerror}); set HF_HOME "
            "to a folder that can be written.",
        )
    return None


def _too_little_disk_space(what: str, cache: Path) -> Refused:
    return Refused(
        "FitError",
        f"model.source: {what} to {cache}, where {in_gib(disk_free(cache))} is free; free some "
        "disk space, or set HF_HOME to a folder on a larger disk.",
    )


def serve() -> None:
    """Serves the request on standard input, and ends the process."""
    answers = take_output()

    def send(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    asked = json.loads(sys.stdin.buffer.readline())

    def end_with_caller() -> None:
        # The input ends when the caller closes it or exits, even if it crashes.
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    from huggingface_hub import constants, utils

    utils.logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    transfer = None
    try:
        transfer = _Transfer(asked["source"], send)
        transfer.run(asked["weights"])
        send({"finished": True})
    except Exception as error:  # noqa: BLE001  every failure is reported in one sentence
        send(answer_of(error, asked["source"], transfer is not None))
    os._exit(0)  # do not wait for threads that are still downloading other files
