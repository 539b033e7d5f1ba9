"""The maps of moments in 8 bits are the published ones, on every processor, and codes are those of
the nearest number.
"""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.runtime.optimizer.moment_codes import moment_map

DIGESTS = {
    True: "035c4114538df2a03bbcb4d8a39b9325d26d84a00cf6cf29018d1a6608ab14c4",
    False: "02a9b523750e21348029626da435f2adadb851b687d86349cd20752f9255de26",
}
"""A checkpoint in 8 bits is read by the numbers with these digests (SHA-256). With other numbers,
checkpoints of earlier versions would be read wrong.
"""


def published(signed: bool) -> np.ndarray:
    """The map of bitsandbytes 0.50.2, `create_dynamic_map(signed, max_exponent_bits=7, n=8)`,
    written down from its source: for each exponent, the means of neighboring fractions.
    """
    data: list[float] = []
    for exponent in range(7):
        fractions = 2**exponent + 1 if signed else 2 ** (exponent + 1) + 1
        edges = torch.linspace(0.1, 1, fractions, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2.0
        data += ((10 ** (exponent - 6)) * means).tolist()
        if signed:
            data += (-(10 ** (exponent - 6)) * means).tolist()
    return np.array(sorted([*data, 0.0, 1.0]), np.float32)


@pytest.mark.parametrize("signed", [True, False])
def test_the_maps_are_the_published_ones(signed):
    """Their last bits depend on the processor, ours do not."""
    ours, theirs = moment_map(signed).values, published(signed)
    assert ours.dtype == np.float32 and ours.shape == theirs.shape == (256,)
    assert np.abs(ours.view(np.int32) - theirs.view(np.int32)).max() <= 2
    assert (np.diff(ours) > 0).all() and ours[-1] == 1
    assert list(np.flatnonzero(ours == 0)) == [127 if signed else 0]
    assert hashlib.sha256(ours.tobytes()).hexdigest() == DIGESTS[signed]


def test_a_few_numbers_as_the_paper_has_them():
    """The highest decade of the map without signs has 128 numbers, the lowest two."""
    second = moment_map(signed=False).values
    assert second[1:3] == pytest.approx([0.325e-6, 0.775e-6], rel=1e-6)
    assert second[-2] == pytest.approx(1 - 0.9 / 256, rel=1e-6)
    first = moment_map(signed=True).values
    assert first[[126, 128]] == pytest.approx([-0.55e-6, 0.55e-6], rel=1e-6)
    assert first[0] == -first[-2] == pytest.approx(-(1 - 0.9 / 128), rel=1e-6)


@given(st.floats(-1, 1, width=32), st.booleans())
def test_a_code_is_that_of_the_nearest_number(value, signed):
    map_ = moment_map(signed)
    value = np.float32(value if signed else abs(value))
    (code,) = map_.codes(np.array([value]))
    away = np.abs(map_.values.astype(np.float64) - np.float64(value))
    # A boundary is rounded to fp32, so two numbers may be equally near but for this rounding.
    assert away[code] <= away.min() + 2.0**-25 * np.abs(value)
