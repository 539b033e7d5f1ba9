"""A compiler that is there or is not, for tests of what is chosen."""

from __future__ import annotations

import pytest

from engine.planning.fit import choose as choosing


@pytest.fixture
def compiler(monkeypatch):
    """Says why nothing can be compiled; here something can."""

    def say(problem: str) -> None:
        monkeypatch.setattr(choosing, "compiler_problem", lambda: problem)

    say("")
    return say


@pytest.fixture(params=["", "Triton is not installed"], ids=["compiler", "no compiler"])
def either(compiler, request):
    compiler(request.param)
    return not request.param
