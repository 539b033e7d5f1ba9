"""The process that downloads a model of the Hugging Face hub into the hub's own cache.
engine/model/hub.py starts and ends it.

Everything goes through huggingface_hub. Its `hf_hub_download` throws away what it has of a file
when it is interrupted, so weights are written here by its `http_get`, into a file beside the
cache's own that the next attempt goes on with; the library then finds the whole file in its cache.
Nothing here imports torch.

Asked by one line of JSON on the standard input, it answers in lines: `{done, total, files, of}` as
bytes come, and at last one of `{finished}`, `{unreachable: reason}` and `{error: class of
engine.errors, text}`. When its input ends, so does it.
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
from engine.model.hub_cache import INDEX, WEIGHTS, weight_files
from engine.words import in_gib

ANSWER_SECONDS = 10
"""How long the hub may take to say what it has."""
CHUNK_BYTES = 1 << 18
"""What is lost of each file at most when a download is ended."""
FILES_AT_ONCE = 8
TOLD_EVERY = 0.2
RETRY_SECONDS = 1.0
_SMALL = re.compile(
    r"[^/]+\.(json|txt|model|jinja|tiktoken|spm|codes)|additional_chat_templates/[^/]+\.jinja"
)
"""Configuration and whatever a tokenizer may be made of."""
_NAME = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Refused(Exception):
    """What cannot be downloaded: the class of engine.errors that tells it, and its sentence."""

    def __init__(self, kind: str, text: str):
        self.kind = kind
        super().__init__(text)


class _Transfer:
    """Of one model: which files, how many bytes of each are there."""

    def __init__(self, source: str, say: Callable[[dict[str, Any]], None]):
        from huggingface_hub import HfApi, constants

        self._source, self._say = source, say
        info = HfApi().model_info(source, files_metadata=True, timeout=ANSWER_SECONDS)
        self._commit = info.sha
        self._files = {file.rfilename: file for file in info.siblings or ()}
        self._cache = Path(constants.HF_HUB_CACHE)
        model = f"models--{source.replace('/', '--')}"
        self._blobs = self._cache / model / "blobs"
        self._folder = self._cache / model / "snapshots" / self._commit
        self._locks = self._cache / ".locks" / model
        self._come: dict[str, int] = {}
        self._counting = threading.Lock()

    def run(self, weights: bool) -> None:
        wanted = [name for name in self._files if _SMALL.fullmatch(name)]
        if weights:
            wanted = list(dict.fromkeys([*wanted, *self._weights()]))
        missing = [name for name in wanted if not (self._folder / name).exists()]
        if missing:
            self._come = {
                name: self._there(name) if name in missing else self._size(name) for name in wanted
            }
            self._check_disk_space(sum(self._size(name) - self._come[name] for name in missing))
            self._tell()
            threads = ThreadPoolExecutor(FILES_AT_ONCE)  # whose end nobody waits for after an error
            coming = {threads.submit(self._bring, name) for name in missing}
            while coming:
                ended, coming = wait(coming, TOLD_EVERY, FIRST_EXCEPTION)
                for file in ended:
                    file.result()
                self._tell()
        if wanted:  # from here on this is what the cache gives without a network
            self._library_download(wanted[0], None)

    def _weights(self) -> list[str]:
        for name in ("config.json", INDEX):  # they say which weights there are
            if name in self._files and not (name == INDEX and WEIGHTS in self._files):
                self._library_download(name)
        found = weight_files(
            self._files, lambda name: (self._folder / name).read_text(encoding="utf-8")
        )
        lacking = next((name for name in found if name not in self._files), None)
        if lacking is not None:
            raise Refused(
                "ModelError",
                f"model.source: the weights of {self._source} are not whole on the hub ({lacking} "
                "is missing there); choose another model.",
            )
        return found

    def _size(self, name: str) -> int:
        return self._files[name].size or 0

    def _content_name(self, name: str) -> str:
        """What the cache calls the content of a file: its SHA-256, or git's SHA-1 for a file that
        git itself holds.
        """
        file = self._files[name]
        found = file.lfs.sha256 if file.lfs is not None else file.blob_id
        return found if found and _NAME.fullmatch(found) else ""

    def _partial(self, content: str) -> Path:
        return self._blobs / f"{content}.incomplete"

    def _there(self, name: str) -> int:
        """Bytes of a file that need not come again."""
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
        if name.endswith(".safetensors"):
            self._resumable(name)
        self._library_download(name)
        self._count(name, self._size(name) - self._come[name])

    def _library_download(self, name: str, revision: str | None = "") -> None:
        """`revision` None: the newest, which the cache then knows by its name."""
        from huggingface_hub import hf_hub_download

        hf_hub_download(self._source, name, revision=self._commit if revision == "" else revision)

    def _resumable(self, name: str) -> None:
        """The content of a file, in the cache under its name."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.file_download import get_hf_file_metadata
        from huggingface_hub.utils import WeakFileLock

        url = hf_hub_url(self._source, name, revision=self._commit)
        content = self._content_name(name)
        if self._size(name) > constants.MAX_HTTP_DOWNLOAD_SIZE:
            # the hub gives such a file by the library's other protocol alone, which does not go on
            # in the middle
            return
        if not content or get_hf_file_metadata(url, timeout=ANSWER_SECONDS).etag != content:
            return  # a server that names contents in its own way is left to the library
        for folder in (self._blobs, self._locks):
            folder.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(self._locks / f"{content}.lock"):
            if not (self._blobs / content).exists():
                self._stream(name, url, content)

    def _stream(self, name: str, url: str, content: str) -> None:
        from huggingface_hub.errors import HfHubHTTPError, HTTPError
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        partial, size = self._partial(content), self._size(name)
        with open(partial, "a+b") as file:
            if file.tell() > size:
                file.truncate(0)
            hashed = _Hashed(file, content, size, lambda count: self._count(name, count))
            self._count(
                name, file.tell() - self._come[name]
            )  # another process may have written meanwhile
            while True:
                before = file.tell()
                try:
                    http_get(
                        url,
                        hashed,
                        resume_size=before,
                        headers=build_hf_headers(),
                        expected_size=size,
                    )
                    break
                except (
                    HTTPError
                ) as error:  # a connection that breaks is opened again as long as bytes come
                    if isinstance(error, HfHubHTTPError) or file.tell() <= before:
                        raise
                    time.sleep(RETRY_SECONDS)
        if hashed.digest() != content:
            partial.unlink()
            raise Refused(
                "ModelError",
                f"model.source: {name} of {self._source} arrived damaged and was thrown away; try "
                "again.",
            )
        os.replace(partial, self._blobs / content)

    def _count(self, name: str, more: int) -> None:
        """So many more bytes of a file are there."""
        with self._counting:
            self._come[name] += more

    def _tell(self) -> None:
        with self._counting:
            come = dict(self._come)
        self._say(
            {
                "done": sum(come.values()),
                "total": sum(map(self._size, come)),
                "files": sum(count >= self._size(name) for name, count in come.items()),
                "of": len(come),
            }
        )


