"""`ForwardPasses` runs passes without gradients: evaluation and sampling.

- A pass is one sweep over the units for many micro-batches. Each unit is fetched once for as many
  of them as fit on the device together. Such a group is a round of the plan.
- A plan is built and proved for each number of micro-batches and of groups.
- Within `on_same_weights`, a pass leaves the units that have their own slot there for the next.
- The passes use the slots of training, so every step must be applied before they begin.
- Where planes are divided among nodes, no node has whole weights. Then all ranks run a pass
  together, and gather the units in the same order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from engine.model.blocks.block_inputs import tensors_in
from engine.planning.fit.sampling_memory import PASS_TOKENS
from engine.planning.schedule.buffers import EMBED
from engine.planning.schedule.build import build_forward_plan
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.ops import Embed, Lane
from engine.planning.schedule.prefetch_slots import slot_of
from engine.planning.schedule.schedule import StepPlan
from engine.planning.schedule.verify_plan import verify_plan
from engine.runtime.device.graph_recorder import Recorder, Recording
from engine.runtime.step.context import OpContext
from engine.runtime.step.copy_ops import WORK
from engine.runtime.step.executor import Executor
from engine.runtime.step.step import DeviceBatch, StepInputs, StepUnderWay

SWEEP_MICRO_BATCHES = 128
"""An evaluation takes this many micro-batches in one sweep at most. A plan of more of them would
take more memory and save next to nothing.
"""
SWEEP_TOKENS = 1 << 19
"""Most positions of the micro-batches of one sweep of an evaluation, since they are copied to the
device before it begins.
"""
Accompanied: TypeAlias = Callable[[int], contextlib.AbstractContextManager[None]]
"""Makes the other ranks take part in a pass of a number of groups."""
_PLANS_KEPT = 16
"""Number of plans that are kept for later passes: those that were used last."""


class RecordedPass:
    """A recorded pass, with the inputs that each replay reads."""

    def __init__(self, recording: Recording, inputs: StepInputs):
        self._recording = recording
        self._inputs = inputs

    def replay(self) -> None:
        """Runs the pass on the current stream, and does not wait for it."""
        self._recording.replay()


@dataclass(frozen=True)
class LabeledRows:
    """A micro-batch of rows, some of whose positions have labels to score."""

    input_ids: np.ndarray
    """Token ids, int64 [rows, tokens], padded on the right."""
    positions: np.ndarray
    """Flat positions with a label, int64 [n]; a position with several is in it as often."""
    labels: np.ndarray
    """The tokens that are scored as the next ones at `positions` are int64 [n]."""


@dataclass(frozen=True)
class LabelScores:
    """Likelihood of each label of a micro-batch."""

    sequence_logps: np.ndarray
    """Natural logarithms, float32 [n]."""
    likeliest: np.ndarray
    """Whether no token is likelier than the label: bool [n]."""


class ForwardPasses:
    """Runs the forward passes of an engine with the `context` of its training, by `choices`.

    `block_input_bytes` is the size of the largest hidden state of a training micro-batch.
    """

    def __init__(self, context: OpContext, choices: PlanChoices, block_input_bytes: int):
        self._context = context
        self._choices = choices.of_forward_passes()
        self._compiled = choices.kernels.compiled
        self._blocks = [unit.name for unit in context.model.blocks]
        self._a_round = choices.batching.micro_batches_per_round
        """Number of micro-batches that training has on the device at once."""
        on_device = 0 if choices.activations.offloaded_block_inputs else len(self._blocks)
        self._training_bytes = (1 + on_device) * self._a_round * block_input_bytes
        """Bytes of the device that hidden states and block inputs of training take."""
        self._is_divided = choices.sharding.nodes_per_replica > 1
        self._accompanied: Accompanied | None = None
        self._executors: dict[tuple[int, int, bool, bool], Executor] = {}
        self._scopes = 0
        self._held = False
        """The units that have their own slot are there."""
        self._state_bytes: dict[tuple[Any, ...], int] = {}

    def plan(
        self, micro_batches: int, groups: int = 1, compiled: bool = False, held: bool = False
    ) -> StepPlan:
        """Returns the plan of one pass; `groups`, `compiled` and `held` are those of `run`."""
        choices = self._choices.changed(
            micro_batches=micro_batches, rounds=groups, compiled=compiled
        )
        collectives = self._context.collectives
        rank = collectives.place.local_rank if self._is_divided and collectives is not None else 0
        return build_forward_plan(
            self._blocks, self._context.model.holds_embed, choices, held, rank
        )

    def run(self, step: StepUnderWay, check: Callable[[], None] | None = None) -> StepPlan:
        """Runs a pass to its end, and returns its plan.

        Where other ranks take part, `check` is called before the pass alone: they would wait for
        one that is given up.
        """
        groups = -(-len(step.inputs.batches) // self._group_size(step))
        if not self._is_divided:
            return self._run(step, groups, check)
        if check is not None:
            check()
        with contextlib.nullcontext() if self._accompanied is None else self._accompanied(groups):
            return self._run(step, groups)

    def accompany_by(self, accompanied: Accompanied | None) -> None:
        """Says what makes the other ranks take part in a pass; None where they do so anyway."""
        self._accompanied = accompanied

    def accompany(self, groups: int) -> None:
        """Takes part in a pass of another rank, with micro-batches of one token, one a group."""
        upload = self._context.backend.upload
        token, nothing = upload(np.zeros((1, 1), np.int64)), upload(np.zeros(0, np.int64))
        batches = [DeviceBatch(token, None, nothing, nothing)] * groups
        last = [upload(np.zeros(1, np.int64))] * groups
        self._run(StepUnderWay(StepInputs(0, batches, 1.0, training=False, logits_at=last)), groups)

    def _run(
        self, step: StepUnderWay, groups: int, check: Callable[[], None] | None = None
    ) -> StepPlan:
        """Runs a pass over this many groups of micro-batches.

        `check` is called before each op; if it raises an exception, the pass ends. An evaluation
        uses compiled kernels if training does. The shapes of sampling change with every token, and
        those of scored rows with every micro-batch, so compiling would cost more time than it
        saves.
        """
        inputs = step.inputs
        compiled = self._compiled and inputs.logits_at is None and not inputs.scored
        executor = self._executor((len(inputs.batches), groups, compiled, self._held))
        self._held = False  # should the pass fail, the slots are not known
        self._context.templates.set_training(False)
        try:
            executor.run(step, check=check)
        finally:
            executor.drain()
        # Ranks that take part in a pass fetch all units in each.
        self._held = self._scopes > 0 and not self._is_divided
        return executor.plan

    def record(
        self, step: StepUnderWay, recorder: Recorder, then: Callable[[torch.Tensor], None]
    ) -> RecordedPass | None:
        """Records a pass of one micro-batch and `then`, which is given its logits; neither is run.
        What the step holds on the device is read again at each replay. Returns None where a pass
        also fetches weights.
        """
        if not self.is_held:
            return None
        executor = self._executor((1, 1, False, True))
        if any(op.lane != Lane.COMPUTE for op in executor.plan.ops):
            return None
        self._context.templates.set_training(False)

        def work() -> None:
            for op in executor.plan.ops:
                WORK[op.kind](executor.context, op, step)
            then(step.micro_batches[0].logits)

        return RecordedPass(recorder.record(work), step.inputs)

    @property
    def is_held(self) -> bool:
        """Whether the units that have a slot of their own are there."""
        return self._held

    def scores(
        self, batches: Iterable[LabeledRows], check: Callable[[], None] | None = None
    ) -> Iterator[LabelScores]:
        """Yields the scores of each micro-batch, in order. A sweep over the units takes many of
        them. `check` is as for `run`.
        """
        upload = self._context.backend.upload
        for sweep in sweeps(batches):
            on_device = [
                DeviceBatch(
                    upload(rows.input_ids), None, upload(rows.positions), upload(rows.labels)
                )
                for rows in sweep
            ]
            step = StepUnderWay(StepInputs(0, on_device, 1.0, training=False, scored=True))
            self.run(step, check)
            for each in step.micro_batches:
                logps = -each.position_losses.cpu().numpy()
                yield LabelScores(logps, each.likeliest.cpu().numpy())

    @contextlib.contextmanager
    def on_same_weights(self) -> Iterator[None]:
        """Says that no weights change until the scope ends, except by training steps.

        Scopes may overlap. After a training step, the next pass fetches everything anew.
        """
        if self._scopes == 0:
            self._held = False
        self._scopes += 1
        try:
            yield
        finally:
            self._scopes -= 1

    def forget(self) -> None:
        """Says that the slots or the weights may have changed."""
        self._held = False

    def _executor(self, key: tuple[int, int, bool, bool]) -> Executor:
        executor = self._executors.pop(key, None)
        if executor is None:
            plan = self.plan(*key)
            verify_plan(plan)
            executor = Executor(replace(self._context, plan=plan))
        self._executors[key] = executor  # the one that was used last is last
        if len(self._executors) > _PLANS_KEPT:
            del self._executors[next(iter(self._executors))]
        return executor

    # ------------------------------------------------------------------ groups

    def _group_size(self, step: StepUnderWay) -> int:
        """Returns how many micro-batches of a pass can be on the device at once.

        As many fit as training has there in a round. More fit in half of the free memory, or on the
        CPU in the memory that block inputs take in training, so that an evaluation takes no more
        host memory than was predicted for training.
        """
        inputs = step.inputs
        count = len(inputs.batches)
        if inputs.caches is not None or count <= self._a_round:
            return count  # the rows of a wave of sampling were chosen to fit
        if self._is_divided:
            return self._a_round  # all ranks must have as many groups
        backend = self._context.backend
        room = self._training_bytes
        if backend.device.type != "cpu":
            room = max(room, backend.free_memory() // 2)
        fitting = room // max(1, self._bytes_of_largest(step))
        return min(count, max(1, self._a_round, fitting))

    def _bytes_of_largest(self, step: StepUnderWay) -> int:
        """Returns the bytes that the largest micro-batch of a pass takes between two blocks: its
        hidden state, its masks and its rotary tables. They are measured once for each shape.
        """
        inputs = step.inputs
        batch = max(inputs.batches, key=lambda batch: batch.input_ids.numel())
        key = (tuple(batch.input_ids.shape), batch.position_ids is None)
        if key not in self._state_bytes:
            self._context.templates.set_training(False)
            probe = StepUnderWay(StepInputs(0, [batch], 1.0, training=False))
            executor = Executor(replace(self._context, plan=StepPlan(())))
            # The values do not matter, so the embedding need not be there.
            op = Embed(0, EMBED, micro_batch=0, slot=slot_of(EMBED))
            try:
                self._context.backend.submit(Lane.COMPUTE, (), executor.work(op, probe))
            finally:
                self._context.backend.drain()
            self._state_bytes[key] = _bytes_of(
                probe.micro_batches[0].hidden, probe.micro_batches[0].arguments
            )
        return self._state_bytes[key]


def _bytes_of(*holders: Any) -> int:
    """Returns the bytes of all tensors in `holders`, those that share memory counted once."""
    storages: dict[int, int] = {}
    for holder in holders:
        for _, tensor in tensors_in(holder):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def sweeps(batches: Iterable[Any]) -> Iterator[list[Any]]:
    """Yields the micro-batches of an evaluation in order, in lists that are evaluated in one
    sweep each.
    """
    sweep: list[Any] = []
    tokens = 0
    for batch in batches:
        size = batch.input_ids.size
        if sweep and (len(sweep) == SWEEP_MICRO_BATCHES or tokens + size > SWEEP_TOKENS):
            yield sweep
            sweep, tokens = [], 0
        sweep.append(batch)
        tokens += size
    if sweep:
        yield sweep


def pass_groups(rows: Sequence[Sequence[int]], most_tokens: int = PASS_TOKENS) -> list[list[int]]:
    """Returns the numbers of all rows in groups of similar length, shortest first. A group has at
    most `most_tokens` tokens, padding included, unless it is a single row.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(rows)), key=lambda row: len(rows[row])):
        if groups and (len(groups[-1]) + 1) * len(rows[row]) <= most_tokens:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def summed(total: float, losses: Sequence[torch.Tensor]) -> float:
    """Returns `total` plus scalars, added in double precision and in their order."""
    for loss in torch.stack(list(losses)).tolist():
        total += loss
    return total
