"""Each forward and backward of a block runs as a recording here, so that a block of many small
kernels is launched at once.

This needs blocks whose weights, accumulators and activations are at the same addresses in every
step: all of them live on the device, and none has a block input on the host (`StepPlan.graphs`).
What goes into the first block of a pass and what comes out of the last one is in buffers of their
own, the borders, and the arguments of the blocks are copied to tensors that stay
(`StaticArguments`).

Recordings belong to the shapes of one step:

1. Its first step is a rehearsal: every op runs as usual, but in the form in which it will be
   recorded.
2. In the next step, each op is recorded and replayed at once. So the step is computed like any
   other, and the memory of its activations is shared as in any other.
3. From then on ops are replayed. Nothing is kept for autograd, and no code of the model runs.

The kernels are those of the ops as they are, so no bit of a result changes. Where a block cannot
be recorded, it runs as it is from then on, and `problem` says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from engine.errors import first_line
from engine.model.blocks.block_inputs import BlockArguments
from engine.model.build.attention_documents import Documents
from engine.model.build.units import StreamedModel
from engine.planning.schedule.buffers import EMBED
from engine.planning.schedule.ops import Backward, Forward, Recompute
from engine.planning.schedule.schedule import StepPlan
from engine.runtime.device.graph_inputs import Sizes, StaticArguments, sizes_of
from engine.runtime.device.graph_recorder import Recorder, Recording, Work

MOST_SHAPES = 24
"""Most shapes of steps: padded rows of up to 2,048 tokens have as many lengths. Where there are
more, blocks run as they are: each new shape takes a rehearsal, and the recordings of all shapes are
made anew.
"""

BlockOp = Forward | Recompute | Backward
Place = tuple[str, str, int, bool]
"""A recording is for one kind of op, unit and place among the micro-batches that exist together,
and either for the first round or for all later ones, which add to accumulators that are there.
"""
Shape = tuple[tuple[int, ...], bool, bool]
"""A micro-batch has this shape of token ids, may have rows that all count from 0, and may have rows
that are whole documents.
"""


class Batch(Protocol):
    """A micro-batch on the device."""

    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def position_ids(self) -> torch.Tensor | None: ...
    @property
    def documents(self) -> Documents | None: ...


class MicroBatch(Protocol):
    """A micro-batch of a step whose ops run, as
    `engine.runtime.step.micro_batch_state.MicroBatchState` describes.
    """

    hidden: torch.Tensor
    arguments: list[BlockArguments]
    saved: dict[str, tuple[torch.Tensor, ...]]


class UnderWay(Protocol):
    """A step whose ops run, as `engine.runtime.step.step.StepUnderWay` describes."""

    graphs: StepGraphs | None

    @property
    def micro_batches(self) -> Sequence[MicroBatch]: ...


def _shape_of(batch: Batch) -> Shape:
    whole = batch.documents is None or batch.documents.whole
    return tuple(batch.input_ids.shape), batch.position_ids is None, whole


class Border(Enum):
    """Where the hidden state, or its gradient, passes between blocks that are recorded and ops that
    are not.
    """

    INTO_FORWARD = 1
    OUT_OF_FORWARD = 2
    INTO_BACKWARD = 3
    OUT_OF_BACKWARD = 4


@dataclass(frozen=True)
class _Kept:
    """Inputs of an op of a step, kept in case it cannot be recorded."""

    hidden: torch.Tensor
    """The hidden state, or its gradient, has the shape [rows, tokens, width]."""
    saved: dict[str, tuple[torch.Tensor, ...]]

    def give_back(self, micro_batch: MicroBatch) -> None:
        """Puts everything back where the op takes it."""
        micro_batch.hidden = self.hidden
        micro_batch.saved.clear()
        micro_batch.saved.update(self.saved)


class Stage(Enum):
    """What happens to the ops of the steps of one shape."""

    REHEARSAL = 1
    RECORDING = 2
    REPLAY = 3


class BlockGraphs:
    """Recordings of one plan for the blocks of `model`."""

    def __init__(self, recorder: Recorder, plan: StepPlan, model: StreamedModel):
        self.recorder = recorder
        self.first, self.last = model.blocks[0].name, model.blocks[-1].name
        self.goes_below = EMBED not in plan.forward_only
        """The gradient of the first block's input is needed."""
        self.together = plan.graphs
        self.problem = model.unrecordable
        """Why blocks run as they are; empty where they are replayed."""
        self._unfit = ""
        """Why a step did not fit its recordings. There are none from the next step on."""
        self._by_shape: dict[tuple[tuple[Shape, ...], Sizes], StepGraphs] = {}

    def of_step(self, batches: Sequence[Batch]) -> StepGraphs | None:
        """Returns the recordings for the next step, or None where it runs as it is."""
        if self._unfit and not self.problem:
            self.abort(ValueError(self._unfit))
        if self.problem:
            return None
        sizes = sizes_of(batch.documents for batch in batches)
        shapes = tuple(_shape_of(batch) for batch in batches)
        graphs = self._by_shape.get((shapes, sizes))
        if graphs is None:
            if len(self._by_shape) == MOST_SHAPES:
                self.abort(ValueError(f"steps have more than {MOST_SHAPES} shapes"))
                return None
            # A rehearsal takes its memory beside that of recordings, for which there is no room.
            self.forget()
            graphs = self._by_shape[shapes, sizes] = StepGraphs(self, sizes)
        graphs.begin()
        return graphs

    def report_unfit(self, error: Exception) -> None:
        """Takes note that the step under way does not fit its recordings."""
        self._unfit = first_line(error)

    def forget(self) -> None:
        """Frees all recordings, which are made anew when their steps come again."""
        self.recorder.wait()
        for graphs in self._by_shape.values():
            graphs.forget()
        self.recorder.clear()

    def abort(self, error: Exception) -> None:
        """Makes blocks run as they are from now on, because one cannot be recorded."""
        self.problem = first_line(error)
        # Tensors of the step under way may be in memory of the recordings, which stays until they
        # are freed.
        self.close()

    def close(self) -> None:
        """Frees the recordings."""
        with contextlib.suppress(RuntimeError):  # the device may be lost
            self.recorder.wait()
        self._by_shape.clear()
        with contextlib.suppress(RuntimeError):
            self.recorder.clear()


