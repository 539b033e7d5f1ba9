"""The key with which programs use the model that is served, under the paths of OpenAI's API.

It is made once, when it is first asked for, and kept in a file that its owner alone can read. It
opens nothing else, and nothing else opens these paths: neither a login nor the owner's account. A
page of another site could have a browser send those.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import stat
import threading
from pathlib import Path
from typing import Any

from starlette.types import Scope

from app.server.clients import header_values
from engine import safe_files
from engine.errors import RamstreamError

API_PREFIX = "/v1/"
KEY_FILE = ".api.key"
_KEY = re.compile(rb"sk-ramstream-[\w-]{43}", re.ASCII)
_BEARER = re.compile(rb"bearer +(\S+)", re.IGNORECASE)
_MOST_BYTES = 256


def is_api(scope: Scope) -> bool:
    """Returns whether a request is for a path of OpenAI's API."""
    path: str = scope["path"]
    return path.startswith(API_PREFIX)


def api_error(
    status: int, sentence: str, field: str | None = None, code: str | None = None
) -> dict[str, Any]:
    """Returns the body of an error in the form of OpenAI's API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    if status == 401:
        code = "invalid_api_key"
    return {"error": {"message": sentence, "type": kind, "param": field, "code": code}}


class ApiKey:
    """The key in the file `path`. All methods may be called from any thread."""

    def __init__(self, path: Path):
        self.path = path
        self._making = threading.Lock()
        self._key: bytes | None = None

    def text(self) -> str:
        """Returns the key, which is made if there is none. Raises RamstreamError where it cannot be
        kept.
        """
        with self._making:
            self._key = self._key or self._kept()
            if self._key is None:
                key = f"sk-ramstream-{secrets.token_urlsafe(32)}".encode("ascii")
                try:
                    # The file is created with its final mode, so that others never can read it.
                    safe_files.write_whole(
                        self.path, key, self.path.parent, mode=safe_files.PRIVATE
                    )
                except OSError as error:
                    raise RamstreamError(
                        f"{self.path}: the key for programs cannot be kept ({error.strerror})."
                    ) from None
                self._key = key
            return self._key.decode("ascii")

    def is_in(self, scope: Scope) -> bool:
        """Returns whether a request has the key in its one Authorization header."""
        with self._making:
            self._key = self._key or self._kept()
        given = header_values(scope, b"authorization")
        found = _BEARER.fullmatch(given[0].strip()) if len(given) == 1 else None
        # It is compared in constant time, so that the time of an answer tells nothing of the key.
        return (
            self._key is not None and found is not None and hmac.compare_digest(found[1], self._key)
        )

    def _kept(self) -> bytes | None:
        """Returns the key in the file; None for one that is missing, damaged, or open to others."""
        try:
            status = safe_files.lstat(self.path, self.path.parent)
            if status is None or not _is_private(status):
                return None
            key = safe_files.read_bytes(self.path, self.path.parent, _MOST_BYTES).strip()
        except OSError:
            return None
        return key if _KEY.fullmatch(key) else None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