class _Hashed:
    """A file that `http_get` writes to, open for appending, whose content is hashed on the way:
    SHA-256, or the SHA-1 of a git blob of `size` bytes, whichever `content` is. What it holds
    already is read first.
    """

    def __init__(self, file: BinaryIO, content: str, size: int, written: Callable[[int], None]):
        self._file, self._written = file, written
        self._new: Callable[[], Any] = (
            hashlib.sha256 if len(content) == 64 else lambda: hashlib.sha1(b"blob %d\0" % size)
        )
        self._read_again()

    def _read_again(self) -> None:
        self._hash = self._new()
        self._file.seek(0)
        while piece := self._file.read(1 << 20):
            self._hash.update(piece)

    def write(self, piece: bytes) -> int:
        count = self._file.write(piece)
        self._hash.update(piece)
        self._written(len(piece))
        return count

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = 0) -> int:
        return self._file.seek(offset, whence)

    def truncate(self, size: int | None = None) -> int:
        """Done where a server begins anew in spite of being asked for the rest."""
        size = self._file.tell() if size is None else size
        before = self._file.seek(0, os.SEEK_END)
        left = self._file.truncate(size)
        self._read_again()
        self._written(left - before)
        return left

    def digest(self) -> str:
        return self._hash.hexdigest()


def answer_of(error: Exception, source: str, has_begun: bool) -> dict[str, Any]:
    """What is told of an error. `has_begun`: the hub has said what it has."""
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    refused = error if isinstance(error, Refused) else _refusal(error, source)
    if refused is not None:
        return {"error": refused.kind, "text": str(refused)}
    reason = (
        f"it answered {error.response.status_code}"
        if isinstance(error, HfHubHTTPError)
        else first_line(error)
    )
    if not has_begun and isinstance(error, (HTTPError, LocalEntryNotFoundError, OSError)):
        return {"unreachable": reason}
    return {
        "error": "ModelError",
        "text": f"model.source: the connection to the hub was lost while {source} was downloaded "
        f"({reason}); try again when it is back: what has come is kept.",
    }


def _refusal(error: Exception, source: str) -> Refused | None:
    """What a person has to mend, if it is such an error: of the name, of rights, of the disk."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
    )

    login, cache = "log in with `hf auth login` or set HF_TOKEN", Path(constants.HF_HUB_CACHE)
    if isinstance(error, (RepositoryNotFoundError, HFValidationError)) and not isinstance(
        error, GatedRepoError
    ):
        return Refused(
            "ModelError",
            f"model.source: {source!r} is neither a local folder nor a model that the hub gave (it "
            f"knows none of this name, or keeps it private); check the name, and {login} if it is "
            "private.",
        )
    if isinstance(error, GatedRepoError) or (
        isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)
    ):
        return Refused(
            "ModelError",
            f"model.source: the hub gives {source} only to those who have accepted its licence; "
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
    """Do what the standard input asks: `{source, weights}`. Never returns."""
    answers = take_output()

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()

    asked = json.loads(sys.stdin.buffer.readline())

    def end_with_caller() -> None:
        sys.stdin.buffer.read()
        os._exit(1)

    threading.Thread(target=end_with_caller, daemon=True).start()
    from huggingface_hub import constants, utils

    utils.logging.set_verbosity_error()
    constants.DOWNLOAD_CHUNK_SIZE = CHUNK_BYTES
    transfer = None
    try:
        transfer = _Transfer(asked["source"], say)
        transfer.run(asked["weights"])
        say({"finished": True})
    except Exception as error:
        say(answer_of(error, asked["source"], transfer is not None))
    os._exit(0)  # threads of other files may still be at work
