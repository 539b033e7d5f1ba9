"""A memory of shapes that can be emptied."""

from __future__ import annotations

import pytest

from engine.model.build import find_shape as shapes
from engine.planning.shape import shape_cache


@pytest.fixture
def unedited(monkeypatch):
    """The engine is what this process read, also while somebody edits it."""
    monkeypatch.setattr(shape_cache.FILES, "sources", lambda: shape_cache.FILES.first)


@pytest.fixture
def forgetful(monkeypatch):
    """`forget()`: as a new process would, the memory is empty. Its `built` lists what was built
    since.
    """
    built, build = [], shapes._build

    def noted(model, parts):
        built.append(model.source)
        return build(model, parts)

    monkeypatch.setattr(shapes, "_build", noted)

    def forget() -> None:
        monkeypatch.setattr(shapes, "_known", {})
        monkeypatch.setattr(shapes, "_failures", {})
        built.clear()

    forget.built = built
    forget()
    return forget
