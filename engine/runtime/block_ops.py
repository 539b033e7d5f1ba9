"""What each kind of op does: the one place where a plan's words become tensor work.

`BlockOps` owns no policy and no threads. The executor calls ``work(op, step)`` to get the function
that the backend runs on the op's lane.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.errors import CacheError, NonFiniteError
from engine.model.layout import UnitLayout
from engine.model.skeleton import Capture
from engine.model.units import StreamedModel
from engine.plan.buffers import EMBED, HEAD, Buffer, BufferKind
from engine.plan.ops import (
    Applied,
    Backward,
    Clip,
    DeviceUpdate,
    Embed,
    EmbedBackward,
    FetchBoundary,
    FetchGrad,
    FetchGradient,
    FetchStates,
    Forward,
    Lane,
    Lend,
    Loss,
    Offload,
    OffloadStates,
    OffloadWeights,
    OfMicroBatch,
    OfPiece,
    OfSum,
    Op,
    OpKind,
    Prefetch,
    Reclaim,
    Reduce,
    StepPlan,
    StoreBoundary,
    Summary,
    Update,
)
from engine.runtime.backend import Backend
from engine.runtime.device_adamw import clip_of, update
from engine.runtime.device_state import DeviceState
from engine.runtime.host_adamw import HostAdamW
from engine.runtime.host_store import HostStore
from engine.runtime.loss import chunked_loss
from engine.runtime.step import StepResult, StepUnderWay


class BlockOps:
    """Binds ops to the host store, the device state and the model."""

    def __init__(
        self,
        model: StreamedModel,
        plan: StepPlan,
        store: HostStore,
        state: DeviceState,
        backend: Backend,
        adamw: HostAdamW | None,
        loss_chunk: int,
        host_boundaries: dict[tuple[str, int], torch.Tensor],
    ):
        self.model, self.plan, self.store, self.state = model, plan, store, state
        self.backend, self.adamw, self.loss_chunk = backend, adamw, loss_chunk
        self.host_boundaries = host_boundaries
        self.units = {unit.name: unit for unit in model.units}
        self.positions = {unit.name: k for k, unit in enumerate(model.units)}
        self.block_positions = {unit.name: k for k, unit in enumerate(model.blocks)}
        self.summary = backend.host_buffer(len(model.units) + 1, torch.float32)

    def work(self, op: Op, step: StepUnderWay) -> Callable[[], None]:
        """What the backend runs on the lane of `op`."""
        do = WORK[op.kind]
        if step.inputs.caches is not None and op.lane == Lane.COMPUTE:
            return lambda: self._attempt(do, op, step)
        return lambda: do(self, op, step)

    def _attempt(self, do: Work, op: Op, step: StepUnderWay) -> None:
        """A failed op breaks its lane for good, and a run must not end for a cache that its model
        cannot use: the rest of the pass is left out and the caller is told.
        """
        if step.failure is None:
            try:
                do(self, op, step)
            except Exception as error:
                # Words only: the error's frames would keep the caches alive, in a cycle with this
                # step.
                step.give_up(str(error) or type(error).__name__)

    # ------------------------------------------------------------------ H2D and D2H

    def _prefetch(self, op: Prefetch, step: StepUnderWay) -> None:
        plane = self.store.tensor(op.unit, "weight_high")
        # By way of `data`, which has a version of its own: kept blocks saved views of this slot,
        # and find the same weights in it again when their backward comes. That it is so is what the
        # plan's tags prove.
        self.state.slots[op.slot].data[: plane.numel()].copy_(plane, non_blocking=True)

    def _store_boundary(self, op: StoreBoundary, step: StepUnderWay) -> None:
        host = self.host_boundaries[op.unit, op.micro_batch]
        numel = step.shapes[op.micro_batch].numel()
        host[:numel].copy_(self.state.rings[op.ring][:numel], non_blocking=True)

    def _fetch_boundary(self, op: FetchBoundary, step: StepUnderWay) -> None:
        host = self.host_boundaries[op.unit, op.micro_batch]
        numel = step.shapes[op.micro_batch].numel()
        self.state.rings[op.ring][:numel].copy_(host[:numel], non_blocking=True)

    def _fetch_grad(self, op: FetchGrad, step: StepUnderWay) -> None:
        plane = self.store.tensor(op.unit, "grad")
        self.state.stagings[op.staging][: plane.numel()].copy_(plane, non_blocking=True)

    def _offload(self, op: Offload, step: StepUnderWay) -> None:
        plane = self.store.tensor(op.unit, "grad")
        plane.copy_(self.state.stagings[op.staging][: plane.numel()], non_blocking=True)

    # ------------------------------------------------------------------ COMPUTE

    def _seed(self, op: OfMicroBatch, step: StepUnderWay) -> None:
        """Dropout draws the same numbers in a recompute and after a resume: the seed is a function
        of where we are. The generator is the process's own, so a pass without dropout, perhaps
        beside another engine's training, leaves it alone.
        """
        if not step.inputs.training:
            return
        position = self.positions[op.unit]
        self.backend.seed(
            hash((step.inputs.seed, step.inputs.number, position, op.micro_batch)) & 0x7FFFFFFF
        )

    def _capture(self, op: Embed | EmbedBackward, step: StepUnderWay) -> Capture:
        self._seed(op, step)
        batch = step.inputs.batches[op.micro_batch]
        if step.inputs.caches is None:
            return self.model.skeleton.capture(
                batch.input_ids, batch.position_ids, documents=batch.documents
            )
        captured = self.model.skeleton.capture(
            batch.input_ids, batch.position_ids, True, step.inputs.caches[op.micro_batch]
        )
        caches = self.model.skeleton.caches(captured)
        if len(caches) != 1:
            raise CacheError(
                f"{self.model.config.model_type} gives its blocks {len(caches)} caches, not one."
            )
        step.inputs.caches[op.micro_batch] = caches[0]
        return captured

    def _embed(self, op: Embed, step: StepUnderWay) -> None:
        with torch.no_grad():
            captured = self._capture(op, step)
        step.hidden[op.micro_batch] = captured.hidden
        step.shapes[op.micro_batch] = captured.hidden.shape
        step.arguments[op.micro_batch] = captured.arguments

    def _run(
        self, op: Forward | Backward, step: StepUnderWay, hidden: torch.Tensor
    ) -> torch.Tensor:
        self._seed(op, step)
        unit = self.units[op.unit]
        arguments = step.arguments[op.micro_batch][self.block_positions[op.unit]]
        block = self.state.template(op.slot, unit)
        # Shapes of sampling change with every token: compiling would take longer than it saves.
        if self.plan.compiled and step.inputs.training:
            block = self.state.compiled[op.slot, unit.kind]
        return arguments.call(block, hidden)

    def _forward(self, op: Forward, step: StepUnderWay) -> None:
        hidden = step.hidden[op.micro_batch]
        kept = op.unit in self.plan.kept_units
        if step.inputs.training and (kept or self.plan.compiled):
            # A compiled block that is recomputed also runs this way, and what autograd keeps is let
            # go of at once: without gradients it would be compiled otherwise, and its results would
            # differ in their last bits.
            leaf = hidden.detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(op, step, leaf)
            if kept:
                step.saved[op.unit, op.micro_batch] = (leaf, out)
            else:
                self._keep_boundary(op, step, hidden)
            step.hidden[op.micro_batch] = out.detach()
            return
        self._keep_boundary(op, step, hidden)
        with torch.no_grad():
            step.hidden[op.micro_batch] = self._run(op, step, hidden)

    def _keep_boundary(self, op: Forward, step: StepUnderWay, hidden: torch.Tensor) -> None:
        if op.ring is not None:
            self.state.rings[op.ring][: hidden.numel()].copy_(hidden.reshape(-1))
        elif step.inputs.training:
            step.saved[op.unit, op.micro_batch] = (hidden,)

    def _loss(self, op: Loss, step: StepUnderWay) -> None:
        hidden = step.hidden[op.micro_batch]
        if step.inputs.logits_at is not None:
            states = hidden.reshape(-1, hidden.shape[-1]).index_select(
                0, step.inputs.logits_at[op.micro_batch]
            )
            with torch.no_grad():
                step.logits[op.micro_batch] = self.model.skeleton.logits(states).float()
            del step.hidden[op.micro_batch]
            return
        batch = step.inputs.batches[op.micro_batch]
        outer = self.state.outer_parameters
        owners = [HEAD, EMBED] if self.model.tied else [HEAD]
        if op.first:
            for owner in owners:
                self._grad(owner, op, HEAD).zero_()
        if op.micro_batch == 0:
            self.state.norms[-1].zero_()

        def accumulate(gradients: tuple[torch.Tensor | None, ...]) -> None:
            start = 0
            for owner in owners:
                count = len(outer[owner])
                self._add(
                    self.units[owner].layout,
                    self._grad(owner, op, HEAD),
                    gradients[start : start + count],
                )
                start += count

        parameters = [p for owner in owners for p in outer[owner]]
        loss, gradient = chunked_loss(
            self.model.skeleton,
            hidden,
            batch.loss_index,
            batch.labels,
            step.inputs.loss_scale,
            self.loss_chunk,
            parameters,
            accumulate if step.inputs.training else None,
            self.plan.compiled,
        )
        self.state.norms[-1] += loss
        if gradient is None:
            del step.hidden[op.micro_batch]
        else:
            step.hidden[op.micro_batch] = gradient

    def _backward(self, op: Backward, step: StepUnderWay) -> None:
        unit = self.units[op.unit]
        key = (op.unit, op.micro_batch)
        if op.unit in self.plan.kept_units:
            leaf, out = step.saved.pop(key)
        else:
            if op.ring is not None:
                shape = step.shapes[op.micro_batch]
                boundary = self.state.rings[op.ring][: shape.numel()].view(shape)
            else:
                (boundary,) = step.saved.pop(key)
            leaf = boundary.detach().requires_grad_()
            with torch.enable_grad():
                out = self._run(op, step, leaf)
        try:
            hidden_gradient, *gradients = self._gradients(op, step, leaf, out)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if not self.plan.compiled:
                raise
            # Backward could not be compiled; an error of another kind comes again.
            self.state.compiled[op.slot, unit.kind].give_up(error)
            with torch.enable_grad():
                out = self._run(op, step, leaf)
            hidden_gradient, *gradients = self._gradients(op, step, leaf, out)
        step.hidden[op.micro_batch] = hidden_gradient
        self._sum(unit.layout, self._grad(op.unit, op, op.unit), gradients, op.first)

    def _gradients(
        self, op: Backward, step: StepUnderWay, leaf: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Of a block's input and parameters."""
        parameters = self.state.parameters(op.slot, self.units[op.unit])
        return torch.autograd.grad(
            out, [leaf, *parameters], step.hidden[op.micro_batch], allow_unused=True
        )

    def _embed_backward(self, op: EmbedBackward, step: StepUnderWay) -> None:
        unit = self.units[EMBED]
        with torch.enable_grad():
            captured = self._capture(op, step)
        gradients = torch.autograd.grad(
            captured.hidden,
            self.state.outer_parameters[EMBED],
            step.hidden.pop(op.micro_batch),
            allow_unused=True,
        )
        del step.arguments[op.micro_batch]
        self._sum(unit.layout, self._grad(EMBED, op, EMBED), gradients, op.first)

    def _grad(self, owner: str, op: OfSum, unit: str) -> torch.Tensor:
        """The owner's part of its fp32 gradient buffer. A tied loss op also sums into the embed
        unit's buffer.
        """
        buffer = op.grad if owner == unit else Buffer(BufferKind.SUM, owner)
        return self.state.grads[buffer][: self.units[owner].layout.numel]

    def _sum(
        self,
        layout: UnitLayout,
        buffer: torch.Tensor,
        gradients: Sequence[torch.Tensor | None],
        first: bool,
    ) -> None:
        """Add to the sum, or begin it."""
        if (
            first
            and layout.numel == layout.parameter_count
            and all(gradient is not None for gradient in gradients)
        ):
            for spec, offset, gradient in zip(layout.parameters, layout.offsets, gradients):
                buffer[offset : offset + spec.numel].view(spec.shape).copy_(gradient)
            return
        if first:
            buffer.zero_()
        self._add(layout, buffer, gradients)

    @staticmethod
    def _add(
        layout: UnitLayout, buffer: torch.Tensor, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        for spec, offset, gradient in zip(layout.parameters, layout.offsets, gradients):
            if gradient is not None:
                buffer[offset : offset + spec.numel].view(spec.shape).add_(gradient)

    def _reduce(self, op: Reduce, step: StepUnderWay) -> None:
        numel = self.units[op.unit].layout.numel
        grad, staging = self.state.grads[op.grad][:numel], self.state.stagings[op.staging][:numel]
        if op.adds:
            grad.add_(staging)
        if op.last:
            self.state.norms[self.positions[op.unit]] = torch.linalg.vector_norm(grad).square()
        staging.copy_(grad)

    def _summary(self, op: Summary, step: StepUnderWay) -> None:
        self.state.clip.copy_(clip_of(self.state.norms, step.inputs.max_grad_norm))
        self.summary.copy_(self.state.norms, non_blocking=True)

    def _lend(self, op: Lend, step: StepUnderWay) -> None:
        self.state.lend()

    def _reclaim(self, op: Reclaim, step: StepUnderWay) -> None:
        self.state.reclaim()

    # ------------------------------------------------------------------ UPDATE

    def _fetch_states(self, op: FetchStates, step: StepUnderWay) -> None:
        self._copy_states(
            op, [plane for plane in self.store.planes if plane != "grad"], to_device=True
        )

    def _fetch_gradient(self, op: FetchGradient, step: StepUnderWay) -> None:
        start, stop = op.piece
        plane = self.store.tensor(op.unit, "grad")[start:stop]
        self.backend.copy_in_parts(self.state.states[op.buffer]["grad"][: stop - start], plane)

    def _device_update(self, op: DeviceUpdate, step: StepUnderWay) -> None:
        start, stop = op.piece
        planes = {
            name: plane[: stop - start] for name, plane in self.state.states[op.buffer].items()
        }
        grad = planes.pop("grad")
        if op.staging is not None:
            grad = self.state.stagings[op.staging][start:stop]
        decayed = min(max(0, self.units[op.unit].layout.decay_numel - start), stop - start)
        update(planes, grad, self.state.clip, step.inputs.scalars, decayed, self.plan.compiled)
        if op.slot is not None:
            self.state.slots[op.slot].data[start:stop].copy_(planes["weight_high"])

    def _offload_weights(self, op: OffloadWeights, step: StepUnderWay) -> None:
        self._copy_states(op, ["weight_high"], to_device=False)

    def _offload_states(self, op: OffloadStates, step: StepUnderWay) -> None:
        self._copy_states(
            op,
            [plane for plane in self.store.planes if plane not in ("weight_high", "grad")],
            to_device=False,
        )

    def _copy_states(self, op: OfPiece, names: Sequence[str], to_device: bool) -> None:
        start, stop = op.piece
        for name in names:
            pair = (
                self.state.states[op.buffer][name][: stop - start],
                self.store.tensor(op.unit, name)[start:stop],
            )
            target, source = pair if to_device else pair[::-1]
            self.backend.copy_in_parts(target, source)

    # ------------------------------------------------------------------ HOST

    def _applied(self, op: Applied, step: StepUnderWay) -> None:
        """Everything that it waits for is done."""

    def _clip(self, op: Clip, step: StepUnderWay) -> None:
        *squares, loss = self.summary.tolist()
        grad_norm = math.sqrt(math.fsum(squares)) if all(map(math.isfinite, squares)) else math.nan
        for what, value in (("loss", loss), ("gradient norm", grad_norm)):
            if not math.isfinite(value):
                raise NonFiniteError(
                    f"The {what} of step {step.inputs.number} is not a finite number, so the run "
                    "stopped before applying that step; look at the data, or start a new run with "
                    "a lower train.learning_rate."
                )
        most = step.inputs.max_grad_norm
        factor = 1.0 if most is None else min(1.0, most / (grad_norm + 1e-6))
        step.finish(StepResult(loss, grad_norm, [math.sqrt(square) for square in squares], factor))

    def _update(self, op: Update, step: StepUnderWay) -> None:
        self.adamw.update(
            op.unit, step.inputs.number, step.inputs.learning_rate, step.result.clip_factor
        )


Work = Callable[[BlockOps, Any, StepUnderWay], None]
"""What is done for one op of a step."""

WORK: dict[OpKind, Work] = {
    OpKind.PREFETCH: BlockOps._prefetch,
    OpKind.STORE_BOUNDARY: BlockOps._store_boundary,
    OpKind.FETCH_BOUNDARY: BlockOps._fetch_boundary,
    OpKind.FETCH_GRAD: BlockOps._fetch_grad,
    OpKind.OFFLOAD: BlockOps._offload,
    OpKind.EMBED: BlockOps._embed,
    OpKind.FORWARD: BlockOps._forward,
    OpKind.LOSS: BlockOps._loss,
    OpKind.BACKWARD: BlockOps._backward,
    OpKind.EMBED_BACKWARD: BlockOps._embed_backward,
    OpKind.REDUCE: BlockOps._reduce,
    OpKind.SUMMARY: BlockOps._summary,
    OpKind.LEND: BlockOps._lend,
    OpKind.RECLAIM: BlockOps._reclaim,
    OpKind.FETCH_STATES: BlockOps._fetch_states,
    OpKind.FETCH_GRADIENT: BlockOps._fetch_gradient,
    OpKind.DEVICE_UPDATE: BlockOps._device_update,
    OpKind.OFFLOAD_WEIGHTS: BlockOps._offload_weights,
    OpKind.OFFLOAD_STATES: BlockOps._offload_states,
    OpKind.APPLIED: BlockOps._applied,
    OpKind.CLIP: BlockOps._clip,
    OpKind.UPDATE: BlockOps._update,
}
"""The work of every kind of op."""