class StepGraphs:
    """Recordings of the steps of one shape."""

    def __init__(self, owner: BlockGraphs, sizes: Sizes):
        self._owner = owner
        self._sizes = sizes
        self._recorder = owner.recorder
        self._stage = Stage.REHEARSAL
        self._borders: dict[tuple[int, Border], torch.Tensor] = {}
        self._arguments: dict[int, StaticArguments] = {}
        self._recordings: dict[Place, Recording] = {}
        self._given: dict[int, list[BlockArguments]] = {}
        """The step under way was given these arguments, by micro-batch. They are kept only while an
        op may turn out to be impossible to record.
        """
        self._apart: set[int] = set()
        """Micro-batches of the step under way that run as they are."""
        self._finished = True
        self.is_recording = False
        """Whether an op is being recorded. Nothing of it runs on the device then."""

    def begin(self) -> None:
        """Begins a step."""
        if not self._finished and self._stage == Stage.RECORDING:
            # The step was given up. Recordings of a part of it are of no use.
            self._owner.forget()
        self._finished = False
        self._given.clear()
        self._apart.clear()
        if self._stage == Stage.RECORDING:
            self._recorder.tidy()

    def forget(self) -> None:
        """Lets go of what was recorded. What is needed to record again is kept."""
        self._recordings.clear()
        if self._stage == Stage.REPLAY:
            self._stage = Stage.RECORDING

    def finish(self) -> None:
        """Ends the block ops of a step."""
        self._finished = True
        self._given.clear()
        if self._stage == Stage.REHEARSAL:
            self._stage = Stage.RECORDING
        elif self._stage == Stage.RECORDING:
            self._stage = Stage.REPLAY

    def enter(self, number: int, step: UnderWay) -> None:
        """Takes over the micro-batch of this number, whose hidden state [rows, tokens, width] and
        arguments the op `embed` has left in the step.
        """
        micro_batch, together = step.micro_batches[number], self._owner.together
        given = micro_batch.arguments
        try:
            static = self._taken(number % together, given)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  arguments may be anything
            if self._stage == Stage.REPLAY:  # others of this step are replayed
                self._owner.report_unfit(error)
                self._apart.add(number)
            else:
                self._abort(error, step)
            return
        if self._stage != Stage.REPLAY:
            self._given.pop(number - together, None)
            self._given[number] = given
        micro_batch.arguments = static.arguments

    def _taken(self, place: int, given: list[BlockArguments]) -> StaticArguments:
        """Returns the arguments that stay, with the values of the given ones. Raises ValueError
        where they differ in more than values.
        """
        static = self._arguments.get(place)
        if static is None:
            static = self._arguments[place] = StaticArguments(given, self._sizes)
        elif not static.take(given):
            raise ValueError("its arguments change from step to step")
        return static

    def run(self, op: BlockOp, step: UnderWay, body: Work, renew: Callable[[], None]) -> None:
        """Runs an op of a block. body: its work where it is not replayed from a graph. renew: makes
        what a backward needs once more, after a backward that failed.
        """
        if op.micro_batch in self._apart:
            body()
            return
        before, after = self._sides(op)
        if before is not None:
            self._cross(op, before, step)
        if self._stage == Stage.REPLAY:
            self._recordings[self._place(op)].replay()
        elif not self._is_done(op, step, body, renew):
            return  # it ran as it is
        if after is not None:
            step.micro_batches[op.micro_batch].hidden = self._border(op, after)

    def _is_done(self, op: BlockOp, step: UnderWay, body: Work, renew: Callable[[], None]) -> bool:
        """Rehearses or records an op. Returns False where it cannot be recorded and has run as it
        is.
        """
        micro_batch = step.micro_batches[op.micro_batch]
        before, after = self._sides(op)

        def work() -> None:
            if before is not None:  # the border gets new values before autograd has done with it
                micro_batch.hidden = self._border(op, before).clone()
            body()
            if after is not None:
                self._cross(op, after, step)

        kept = _Kept(micro_batch.hidden, dict(micro_batch.saved))
        try:
            self._do(op, work)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if isinstance(op, Backward) and self._stage == Stage.REHEARSAL:
                raise  # it fails as it is, too
            self._abort(error, step)
            kept.give_back(micro_batch)
            if isinstance(op, Backward):
                renew()
            body()
            return False
        return True

    def _sides(self, op: BlockOp) -> tuple[Border | None, Border | None]:
        """Returns the borders that the hidden state crosses before and after the op."""
        owner = self._owner
        match op:
            case Forward():
                entered = Border.INTO_FORWARD if op.unit == owner.first else None
                return entered, Border.OUT_OF_FORWARD if op.unit == owner.last else None
            case Backward():
                entered = Border.INTO_BACKWARD if op.unit == owner.last else None
                leaves = op.unit == owner.first and owner.goes_below
                return entered, Border.OUT_OF_BACKWARD if leaves else None
        return None, None

    def _cross(self, op: BlockOp, border: Border, step: UnderWay) -> None:
        """Copies the hidden state, or its gradient, to the buffer of a border."""
        micro_batch = step.micro_batches[op.micro_batch]
        place = self._border(op, border, micro_batch.hidden)
        place.copy_(micro_batch.hidden)
        micro_batch.hidden = place

    def _border(
        self, op: BlockOp, border: Border, like: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns the buffer of a border. The first time it is made `like` a tensor of any shape:
        some families give their blocks another shape or dtype than their first block gets.
        """
        key = op.micro_batch % self._owner.together, border
        if key not in self._borders:
            assert like is not None  # a rehearsal comes first
            self._borders[key] = torch.empty_like(like)
        return self._borders[key]

    def _do(self, op: BlockOp, work: Work) -> None:
        """Rehearses or records the work of an op."""
        if self._stage == Stage.REHEARSAL:
            self._recorder.rehearse(work)
            if self._recorder.has_drawn():
                raise ValueError("it draws random numbers")
            return
        place = self._place(op)
        if place not in self._recordings:
            self.is_recording = True
            try:
                self._recordings[place] = self._recorder.record(work)
            finally:
                self.is_recording = False
        self._recordings[place].replay()

    def _place(self, op: BlockOp) -> Place:
        together = self._owner.together
        is_later = op.micro_batch >= together
        return op.kind, op.unit, op.micro_batch % together, is_later

    def _abort(self, error: Exception, step: UnderWay) -> None:
        """Makes the rest of the step, and all later ones, run as they are."""
        self._owner.abort(error)
        step.graphs = None
        for number, given in self._given.items():
            step.micro_batches[number].arguments = given
