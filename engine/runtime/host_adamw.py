"""`HostAdamW`: AdamW on the planes of a `HostStore`, in place, at memory speed."""

from __future__ import annotations

import math

import numpy as np

from engine.runtime.host_kernels import Workers, kernel
from engine.runtime.host_store import HostStore

_SQUARE_BIAS = 2.0**-108
"""Added to squared gradients, so that exp_avg_sq is never subnormal. Its root is lost in an eps of
1.9e-9 or more; a smaller eps gets none.
"""


class HostAdamW:
    """Equal to `torch.optim.AdamW` on fp32 masters with decoupled weight decay on each plane's
    decayed range. Results do not depend on `threads` (default: the cores but two). Kernels are
    compiled here, not in the first step.
    """

    def __init__(
        self,
        store: HostStore,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        threads: int | None = None,
    ):
        self._store = store
        self._beta1, self._beta2, self._weight_decay = beta1, beta2, weight_decay
        # An eps that is 0 in fp32 would divide 0 by 0 where there is no gradient, in alignment gaps
        # at least.
        self._eps = max(eps, float(np.finfo(np.float32).tiny))
        self._bias = _SQUARE_BIAS if eps >= math.sqrt(_SQUARE_BIAS) * 2.0**25 else 0.0
        split = store.dtype == "bfloat16"
        self._kernel = kernel("adamw_split" if split else "adamw_float")
        self._planes = (
            "grad",
            "weight_high",
            *(("weight_low",) if split else ()),
            "exp_avg",
            "exp_avg_sq",
        )
        self._workers = Workers(threads, "adamw")

    def scalars(self, step: int, learning_rate: float) -> np.ndarray:
        """float32 [8] of step `step` (from 1): 1 - beta1, beta2, 1 - beta2, the rate over the first
        bias correction, the root of the second's inverse, eps, what is added to squared gradients,
        and what decay leaves of a weight.
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
        """Apply step number `step` (from 1) to one unit with gradients ``clip_factor * grad``;
        returns when done. Reads ``grad``, changes every other plane of the unit. The GIL is free
        meanwhile.
        """
        layout = self._store.layouts[unit]
        planes = [self._store.array(unit, plane) for plane in self._planes]
        *scalars, keep = self.scalars(step, learning_rate)
        clip = np.float32(clip_factor)
        self._workers.share(
            self._kernel, layout.numel, layout.decay_numel, *planes, clip, keep, *scalars
        )

    def close(self) -> None:
        """Ends the threads; the planes are the store's."""
        self._workers.close()
