"""Settings for tests of what torch compiles."""

from __future__ import annotations

import pytest
import torch._inductor.config


@pytest.fixture
def quick_compiler():
    """Lets torch use the vector instructions that the processor names, without compiling a program
    for each kind of them to try it.
    """
    with torch._inductor.config.patch({"cpp.vec_isa_ok": True}):
        yield
