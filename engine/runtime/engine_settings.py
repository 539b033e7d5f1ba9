"""An engine has settings, and reports each step that it has applied."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.regularisation import NO_REGULARISATION, Regularisation
from engine.embedding.embedding_noise import StepNoise
from engine.exchange.exchange import Exchange
from engine.exchange.place import ALONE, Place
from engine.plan.choices import PlanChoices
from engine.plan.shards import Shards
from engine.plan.step_plan import Span


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine are its plan and the sizes that go with it."""

    choices: PlanChoices
    tokens: int
    """The largest micro-batch has this many positions (rows x length). The buffers of boundaries
    are made for this size.
    """
    loss_chunk: int = 1024
    """The logits of this many positions exist at once."""
    max_grad_norm: float | None = 1.0
    seed: int = 0
    exchange: Exchange | None = None
    """The other ranks are reached through it; None where there are none."""
    regularisation: Regularisation = NO_REGULARISATION
    """Training steps are changed by it."""

    @property
    def place(self) -> Place:
        """Returns which of all ranks this is."""
        return self.exchange.place if self.exchange else ALONE

    @property
    def shards(self) -> Shards:
        """Returns how the planes are divided on a host, and which rank of it this is."""
        return Shards(self.choices.ranks, self.place.on_host)

    def noise(self, step: int) -> StepNoise | None:
        """Returns the noise on the embeddings of a step; None where there is none."""
        alpha = self.regularisation.neftune_alpha
        return StepNoise(alpha, self.seed, step) if alpha else None


@dataclass(frozen=True)
class AppliedStep:
    """An `AppliedStep` is the report of a step whose last update is applied."""

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    spans: list[Span]
    """The list is empty if the device was lost meanwhile, with its clock."""
    unit_norms: list[float]
    """The gradient norm of each unit, in the order of the model's units, is given here."""
    line_sums: list[list[float]] = field(default_factory=list)
    """A step of pairs has the sums of `StepResult` here."""
