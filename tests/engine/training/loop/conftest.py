"""Fixtures that several tests of this folder use."""

from tests.support.bad_rows import bad_row  # noqa: F401  a fixture
from tests.support.gpu_resident_runs import keep_on_gpu  # noqa: F401  a fixture
