"""A tokenizer for the tests of this folder."""

from __future__ import annotations

import pytest

from tests.support.data_tokenizers import CHATML, byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    """Returns a byte-level tokenizer with a ChatML template."""
    return byte_level_tokenizer(CHATML)
