"""The command `push` puts an exported model onto the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.training.export.push import push
from engine.words import in_gb


def push_folder(folder: Path, repository: str, public: bool) -> str:
    """Pushes a folder, and returns a sentence that says where it is. Bytes that are done are
    printed to the error stream. Raises RamstreamError if the hub refuses.
    """

    def say(done: float, total: float, message: str = "") -> None:
        print(f"{message} ({in_gb(done)} of {in_gb(total)})", file=sys.stderr)

    return push(folder, repository, not public, say)
