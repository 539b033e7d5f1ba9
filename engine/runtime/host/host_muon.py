"""`HostMuon` applies Muon to the matrices of blocks, and AdamW to everything else, in the planes of
a `HostStates`, in place. `engine.runtime.optimizer.muon` has the formula, and
`engine.runtime.optimizer.muon_kernels` multiplies the matrices, which takes most of the time.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.config.optimizers import OptimizerSettings
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_optimizer import GradientChunk, HostStep
from engine.runtime.host.host_states import HostStates
from engine.runtime.optimizer import muon
from engine.runtime.optimizer.device_adamw import StepFactors
from engine.runtime.optimizer.host_threads import ranges
from engine.runtime.optimizer.muon import (
    COEFFICIENTS,
    ITERATIONS,
    LEAST_NORM,
    MatrixPlanes,
    adamw_ranges,
    matrices_of,
    update_matrix,
)
from engine.runtime.optimizer.muon_kernels import KERNELS, TILE, muon_kernel


class HostMuon(HostAdamW):
    """Updates the units of one `HostStates`. Its results are those of `torch.optim.Muon` and of
    `torch.optim.AdamW` on fp32 masters except for rounding, whatever the number of threads.
    """

    def __init__(self, states: HostStates, settings: OptimizerSettings, threads: int | None = None):
        super().__init__(states, settings, threads)
        for name in KERNELS:
            muon_kernel(name)  # compiled here, not in the first step

    def scalars(self, step: int, learning_rate: float) -> np.ndarray:
        """Returns the scalars of AdamW, followed by the learning rate, float32 [9]."""
        return np.append(super().scalars(step, learning_rate), np.float32(learning_rate))

    def update(self, unit: str, step: HostStep, chunk: GradientChunk | None = None) -> None:
        layout = self._states.layouts[unit]
        matrices = list(matrices_of(layout))
        if not matrices:
            super().update(unit, step, chunk)
            return
        if chunk is not None and (chunk.start, chunk.grad.size) != (0, layout.numel):
            raise ValueError(f"a chunk of {unit} may cut a matrix in two")
        whole = self._whole(unit, chunk)
        scalars = self._with_clip(step)
        first, second = (moment.view(np.float32) for moment in whole.moments)
        for range_ in adamw_ranges(layout):
            start, stop, place = range_.start, range_.stop, range_.place // 4
            moments = [first[start:stop], second[place : place + stop - start]]
            self._run_fp32(self._kernel, whole.between(start, stop), moments, scalars)
        grad = torch.from_numpy(whole.gradient)
        if self._states.dtype == "bfloat16":
            grad = grad.view(torch.bfloat16)
        weights = [self._states.tensor(unit, plane) for plane in self._weights]
        factors = StepFactors(
            torch.tensor([step.clip_factor, 1.0]),
            torch.from_numpy(self.scalars(step.number, step.learning_rate)),
        )
        for matrix in matrices:
            inside = slice(matrix.start, matrix.stop)
            momentum = torch.from_numpy(first[inside])
            planes = MatrixPlanes(grad[inside], [plane[inside] for plane in weights], momentum)
            update_matrix(planes, matrix, factors, self._orthogonalized)

    def _orthogonalized(self, matrix: torch.Tensor) -> torch.Tensor:
        """Returns the matrix with singular values near 1, by products on the threads of the
        host.
        """
        a, b, c = (np.float32(each) for each in COEFFICIENTS)
        exact = torch.float32 == muon.PRODUCTS
        is_wide = matrix.shape[0] < matrix.shape[1]
        tall = np.ascontiguousarray((matrix.T if is_wide else matrix).float().numpy())
        # By rows, so that no square of the whole matrix is kept.
        squares = sum(float(np.sum(np.square(row), dtype=np.float64)) for row in tall)
        norm = torch.tensor(math.sqrt(squares)).to(muon.PRODUCTS).clamp(min=LEAST_NORM).item()
        side = tall.shape[1]
        gram, factor = (np.empty((side, side), np.float32) for _ in range(2))
        rows, columns = ranges(0, tall.shape[0], TILE), ranges(0, side, TILE)
        run = self._workers.run
        run(muon_kernel("divide"), [(tall, np.float32(norm), exact, *bounds) for bounds in rows])
        for _ in range(ITERATIONS):
            run(muon_kernel("gram"), [(tall, gram, exact, *bounds) for bounds in columns])
            run(muon_kernel("factor"), [(gram, factor, (b, c), exact, *each) for each in columns])
            run(muon_kernel("times"), [(tall, factor, a, exact, *bounds) for bounds in rows])
        found = torch.from_numpy(tall).to(muon.PRODUCTS)
        return found.T if is_wide else found
