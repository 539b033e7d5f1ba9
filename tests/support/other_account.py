"""Programs that run as another account, where the tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NOBODY = 65534
needs_root = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can run a program as another account"
)


def as_nobody(imports: str, code: str, *arguments: object, readable: Path | None = None) -> str:
    """Runs a line of Python as an account that owns nothing, and returns what it prints. It can
    read no module that `imports` has not imported. The folders above `readable` are opened to it.
    """
    if readable is not None:
        for place in (readable, *readable.parents):
            if place == Path("/tmp"):
                break
            place.chmod(place.stat().st_mode | 0o755)
    program = f"{imports}; import os; os.setgid({NOBODY}); os.setuid({NOBODY}); {code}"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    return done.stdout
