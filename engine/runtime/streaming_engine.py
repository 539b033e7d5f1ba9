"""`StreamingEngine`: one model, its host planes and one plan on one device. Training steps,
evaluation, logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.attention import Documents
from engine.model.layout import PLANE_ITEM_BYTES
from engine.model.units import TORCH_DTYPES, StreamedModel
from engine.plan.build_step import build_forward_plan, build_step_plan
from engine.plan.choices import PlanChoices
from engine.plan.ops import Span, StepPlan
from engine.plan.validate import validate
from engine.runtime.backend import Backend
from engine.runtime.block_ops import BlockOps
from engine.runtime.boundaries import HostBoundaries
from engine.runtime.device_state import DeviceState
from engine.runtime.executor import Executor
from engine.runtime.host_adamw import HostAdamW
from engine.runtime.host_store import HostStore
from engine.runtime.step import DeviceBatch, StepInputs, StepUnderWay


@dataclass(frozen=True)
class AppliedStep:
    """What a step came to once its last update was applied."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    spans: list[Span]
    unit_norms: list[float]
    """Of each unit's gradient, in the order of the model's units."""


class StreamingEngine:
    """Streams units of `model` from `store` through `backend`'s device, as `choices` say.

    `tokens`: positions of the largest micro-batch (rows x length), for buffers of host boundaries.
    `adamw` None makes an engine that only evaluates and samples. `loss_chunk`: positions whose
    logits exist at once.
    """

    def __init__(
        self,
        model: StreamedModel,
        store: HostStore,
        backend: Backend,
        choices: PlanChoices,
        tokens: int,
        adamw: HostAdamW | None = None,
        loss_chunk: int = 1024,
        max_grad_norm: float | None = 1.0,
        seed: int = 0,
    ):
        self.model, self.store, self.backend, self.choices = model, store, backend, choices
        self.loss_chunk, self.max_grad_norm, self.seed = loss_chunk, max_grad_norm, seed
        self._adamw = adamw
        self._blocks = [unit.name for unit in model.blocks]
        self.plan = self._step_plan() if adamw is not None else self._forward_plan(1)
        validate(self.plan)
        width = model.config.get_text_config().hidden_size
        self._boundaries = HostBoundaries(
            self.plan, tokens * width, TORCH_DTYPES[model.dtype], backend
        )
        self.state = DeviceState(model, self.plan, backend.device, tokens * width)
        store.register_states(self.plan.device_homes)
        # The buffers are zeroed on COMPUTE, and no wait of a plan orders that before the first
        # prefetch.
        backend.drain()
        self._executors: dict[int, Executor] = {}
        self._train = self._executor(self.plan)

    def _step_plan(self, updates: bool = True) -> StepPlan:
        return build_step_plan(
            self._blocks,
            self.model.tied,
            self.choices,
            {unit.name: unit.layout.numel for unit in self.model.units},
            sum(PLANE_ITEM_BYTES[self.model.dtype].values()),
            updates,
        )

    def _forward_plan(self, micro_batches: int) -> StepPlan:
        c = self.choices
        return build_forward_plan(
            self._blocks,
            self.model.tied,
            micro_batches,
            c.slots,
            c.prefetch_depth,
            c.resident_blocks,
        )

    def _executor(self, plan: StepPlan) -> Executor:
        ops = BlockOps(
            self.model,
            plan,
            self.store,
            self.state,
            self.backend,
            self._adamw,
            self.loss_chunk,
            self._boundaries.tensors,
        )
        return Executor(plan, ops, self.backend)

    # ------------------------------------------------------------------ training

    def train_step(
        self,
        number: int,
        batches: Sequence,
        learning_rate: float,
        on_applied: Callable[[AppliedStep], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Submit optimizer step `number` (from 1). `batches`: as many micro-batches as the plan
        has, each with numpy `input_ids`, `labels` [rows, tokens], `position_ids` or None, and
        `loss_tokens`.

        Returns once submitted; `on_applied` is called when the last update is applied. `check` is
        called often and may raise to give the step up: nothing of it is applied then, and `drain`
        must follow. A non-finite loss or norm raises NonFiniteError here, in a later call, or in
        `drain`, and applies nothing of that step.
        """
        step = self._training_step(number, batches, learning_rate)
        finish = None
        if on_applied is not None:

            def finish(done: StepUnderWay, spans: list[Span]) -> None:
                result = done.result
                on_applied(
                    AppliedStep(
                        number,
                        result.loss,
                        result.grad_norm,
                        learning_rate,
                        spans,
                        result.unit_norms,
                    )
                )

        self._train.run(step, finish, check)

    def _training_step(
        self, number: int, batches: Sequence, learning_rate: float = 0.0
    ) -> StepUnderWay:
        self.state.set_training(True)
        loss_tokens = sum(int(b.loss_tokens) for b in batches)
        on_device, scalars = self._upload(batches), None
        if self.plan.device_homes and number:
            scalars = self.backend.upload(self._adamw.scalars(number, learning_rate))
        return StepUnderWay(
            StepInputs(
                number=number,
                batches=on_device,
                loss_scale=1.0 / max(1, loss_tokens),
                learning_rate=learning_rate,
                max_grad_norm=self.max_grad_norm,
                seed=self.seed,
                scalars=scalars,
            )
        )

    def dry_run(self, batches: Sequence, check: Callable[[], None] | None = None) -> None:
        """Forward and backward of a step over `batches`, in the same buffers and with the same
        kernels, and nothing more: weights, moments and the generators of random numbers stay as
        they are, to the bit; what gradient planes hold between two steps is of no use to anyone.
        `batches` and `check` as for `train_step`. Everything must be applied; returns once it is
        done. Raises what a step raises that does not fit.
        """
        plan = self._step_plan(updates=False)
        validate(plan)
        device = self.backend.device
        with torch.random.fork_rng(
            [device] if device.type != "cpu" else [], device_type=device.type
        ):
            try:
                self._executor(plan).run(self._training_step(0, batches), check=check)
            finally:
                self.drain()

    def drain(self) -> None:
        """Return when every submitted step is applied."""
        try:
            self._train.drain()
        finally:
            self.state.reclaim()

    def _upload(self, batches: Sequence) -> list[DeviceBatch]:
        """In one copy: each may have to wait for others on the bus, and the first op waits for all
        of them.
        """
        arrays, counts = [], []
        for batch in batches:
            labels = np.ascontiguousarray(batch.labels).reshape(-1)
            index = np.flatnonzero(labels >= 0)
            own = [
                batch.input_ids,
                index,
                labels[index],
                *([] if batch.position_ids is None else [batch.position_ids]),
            ]
            arrays += [_int64(array).reshape(-1) for array in own]
            counts.append([array.size for array in own])
        parts = iter(
            self.backend.upload(np.concatenate(arrays)).split(
                [size for own in counts for size in own]
            )
        )
        found, upload = [], self.backend.upload
        for batch in batches:
            shape = batch.input_ids.shape
            ids, index, labels = next(parts).view(shape), next(parts), next(parts)
            if batch.position_ids is None:
                positions, documents = None, Documents.whole_rows(*shape, upload)
            else:
                positions, documents = (
                    next(parts).view(shape),
                    Documents.of(batch.position_ids, upload),
                )
            found.append(DeviceBatch(ids, positions, index, labels, documents))
        return found

    # ------------------------------------------------------------------ without gradients (everythi

    def evaluate(self, batches: Iterable) -> float:
        """Mean cross-entropy over the tokens of `batches` that carry loss; dropout is off."""
        total, count = 0.0, 0
        for batch in batches:
            step = StepInputs(
                number=0, batches=self._upload([batch]), loss_scale=1.0, training=False
            )
            executor = self._run_forward(StepUnderWay(step))
            total += float(executor.ops.state.norms[-1])
            count += int(batch.loss_tokens)
        return total / max(1, count)

    def last_logits(self, rows: Sequence[Sequence[int]], pad_token: int = 0) -> torch.Tensor:
        """Logits [rows, vocabulary] in float32, on the host, after the last token of each row. Rows
        are padded on the right, where causal attention never looks.
        """
        longest = max(len(row) for row in rows)
        ids = np.full((len(rows), longest), pad_token, dtype=np.int64)
        for k, row in enumerate(rows):
            ids[k, : len(row)] = row
        at = np.array([k * longest + len(row) - 1 for k, row in enumerate(rows)], dtype=np.int64)
        return self._logits([ids], [at])

    def cached_logits(self, groups: Sequence[np.ndarray], caches: list[Any]) -> torch.Tensor:
        """Logits as `last_logits` gives them, for all rows of all groups in order, in one pass over
        the weights.

        Each group, int64 [rows, tokens], continues what its cache holds; a cache that is None is
        made and put into `caches`. Rows of a group have one length, also before these tokens, so no
        row is padded and each gives what it gives alone. Raises CacheError where the model cannot
        do it; the caches are of no use then.
        """
        at = [np.arange(1, len(ids) + 1) * ids.shape[1] - 1 for ids in groups]
        return self._logits(groups, at, caches)

    def _logits(
        self,
        groups: Sequence[np.ndarray],
        at: Sequence[np.ndarray],
        caches: list[Any] | None = None,
    ) -> torch.Tensor:
        nothing = self.backend.upload(np.zeros(0, dtype=np.int64))
        batches = [
            DeviceBatch(self.backend.upload(_int64(ids)), None, nothing, nothing) for ids in groups
        ]
        step = StepUnderWay(
            StepInputs(
                number=0,
                batches=batches,
                loss_scale=1.0,
                training=False,
                caches=caches,
                logits_at=[self.backend.upload(_int64(positions)) for positions in at],
            )
        )
        self._run_forward(step)
        if step.failure is not None:
            raise CacheError(f"Sampling with a cache failed ({step.failure}).")
        return torch.cat([step.logits[k] for k in range(len(batches))]).cpu()

    def _run_forward(self, step: StepUnderWay) -> Executor:
        """Slots are shared with training, so nothing of a training step may be under way."""
        count = len(step.inputs.batches)
        executor = self._executors.get(count)
        if executor is None:
            executor = self._executors[count] = self._executor(self._forward_plan(count))
        self.state.set_training(False)
        executor.run(step)
        executor.drain()
        return executor

    @property
    def boundary_bytes(self) -> int:
        """Host bytes of boundaries kept on the host."""
        return self._boundaries.nbytes

    def close(self) -> None:
        """Give boundary memory back; store, optimizer and backend belong to the caller."""
        self._boundaries.close()


def _int64(array) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int64)
