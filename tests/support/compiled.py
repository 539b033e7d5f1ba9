"""Whether compiled kernels can be tested here."""

from __future__ import annotations

import shutil

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no C compiler")
