"""The command `push`, which uploads an exported model to the Hugging Face hub."""

from __future__ import annotations

import sys
from pathlib import Path

from engine.text import in_gb
from engine.training.export.push import push


def push_folder(folder: Path, repository: str, public: bool) -> str:
    """Pushes a folder, and returns a sentence with its address. Bytes that are done are printed to
    the error stream. Raises RamstreamError if the hub refuses.
    """

    def report(done: float, total: float, message: str = "") -> None:
        print(f"{message} ({in_gb(done)} of {in_gb(total)})", file=sys.stderr)

    return push(folder, repository, not public, report)
