"""AdamW with moments in 8 bits beside that of bitsandbytes on the CPU (`pip install bitsandbytes`;
without it these tests are skipped). tests/gpu/test_bitsandbytes.py has its kernel for CUDA.

Where version 0.50.2 differs from ours on the CPU:

- It finds codes in a table of 65,536 equal intervals between -1 and 1. So a moment may get the code
  of any value that differs by 2**-15 of the largest magnitude of its block, and moments below that
  share one code. Ours is that of the nearest number.
- A second moment of ours never gets the code of 0.
- The last bits of its maps, and the order of its sums and products.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.blockwise import (
    RATE,
    SIZES,
    Ours,
    Theirs,
    apart,
    assert_near,
    differing,
    exact_step,
    gradient,
    wrong_codes,
)

INTERVAL = 2.0**-15


@pytest.fixture(autouse=True)
def installed():
    pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize("numel", SIZES)
def test_each_step_from_the_same_state_leaves_the_same_state(numel):
    theirs, ours = Theirs(numel, "cpu"), Ours(numel)
    for step in range(1, 21):
        before, grad = theirs.kept(), gradient(numel, step)
        ours.start_from(before)
        theirs.step(grad, step)
        ours.step(grad, step)
        exact, mine, other = exact_step(before, grad, step), ours.kept(), theirs.kept()
        for kept in (mine, other):
            assert_near(kept, exact)
        np.testing.assert_allclose(mine.weights, other.weights, rtol=1e-5, atol=1e-3 * RATE)
        for moment in (0, 1):
            assert not wrong_codes(mine, exact, moment, above_zero=moment == 1).any()
            assert not wrong_codes(other, exact, moment, coarse=INTERVAL).any()
            if numel == SIZES[1] and step > 1:  # the first blocks, which are special, are few
                assert differing(mine, other, moment) < 0.02
    ours.close()


@pytest.mark.parametrize("numel", SIZES)
def test_twenty_steps_of_both_stay_together(numel):
    """A number of the map is up to 0.014 of the largest magnitude from the next one, or half as
    much without signs. Moments that round apart once are not drawn together again at once.
    """
    theirs, ours = Theirs(numel, "cpu"), Ours(numel)
    start = theirs.kept()
    ours.start_from(start)
    for step in range(1, 21):
        grad = gradient(numel, step)
        theirs.step(grad, step)
        ours.step(grad, step)
        for moment in (0, 1):
            away = apart(ours.kept(), theirs.kept(), moment)
            assert away.max() < 0.05 and away.mean() < 1e-3, (step, moment)
    mine, other = ours.kept(), theirs.kept()
    away = np.linalg.norm(mine.weights - other.weights)
    assert away < 0.05 * np.linalg.norm(mine.weights - start.weights)
    ours.close()
