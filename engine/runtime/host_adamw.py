"""`HostAdamW` applies AdamW to the planes of a `HostStore`, in place, at memory speed.

- The formula, its roundings and where they differ from `torch.optim.AdamW` stand in
  `engine.runtime.host_kernels`, whose kernels do the arithmetic.
- This file computes the scalars of a step: in double precision, each rounded once to fp32.
- Weight decay is decoupled. It applies to the decayed range at the front of each plane.
- Gradients are multiplied by the clip factor as they are read; the gradient plane stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from engine.runtime.host_kernels import kernel
from engine.runtime.host_store import HostStore
from engine.runtime.host_threads import Workers

_SQUARE_BIAS = 2.0**-108
"""This is added to squared gradients, so that exp_avg_sq is never subnormal. Its root is lost in an
eps of 1.9e-9 or more; a smaller eps gets no bias.
"""


@dataclass(frozen=True)
class AdamWSettings:
    """AdamW is run with these hyperparameters. The defaults are torch's."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01


class HostAdamW:
    """A `HostAdamW` updates the units of one store. Its results are those of `torch.optim.AdamW` on
    fp32 masters but for rounding, and they do not depend on `threads` (by default the cores but
    two). The kernels are compiled here, not in the first step.
    """

    def __init__(self, store: HostStore, settings: AdamWSettings, threads: int | None = None):
        self._store = store
        self._beta1 = settings.beta1
        self._beta2 = settings.beta2
        self._weight_decay = settings.weight_decay
        # An eps that is 0 in fp32 would divide 0 by 0 where there is no gradient, which is the case
        # in alignment gaps at least.
        self._eps = max(settings.eps, float(np.finfo(np.float32).tiny))
        # The root of the bias is 2**-54. Below half a unit in the last place of eps it vanishes.
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
        the rate over the first bias correction, the inverse root of the second one, eps, what is
        added to squared gradients, and what decay leaves of a weight.
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
        grad``, and returns when it is done.

        It reads the plane `grad` and changes every other plane of the unit. The interpreter's lock
        is free meanwhile.
        """
        layout = self._store.layouts[unit]
        planes = tuple(self._store.array(unit, plane) for plane in self._planes)
        *others, keep = self.scalars(step, learning_rate)
        scalars = (np.float32(clip_factor), keep, *others)
        self._workers.share(self._kernel, layout.numel, layout.decay_numel, planes, scalars)

    def close(self) -> None:
        """Ends the threads. The planes belong to the store."""
        self._workers.close()
