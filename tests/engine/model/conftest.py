"""A memory of shapes that can be emptied."""

from __future__ import annotations

import pytest

from engine.model import find_shape as shapes
from engine.model import kept_shapes


@pytest.fixture
def unedited(monkeypatch):
    """The engine is what this process read, also while somebody edits it."""
    monkeypatch.setattr(kept_shapes, "_sources", lambda: kept_shapes._SOURCES)


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
