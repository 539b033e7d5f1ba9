"""The engine of rank 0: whatever it runs, it has the other ranks of its worker group run, too.

Steps are computed by all ranks together. Evaluations are divided: each rank computes the losses of
some micro-batches by itself, on weights that it reads whole from the common planes. Rank 0
samples alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from engine.errors import NonFiniteError, RankError
from engine.model.build.units import StreamedModel
from engine.runtime.device.backend import Backend
from engine.runtime.distributed.messages import (
    Accompany,
    CloseEngine,
    Done,
    Drain,
    DryRun,
    Evaluate,
    Losses,
    Train,
)
from engine.runtime.distributed.worker_group import WorkerGroup
from engine.runtime.host.host_optimizer import HostOptimizer
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.engine_settings import AppliedStep, EngineSettings
from engine.runtime.step.step import StepShard
from engine.runtime.step.streaming_engine import StreamingEngine


class RankZeroEngine(StreamingEngine):
    """The engine of rank 0. The ranks of `workers` have engines of the same plan."""

    def __init__(
        self,
        workers: WorkerGroup,
        model: StreamedModel,
        states: HostStates,
        backend: Backend,
        settings: EngineSettings,
        optimizer: HostOptimizer,
    ):
        super().__init__(model, states, backend, settings, optimizer)
        self.workers = workers
        if self.choices.sharding.nodes_per_replica > 1:
            self.passes.accompany_by(self._accompanied)

    @contextlib.contextmanager
    def _accompanied(self, groups: int) -> Iterator[None]:
        """Has the other ranks take part in a pass, which needs their shards of the weights."""
        with self._together():
            self.workers.send(lambda _: Accompany(groups))
            yield
            self.workers.collect(Done)

    def train_step(
        self,
        number: int,
        batches: Sequence,
        learning_rate: float,
        on_applied: Callable[[AppliedStep], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        if check is not None:
            check()
        skipped = self._states.held.skipped
        is_notified = self.workers.wants_timeline(number)
        with self._together():
            self.workers.send(
                lambda rank: Train(
                    number,
                    self._shard(batches, rank),
                    learning_rate,
                    skipped,
                    # Only the ranks of a node have a clock in common.
                    is_notified
                    and self.workers.place.of(rank).node_rank == self.workers.place.node_rank,
                )
            )
            own = self._shard(batches, 0)
            self.train_shard(number, own, learning_rate, on_applied, self._abandoning(check))

    def _abandoning(self, check: Callable[[], None] | None) -> Callable[[], None] | None:
        """Returns a check that gives a step up once it was begun: the other ranks wait for this one
        in it from then on, and compute nothing more. None where ranks finish their step: processes
        of other nodes would be ended with a part of the planes.
        """
        if check is None or self.workers.place.nodes > 1:
            return None

        def abandoning() -> None:
            try:
                check()
            except BaseException:
                self.workers.abandon()
                raise

        return abandoning

    def dry_run(self, batches: Sequence, check: Callable[[], None] | None = None) -> None:
        if check is not None:
            check()
        with self._together():
            self.workers.send(lambda rank: DryRun(self._shard(batches, rank)))
            self.dry_run_shard(self._shard(batches, 0))
            self.workers.collect(Done)

    def drain(self) -> None:
        with self._together():
            try:
                super().drain()
            finally:
                if self.workers.compute:
                    self.workers.ask(Drain())

    def losses_of(
        self, batches: Sequence, check: Callable[[], None] | None = None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the losses of micro-batches as `StreamingEngine.losses_of` does. Each rank
        computes some of them.
        """
        if self.choices.sharding.nodes_per_replica > 1:
            return self._losses_of_divided(batches, check)
        size = -(-len(batches) // self.place.world_size)
        starts = range(size, len(batches), size)
        parts = [batches[start : start + size] for start in starts]
        parts += [[]] * (self.place.world_size - 1 - len(parts))
        with self._together():
            self.workers.send(lambda rank: Evaluate(parts[rank - 1]))
        try:
            own = super().losses_of(batches[:size], check)
        finally:  # the others answer, whatever ends this one's part
            answers = self.workers.collect(Losses)
        return _joined(own, answers)

    def _losses_of_divided(
        self, batches: Sequence, check: Callable[[], None] | None
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns the losses of micro-batches, of which each rank computes as many: all of them
        gather the weights together. The last ones are computed more than once where that is needed.
        """
        if not batches:
            return []
        if check is not None:
            check()
        size = -(-len(batches) // self.place.world_size)
        filled = [*batches, *[batches[-1]] * (size * self.place.world_size - len(batches))]
        with self._together():
            self.workers.send(lambda rank: Evaluate(filled[rank * size : (rank + 1) * size]))
            self.passes.accompany_by(None)
            try:
                own = super().losses_of(filled[:size])
            finally:
                self.passes.accompany_by(self._accompanied)
            answers = self.workers.collect(Losses)
        return _joined(own, answers)[: len(batches)]

    def close(self) -> None:
        if self.workers.compute:
            with contextlib.suppress(RankError):
                self.workers.ask(CloseEngine())
        super().close()

    def _shard(self, batches: Sequence[Any], rank: int) -> StepShard:
        return StepShard.of(batches, self.place.of(rank).shards)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Makes every error one that names its rank, except that of numbers that are not finite,
        which all ranks have found, and that with which a step is given up.
        """
        try:
            yield
        except NonFiniteError:
            raise
        except Exception as error:
            if self.workers.is_abandoned:
                raise
            raise self.workers.explained(error) from error


def _joined(
    own: Sequence[tuple[torch.Tensor, torch.Tensor]], answers: Sequence[Losses]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns the losses of all ranks, in order."""
    losses = [(total.cpu(), each.cpu()) for total, each in own]
    for answer in answers:
        pairs = zip(answer.totals, answer.positions)
        losses += [(torch.tensor(total), torch.from_numpy(each)) for total, each in pairs]
    return losses
