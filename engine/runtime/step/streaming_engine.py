"""`StreamingEngine` runs one model on one device by one plan: training steps, evaluation, logits.

How it works:

- The weights, moments and gradients of every unit (embedding, blocks, head) are planes in host RAM
  (`engine.runtime.host.host_states`). The device holds buffers of a fixed size
  (`engine.runtime.step.device_state`), whatever the depth of the model.
- A step is a plan (`engine.planning.schedule`): a list of ops with lanes and waits, built once.
  `verify_plan` proves that no op reads a buffer before it is filled or overwrites one that is still
  needed.
- `train_step` uploads the micro-batches and hands the plan to the executor
  (`engine.runtime.step.executor`), which submits every op to the backend. The call returns before
  the updates are applied, so updates run while the next step's forward is computed.
- A loss or norm that is not finite raises an error before any update of its step begins.
- Passes without gradients (evaluation, logits) have plans of their own
  (`engine.runtime.step.inference_passes`). They use the same buffers, so every step must be applied
  before they begin.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from engine.errors import CacheError
from engine.model.build.units import TORCH_DTYPES, StreamedModel
from engine.planning.layout import disk_chunks
from engine.planning.layout.embed_chunks import embed_chunk
from engine.planning.layout.update_buffers import small_chunks
from engine.planning.schedule.build import build_forward_plan, build_step_plan
from engine.planning.schedule.choices import PlaneSizes
from engine.planning.schedule.ops import OpKind
from engine.planning.schedule.schedule import Span, StepPlan
from engine.planning.schedule.verify_plan import verify_plan
from engine.planning.shape.saved_attention_sizes import BoundarySizes, with_room
from engine.runtime.device.backend import Backend
from engine.runtime.device.block_graphs import BlockGraphs
from engine.runtime.device.compiled import functions_try_again, uncompiled_functions
from engine.runtime.device.graph_recorder import Recorder
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.context import OpContext
from engine.runtime.step.device_state import DeviceState, largest_block, update_buffer_of
from engine.runtime.step.engine_settings import AppliedStep, EngineSettings
from engine.runtime.step.executor import Executor
from engine.runtime.step.inference_passes import (
    ForwardPasses,
    LabeledRows,
    LabelScores,
    RecordedPass,
    pass_groups,
    summed,
    sweeps,
)
from engine.runtime.step.per_document import Evaluation, sums_by_document
from engine.runtime.step.pinned_buffers import (
    DiskStateBuffers,
    PinnedSummary,
    SavedBlockInputs,
    gradient_rings,
)
from engine.runtime.step.step import (
    DeviceBatch,
    StepInputs,
    StepShard,
    StepUnderWay,
    loss_weight_of,
    upload_batches,
)
from engine.runtime.step.templates import Templates


class StreamingEngine:
    """Runs `model` on the device of `backend` by streaming its units from `states`. Without
    `optimizer` it only evaluates and samples.
    """

    def __init__(
        self,
        model: StreamedModel,
        states: HostStates,
        backend: Backend,
        settings: EngineSettings,
        optimizer: HostOptimizer | None = None,
    ):
        self.model = model
        self.backend = backend
        self._settings, self.choices = settings, settings.choices
        self.place, self.shards = settings.place, settings.shards
        self._optimizer = optimizer
        self._states = states
        self._blocks = [unit.name for unit in model.blocks]
        self._update_buffer = update_buffer_of(
            states, self.choices.updates.update_chunks, self.shards
        )
        if settings.choices.gradients.gradients_on_gpu:
            self._update_buffer = self._update_buffer.without_gradients
        gpu_resident = settings.choices.placement.gpu_resident(self._blocks)
        if self.shards.ranks > 1 and any(states.layouts[unit].fp32_numel for unit in gpu_resident):
            raise ValueError("units with fp32 weights live on none of several devices")
        states.placement.arrange(
            gpu_resident, backend, settings.choices.placement.disk_offloaded(self._blocks)
        )
        if optimizer is not None:
            self.plan = self._step_plan()
            optimizer.compile_for(self.choices.updates.moments_after_weights)
        else:
            # It has the slots of every pass without gradients; the passes have plans of their own.
            choices = settings.choices.of_forward_passes()
            self.plan = build_forward_plan(self._blocks, model.holds_embed, choices)
        verify_plan(self.plan)
        block_input_numel = settings.tokens * model.hidden_width
        dtype = TORCH_DTYPES[model.dtype]
        block_input_bytes = block_input_numel * dtype.itemsize
        with_attention = with_room(block_input_bytes, self.plan.attention_bytes, settings.tokens)
        sizes = BoundarySizes(block_input_numel, with_attention // dtype.itemsize)
        self.saved_block_inputs = SavedBlockInputs(self.plan, sizes, dtype, backend, states)
        self._gradient_rings = gradient_rings(self.plan, dtype, backend)
        self._state_rings = DiskStateBuffers(self.plan.state_rings, states)
        self.state = DeviceState(
            model,
            self.plan,
            backend.device,
            sizes.with_attention,
            states,
            self._update_buffer,
        )
        self.templates = Templates(model, self.plan, self.state)
        states.ram.register_units(self.plan.device_updated_units)
        # The buffers are zeroed on COMPUTE, and the plan has no wait that orders this before the
        # first prefetch.
        backend.drain()
        self._context = OpContext(
            plan=self.plan,
            model=model,
            host_states=states,
            state=self.state,
            templates=self.templates,
            backend=backend,
            optimizer=optimizer,
            loss_chunk=settings.loss_chunk,
            gradient_rings=self._gradient_rings.tensors,
            state_rings=self._state_rings.buffers,
            collectives=settings.collectives,
            saved_block_inputs=self.saved_block_inputs,
            summary=PinnedSummary(backend, len(model.units)),
        )
        self.passes = ForwardPasses(self._context, self.choices, block_input_bytes)
        self._train = Executor(self._context)
        self._graphs: BlockGraphs | None = None
        if self.plan.graphs:
            self._graphs = BlockGraphs(backend.recorder(), self.plan, model)
        functions_try_again()

    def _step_plan(self, updates: bool = True) -> StepPlan:
        numel = {unit.name: unit.layout.numel for unit in self.model.units}
        largest = max(unit.layout.high_numel for unit in self.model.blocks)
        small = small_chunks(largest_block(self._states))
        sizes = PlaneSizes(
            numel=numel,
            chunk_numel=self._update_buffer.numel,
            ring_numel=update_buffer_of(self._states, small, self.shards).numel,
            buffer_bytes=self._update_buffer.bytes,
            embed_chunk=embed_chunk(self.model.units[0].layout, largest, self.model.holds_embed),
            item_bytes=TORCH_DTYPES[self.model.dtype].itemsize,
            disk_chunk_numel=disk_chunks.DISK_CHUNK_NUMEL,
            frozen=self.model.frozen_units,
            has_fp32_weights=self.model.has_fp32_weights,
            rank=self.shards.rank,
        )
        return build_step_plan(self._blocks, self.model.holds_embed, self.choices, sizes, updates)

    # ------------------------------------------------------------------ training

    def train_step(
        self,
        number: int,
        batches: Sequence,
        learning_rate: float,
        on_applied: Callable[[AppliedStep], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Submits optimizer step `number` (from 1), and returns while it is still running.

        There are as many `batches` as the plans of all ranks have micro-batches. Each has numpy
        arrays `input_ids` and `labels` of the shape [rows, tokens], `position_ids` of that shape or
        None, and `loss_tokens`; it may have `pairs` and `weights`, as `MicroBatch` has.

        `on_applied` is called when the last update is applied. `check` is called often and may
        raise to abort the step: then no part of it is applied, and `drain` must follow.

        A loss or norm that is not finite raises NonFiniteError here, in a later call, or in
        `drain`. Nothing of that step is applied.
        """
        shard = StepShard.of(batches, self.place.shards)
        self.train_shard(number, shard, learning_rate, on_applied, check)

    def train_shard(
        self,
        number: int,
        shard: StepShard,
        learning_rate: float,
        on_applied: Callable[[AppliedStep], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Submits what this rank computes of a step, as `train_step` does.

        With several ranks it returns once the clip factor is known, because ranks that give a step
        up at different ops would wait for each other.
        """
        step = self._training_step(number, shard, learning_rate)
        held = self._states.held

        def finish(done: StepUnderWay, spans: Callable[[], list[Span]]) -> None:
            held.complete(number)
            if on_applied is None:
                return
            result = done.result
            assert result is not None  # the step's last op comes after `clip`
            on_applied(
                AppliedStep(
                    step=number,
                    loss=result.loss,
                    grad_norm=result.grad_norm,
                    learning_rate=learning_rate,
                    spans=_readable(spans),
                    unit_norms=result.unit_norms,
                    sequence_sums=result.sequence_sums,
                )
            )

        self._train.run(step, finish, check)
        if self.plan.is_shared:
            self._train.wait_for(OpKind.CLIP)

    def _training_step(
        self, number: int, shard: StepShard, learning_rate: float = 0.0
    ) -> StepUnderWay:
        self.passes.forget()
        settings = self._settings
        on_device = upload_batches(self.backend.upload, shard.batches, settings.noise(number))
        # Pairs have no dropout, as with TRL.
        self.templates.set_training(all(batch.pairs is None for batch in on_device))
        scalars, keys = None, {}
        updated = [*self.plan.device_updated_units, *(unit for unit, _ in self.plan.gpu_resident)]
        if updated and number:
            assert self._optimizer is not None  # only a training plan updates units on the device
            update = self._states.held.update_number(number)
            scalars = self.backend.upload(self._optimizer.scalars(update, learning_rate))
            keys = {unit: self._optimizer.key(unit, update) for unit in updated}
        # A dry run, which has the number 0, has another plan.
        graphs = self._graphs.of_step(on_device) if self._graphs is not None and number else None
        inputs = StepInputs(
            number=number,
            batches=on_device,
            loss_scale=1.0 / (shard.loss_weight or 1.0),
            learning_rate=learning_rate,
            max_grad_norm=settings.max_grad_norm,
            label_smoothing=settings.regularization.label_smoothing,
            seed=settings.seed,
            first=shard.first,
            first_line=shard.first_line,
            sequences=shard.sequences,
            scalars=scalars,
            keys=keys,
        )
        return StepUnderWay(inputs, graphs=graphs)

    def dry_run(self, batches: Sequence, check: Callable[[], None] | None = None) -> None:
        """Computes forward and backward of a step over `batches`, in the same buffers and with the
        same kernels, but updates nothing. Returns once that is done.

        No bit of the weights, the moments and the states of random generators changes. Gradient
        planes change, but their contents are not needed between two steps. `batches` and `check`
        are as for `train_step`. Every submitted step must have been applied. Raises the same error
        as a training step that does not fit.
        """
        self.dry_run_shard(StepShard.of(batches, self.place.shards), check)

    def dry_run_shard(self, shard: StepShard, check: Callable[[], None] | None = None) -> None:
        """Computes what this rank computes of a step, as `dry_run` does."""
        plan = self._step_plan(updates=False)
        verify_plan(plan)
        executor = Executor(replace(self._context, plan=plan))
        device = self.backend.device
        devices = [device] if device.type != "cpu" else []
        with torch.random.fork_rng(devices, device_type=device.type):
            try:
                executor.run(self._training_step(0, shard), check=check)
            finally:
                self.drain()

    def drain(self) -> None:
        """Waits until every submitted step is applied. Raises the first error of any lane."""
        self._train.drain()

    # ------------------------------------------------------------------ without gradients

    def evaluate(self, batches: Iterable, check: Callable[[], None] | None = None) -> float:
        """Returns the loss of `evaluate_rows` alone."""
        return self.evaluate_rows(batches, check).loss

    def evaluate_rows(
        self, batches: Iterable, check: Callable[[], None] | None = None
    ) -> Evaluation:
        """Returns the mean cross-entropy over the tokens of `batches` that contribute to the loss,
        weighted as the batches say, and the sums of the documents, which are not weighted.

        Dropout is off. The loss of each micro-batch is a float32 sum, and these are added in double
        precision, in order. `check` is called often and may raise to end the evaluation. Every
        submitted step must have been applied.
        """
        total, weight = 0.0, 0.0
        sums, tokens = [np.zeros(0)], [np.zeros(0, dtype=np.int64)]
        with self.on_same_weights():
            for sweep in sweeps(batches):
                losses = self.losses_of(sweep, check)
                total = summed(total, [loss for loss, _ in losses])
                weight += loss_weight_of(sweep)
                of_sweep = sums_by_document(sweep, [each for _, each in losses])
                sums.append(of_sweep[0])
                tokens.append(of_sweep[1])
        return Evaluation(total / (weight or 1.0), np.concatenate(sums), np.concatenate(tokens))

    def losses_of(
        self, batches: Sequence, check: Callable[[], None] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the loss of each micro-batch, a float32 scalar, with the cross-entropies of its
        positions that have a label, float32 [n], without their weights. `batches` are as for
        `train_step`; `check` is as for `evaluate_rows`.
        """
        if not batches:
            return []
        inputs = StepInputs(
            number=0,
            batches=upload_batches(self.backend.upload, batches),
            loss_scale=1.0,
            training=False,
        )
        step = StepUnderWay(inputs)
        self.passes.run(step, check)
        return [(each.loss, each.position_losses) for each in step.micro_batches]

    def on_same_weights(self) -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which no weights change, except by training steps. Passes without
        gradients fetch units that have their own slot once in it.
        """
        return self.passes.on_same_weights()

    def scores(
        self, batches: Iterable[LabeledRows], check: Callable[[], None] | None = None
    ) -> Iterator[LabelScores]:
        """Yields how likely the labels of each micro-batch are. The logits are those of `evaluate`,
        uncompiled. Every submitted step must have been applied.
        """
        with self.on_same_weights():
            yield from self.passes.scores(batches, check)

    def last_logits(self, rows: Sequence[Sequence[int]], pad_token: int = 0) -> torch.Tensor:
        """Returns logits [rows, vocabulary] in float32, on the host, after the last token of each
        row. Rows of similar length share a micro-batch. They are padded on the right, which causal
        attention never reads.
        """
        groups = pass_groups(rows)
        padded, last = [], []
        for group in groups:
            longest = len(rows[group[-1]])
            ids = np.full((len(group), longest), pad_token, dtype=np.int64)
            for place, row in enumerate(group):
                ids[place, : len(rows[row])] = rows[row]
            padded.append(ids)
            ends = [place * longest + len(rows[row]) - 1 for place, row in enumerate(group)]
            last.append(np.array(ends, dtype=np.int64))
        order = [row for group in groups for row in group]
        return self._logits(padded, last)[torch.from_numpy(np.argsort(order))]

    def cached_logits(self, groups: Sequence[np.ndarray], caches: list[Any]) -> torch.Tensor:
        """Returns logits [all rows, vocabulary] as `last_logits` does, for the rows of all groups
        in order, in one pass over the weights.

        Each group, int64 [rows, tokens], continues what its cache holds. An entry of `caches` that
        is None is replaced by a new cache. The rows of a group have the same length, also before
        these tokens, so no row is padded and each row gets the same logits as alone. Raises
        CacheError where the model cannot use a cache; the caches must then be discarded.
        """
        last = [np.arange(1, len(ids) + 1) * ids.shape[1] - 1 for ids in groups]
        return self._logits(groups, last, caches)

    def _logits(
        self,
        groups: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
        caches: list[Any] | None = None,
    ) -> torch.Tensor:
        """Returns the logits [all positions, vocabulary] at flat positions of each group, on the
        host.
        """
        return torch.cat(self.device_logits(groups, positions, caches)).cpu()

    def device_logits(
        self,
        groups: Sequence[np.ndarray],
        positions: Sequence[np.ndarray],
        caches: list[Any] | None = None,
    ) -> list[torch.Tensor]:
        """Returns the logits [positions, vocabulary] in float32 at flat positions of each group of
        token ids, int64 [rows, tokens], on the device. `caches` are as for `cached_logits`.
        """
        upload = self.backend.upload
        nothing = upload(np.zeros(0, dtype=np.int64))
        batches = [DeviceBatch(upload(_int64(ids)), None, nothing, nothing) for ids in groups]
        step = self._sampling_step(batches, [upload(_int64(each)) for each in positions], caches)
        return self._run_sampling(step)

    def next_logits(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
        """Returns the logits [rows, vocabulary] in float32, on the device, after one more token of
        each row of a `cache`.

        ids, positions: the token and its position in its row, int64 [rows], on the device. Raises
        CacheError where the model cannot use the cache, which must then be discarded.
        """
        (logits,) = self._run_sampling(self._next_step(ids, positions, cache))
        return logits

    def record_next(
        self,
        recorder: Recorder,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cache: Any,
        then: Callable[[torch.Tensor], None],
    ) -> RecordedPass | None:
        """Records a pass of `next_logits` and what `then` does with the logits [rows, vocabulary],
        and runs neither. ids, positions: int64 [rows], which each replay reads.
        `next_logits` must have run in the same way before. Returns None where weights are fetched
        in each pass.
        """
        return self.passes.record(self._next_step(ids, positions, cache), recorder, then)

    def _next_step(self, ids: torch.Tensor, positions: torch.Tensor, cache: Any) -> StepUnderWay:
        rows = torch.arange(ids.shape[0], device=ids.device)
        batch = DeviceBatch(ids[:, None], positions[:, None], rows[:0], rows[:0])
        return self._sampling_step([batch], [rows], [cache])

    def _sampling_step(
        self, batches: list[DeviceBatch], logits_at: list[torch.Tensor], caches: list[Any] | None
    ) -> StepUnderWay:
        return StepUnderWay(
            StepInputs(
                number=0,
                batches=batches,
                loss_scale=1.0,
                training=False,
                caches=caches,
                logits_at=logits_at,
            )
        )

    def _run_sampling(self, step: StepUnderWay) -> list[torch.Tensor]:
        """Runs a pass of sampling, and returns the logits of each micro-batch."""
        self.passes.run(step)
        if step.failure is not None:
            raise CacheError(step.failure)
        return [each.logits for each in step.micro_batches]

    @property
    def uncompiled(self) -> list[tuple[str, str]]:
        """What runs uncompiled although the plan compiles it: what it is in words, and why."""
        if not self.choices.kernels.compiled:
            return []
        _, problems = self.templates.compiling
        return [("A block", problem) for problem in problems] + uncompiled_functions()

    @property
    def unrecorded(self) -> str:
        """Why blocks are not replayed as CUDA graphs although the plan says so, or ""."""
        return self._graphs.problem if self._graphs is not None else ""

    @property
    def block_input_bytes(self) -> int:
        """Bytes of block inputs on the host, those on their way to the disk included."""
        return self.saved_block_inputs.nbytes

    @property
    def refused_bytes(self) -> int:
        """Bytes of host memory that the system refused to register for transfers."""
        rings = self._gradient_rings
        refused = self.saved_block_inputs.refused_bytes + (rings.nbytes if rings.is_refused else 0)
        return self._states.ram.refused_bytes + refused

    def close(self) -> None:
        """Frees the memory of the block inputs, and lets go of the model. The device's buffers are
        freed with this object. Host states, optimizer and backend belong to the caller.
        """
        if self._graphs is not None:
            self._graphs.close()
        self.saved_block_inputs.close()
        self._gradient_rings.close()
        self._state_rings.close()
        self.templates.close()


def _readable(spans: Callable[[], list[Span]]) -> list[Span]:
    """Returns the spans of a step that is applied, or none if the device no longer tells them.

    A step whose updates ran on the host is applied although the device was lost. The error of the
    device is raised by `drain`.
    """
    try:
        return spans()
    except RuntimeError:
        return []


def _int64(array: Any) -> np.ndarray:
    return np.ascontiguousarray(array, dtype=np.int64)
