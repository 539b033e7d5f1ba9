"""The app's session runs here with an engine that only records its calls."""

from __future__ import annotations

import pytest

from app.gradio_stubs import leave_out_stubs
from app.session.session import Session
from tests.support.counted_once import counting_once
from tests.support.sessions import FakeEngine

leave_out_stubs()  # as launch.py does; files of tests import Gradio next


@pytest.fixture(scope="module", autouse=True)
def models_are_counted_once():
    """Counts the activations of a model once for all runs that train it."""
    yield from counting_once()


@pytest.fixture
def engine():
    return FakeEngine()


@pytest.fixture
def session(tmp_path, engine):
    session = Session(tmp_path / "runs", engine.calls())
    yield session
    session.close()
