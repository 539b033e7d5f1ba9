"""The trial of a GPU in a helper process, as `launch.py doctor` makes it."""

from __future__ import annotations

import pytest

from engine.machine.readings import CudaTrial
from engine.runtime.device.cuda_trial import LOCK_BYTES, try_cuda

pytestmark = pytest.mark.gpu


def test_a_gpu_that_works_is_used_and_ram_is_locked_for_it():
    assert try_cuda() == CudaTrial("", LOCK_BYTES, LOCK_BYTES)
