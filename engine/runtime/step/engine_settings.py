"""An engine has settings, and reports each step that it has applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.regularization import NO_REGULARIZATION, Regularization
from engine.planning.schedule.choices import PlanChoices
from engine.planning.schedule.schedule import Span
from engine.planning.schedule.shards import Shards
from engine.runtime.collectives.process_groups import Collectives
from engine.runtime.collectives.rank import ALONE, RankInfo
from engine.runtime.step.neftune import StepNoise


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine are its plan and the sizes that go with it."""

    choices: PlanChoices
    tokens: int
    """Number of positions of the largest micro-batch (rows x length). The buffers of block inputs
    are made for this size.
    """
    loss_chunk: int = 1024
    """Number of positions whose logits exist at once."""
    max_grad_norm: float | None = 1.0
    seed: int = 0
    collectives: Collectives | None = None
    """Collectives that reach the other ranks; None where there are none."""
    regularization: Regularization = NO_REGULARIZATION
    """Training steps are changed by it."""

    @property
    def place(self) -> RankInfo:
        """`RankInfo` of this rank."""
        return self.collectives.place if self.collectives else ALONE

    @property
    def shards(self) -> Shards:
        """How the planes are divided on a host, and which rank of it this is."""
        return Shards(self.choices.sharding.ranks, self.place.local_rank)

    def noise(self, step: int) -> StepNoise | None:
        """Returns the noise on the embeddings of a step; None where there is none."""
        alpha = self.regularization.neftune_alpha
        return StepNoise(alpha, self.seed, step) if alpha else None


@dataclass(frozen=True)
class AppliedStep:
    """The report of a step whose last update is applied."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    spans: list[Span]
    """The list is empty if the device was lost meanwhile, with its clock."""
    unit_norms: list[float]
    """Gradient norm of each unit, in the order of the model's units."""
    sequence_sums: list[list[float]] = field(default_factory=list)
    """Sums of `StepResult`, of a step of pairs."""
