"""The app's session runs here with an engine that only records its calls."""

from __future__ import annotations

import pytest

from app.session.session import Session
from tests.support.sessions import FakeEngine


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def session(tmp_path, engine):
    session = Session(tmp_path / "runs", engine.calls())
    yield session
    session.close()
