"""`HostAdamW` applies AdamW to the planes of a `HostStore`, in place, at memory speed.

- The formula, its rounding and the differences from `torch.optim.AdamW` are described in
  `engine.runtime.host_kernels`, whose kernels do the arithmetic.
- This file computes the scalars of a step in double precision and rounds each to fp32 once.
- Weight decay is decoupled. It applies to the decayed range at the front of each plane.
- Gradients are multiplied by the clip factor as they are read; the gradient plane is not changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.runtime.host_kernels import kernel
from engine.runtime.host_store import HostStore
from engine.runtime.host_threads import Workers

_SQUARE_BIAS = 2.0**-108
"""This is added to squared gradients, so that exp_avg_sq is never subnormal. When its root is added
to an eps of at least 1.9e-9, the root rounds away. For a smaller eps no bias is used.
"""


@dataclass(frozen=True)
class AdamWSettings:
    """These are the hyperparameters of AdamW. The defaults are torch's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class HostAdamW:
    """A `HostAdamW` updates the units of one store. Its results are those of `torch.optim.AdamW` on
    fp32 masters except for rounding. They do not depend on `threads` (by default all cores but
    two). The kernels are compiled by the constructor, not in the first step.
    """

    def __init__(self, store: HostStore, settings: AdamWSettings, threads: int | None = None):
        self._store = store
        self._beta1 = settings.beta1
        self._beta2 = settings.beta2
        self._weight_decay = settings.weight_decay
        # With an eps that is 0 in fp32, 0 would be divided by 0 wherever the gradient has always
        # been 0, which is at least the case in alignment gaps.
        self._eps = max(settings.eps, float(np.finfo(np.float32).tiny))
        # The root of the bias is 2**-54. It rounds away if it is below half a unit in the last
        # place of eps.
        bias_vanishes = settings.eps >= math.sqrt(_SQUARE_BIAS) * 2.0**25
        self._bias = _SQUARE_BIAS if bias_vanishes else 0.0
        if store.dtype == "bfloat16":
            self._kernel = kernel("adamw_split")
            self._planes = ["grad", "weight_high", "weight_low", "exp_avg", "exp_avg_sq"]
        else:
            self._kernel = kernel("adamw_float")
            self._planes = ["grad", "weight_high", "exp_avg", "exp_avg_sq"]
        self._workers = Workers(threads, "adamw")

    def scalars(self, step: int, learning_rate: float) -> np.ndarray:
        """Returns the scalars of step `step` (from 1), float32 [8]: 1 - beta1, beta2, 1 - beta2,
        the rate over the first bias correction, the inverse root of the second one, eps, the bias
        for squared gradients, and the factor by which decay scales a weight.
        """
        return np.array(
            [
                1.0 - self._beta1,
                self._beta2,
                1.0 - self._beta2,
                learning_rate / (1.0 - self._beta1**step),
                1.0 / math.sqrt(1.0 - self._beta2**step),
                self._eps,
                self._bias,
                1.0 - learning_rate * self._weight_decay,
            ],
            dtype=np.float32,
        )

    def update(self, unit: str, step: int, learning_rate: float, clip_factor: float) -> None:
        """Applies step number `step` (from 1) to one unit with the gradients ``clip_factor *
        grad``. Returns once the update is complete.

        It reads the plane `grad` and changes every other plane of the unit. The interpreter's lock
        is released during the update.
        """
        layout = self._store.layouts[unit]
        planes = tuple(self._store.array(unit, plane) for plane in self._planes)
        *others, keep = self.scalars(step, learning_rate)
        scalars = (np.float32(clip_factor), keep, *others)
        self._workers.share(self._kernel, layout.numel, layout.decay_numel, planes, scalars)

    def close(self) -> None:
        """Ends the threads. The planes stay with the store."""
        self._workers.close()
