"""A model for a hub."""

from __future__ import annotations

import pytest

from tests.support.folders import make_model
from tests.support.streamed_weights import poured  # noqa: F401  a fixture


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Returns the folder of a model with some megabytes of weights, so that a download can be ended
    in the middle of them.
    """
    folder = tmp_path_factory.mktemp("wide") / "model"
    return make_model(folder, hidden_size=256, intermediate_size=512)
