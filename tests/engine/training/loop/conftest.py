"""Fixtures that several tests of this folder use."""

from tests.support.bad_rows import bad_row  # noqa: F401  a fixture
from tests.support.settled_runs import settle  # noqa: F401  a fixture
