"""The objective of a run (`train.objective`), and the preference section of a `TrainConfig`: how a
run learns from pairs of answers, of which one was chosen and one rejected, or from answers that are
marked as good or bad. No torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from engine.config.data_settings import DataConfig, Reading
from engine.config.regularization import Regularization
from engine.errors import ConfigError

OBJECTIVE = "train.objective"
ObjectiveName = Literal["sft", "dpo", "orpo", "kto"]
MOST_BETA = 1000
"""A larger weight must be a typing error."""
Weight = Annotated[float, Meta(ge=0, le=MOST_BETA, description="1 is usual")]
"""Weight of a term of the loss."""


@dataclass(frozen=True)
class PreferenceConfig:
    """Settings of learning from preferences, by the definitions of TRL."""

    beta: Annotated[float, Meta(gt=0, le=MOST_BETA, description="0.1 is usual")] = 0.1
    """With `dpo`, a larger one keeps the model nearer to the weights with which it began (with the
    loss `ipo` it is that method's tau). With `orpo`, it is the weight of the odds ratio.
    """

    loss: Literal["sigmoid", "ipo", "robust"] = "sigmoid"
    """DPO has this form: the usual one, IPO, which sets a margin, or one for pairs of which some
    are the wrong way round.
    """

    label_smoothing: Annotated[float, Meta(ge=0, lt=0.5, description="0.1 is usual")] = 0.0
    """With the loss `robust`, this share of the pairs is taken to be the wrong way round; less
    than 0.5.
    """

    sft_weight: Annotated[float, Meta(ge=0, le=MOST_BETA, description="0 leaves it out")] = 0.0
    """DPO's loss has the mean cross-entropy of the chosen answers added with this weight."""

    desirable_weight: Weight = 1.0
    """KTO weights the losses of good answers so. Where there are more bad ones, a larger one evens
    that out.
    """

    undesirable_weight: Weight = 1.0
    """KTO weights the losses of bad answers so."""


@dataclass(frozen=True)
class Objective(PreferenceConfig):
    """The objective of a run together with the settings of preferences."""

    name: ObjectiveName = "sft"
    """The value of `train.objective`."""

    @property
    def is_preference(self) -> bool:
        """Whether the run learns from preferences."""
        return self.name != "sft"

    @property
    def reads(self) -> Reading:
        """What rows become."""
        if self.name == "kto":
            return "labels"
        return "pairs" if self.is_preference else "examples"

    @property
    def needs_reference(self) -> bool:
        """Whether answers are compared with those of the weights before the first step."""
        return self.name in ("dpo", "kto")

    @property
    def has_pass(self) -> bool:
        """Whether other answers pass without gradients before each step (KTO)."""
        return self.name == "kto"

    @property
    def sequences(self) -> int:
        """Number of lines of tokens of a row of a batch: a pair is two."""
        return 2 if self.reads == "pairs" else 1

    def check_with(self, train_on: str, regularization: Regularization) -> None:
        """Raises ConfigError for settings that do not go together. `train_on` is `data.train_on`,
        and `regularization` acts on training steps.
        """
        self._check_together()
        if not self.is_preference:
            return
        for name, value in vars(regularization).items():
            if value:
                raise ConfigError(
                    f"train.{name}",
                    f"{value} is given, but it is for answers as they are written; set it to 0, or "
                    f"{OBJECTIVE} to sft.",
                )
        if train_on == "all":
            raise ConfigError(
                "data.train_on",
                f"preferences are about answers alone; set data.train_on to assistant, or "
                f"{OBJECTIVE} to sft.",
            )

    def _check_together(self) -> None:
        """Raises ConfigError for a setting that another one makes meaningless."""
        is_dpo = self.name == "dpo"
        if self.label_smoothing and not (is_dpo and self.loss == "robust"):
            raise ConfigError(
                "preference.label_smoothing",
                f"{self.label_smoothing} is given, but only DPO's loss robust smooths labels; set "
                f"preference.loss to robust with {OBJECTIVE} dpo, or this to 0.",
            )
        if self.sft_weight and not is_dpo:
            raise ConfigError(
                "preference.sft_weight",
                f"{self.sft_weight} is given, but only DPO adds this term; set {OBJECTIVE} to dpo, "
                "or this to 0.",
            )
        weights = self.desirable_weight, self.undesirable_weight
        if weights != (1.0, 1.0) and self.name != "kto":
            raise ConfigError(
                "preference.desirable_weight",
                f"this or undesirable_weight is not 1, but only KTO weights answers; set "
                f"{OBJECTIVE} to kto, or both to 1.",
            )
        if weights == (0.0, 0.0):
            raise ConfigError(
                "preference.desirable_weight",
                "this and undesirable_weight are both 0, so nothing is learned; raise one of them.",
            )
        if self.loss != "sigmoid" and not is_dpo:
            raise ConfigError(
                "preference.loss",
                f"{self.loss} is a form of DPO; set {OBJECTIVE} to dpo, or this to sigmoid.",
            )


class PairedData(DataConfig):
    """The data section of a run that reads both answers of each pair."""

    @property
    def reads(self) -> Reading:
        return "pairs"


class LabeledData(DataConfig):
    """The data section of a run that reads answers marked as good or bad."""

    @property
    def reads(self) -> Reading:
        return "labels"


_READ_AS = {"examples": DataConfig, "pairs": PairedData, "labels": LabeledData}


def read_as(data: DataConfig, reads: Reading) -> DataConfig:
    """Returns the same settings, for a run whose rows become what `reads` names."""
    return _READ_AS[reads](**vars(data))
