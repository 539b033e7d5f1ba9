"""Folders of models that are read into planes, for the tests of this folder."""

from __future__ import annotations

from tests.support.poured import poured  # noqa: F401  a fixture
