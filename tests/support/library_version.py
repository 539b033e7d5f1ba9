"""The tables of families were recorded with one minor version of transformers, and a newcomer may
install a later one. A later version can add a family, or change one so that it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import transformers

from engine.errors import ModelError

RECORDED = "5.24"
"""docs/families.md and docs/precision.md were written with this version of transformers."""
AS_RECORDED = transformers.__version__.startswith(f"{RECORDED}.")
NOT_AS_RECORDED = (
    f"the tables are of transformers {RECORDED}, and transformers {transformers.__version__} is "
    "installed"
)


@contextmanager
def another_version_may_refuse() -> Iterator[None]:
    """Skips the test if a family is refused by a version of transformers that the tables are not
    of. A refusal is right, as the user is told; training that is not right never is.
    """
    try:
        yield
    except ModelError as refusal:
        if AS_RECORDED:
            raise
        pytest.skip(f"{NOT_AS_RECORDED}: {refusal}")
