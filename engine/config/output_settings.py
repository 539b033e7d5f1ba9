"""`OutputConfig` is the section of a preset about what a run writes and reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

from engine.config.export_choice import ExportDtype, ExportForm, ExportFrom
from engine.config.limits import check_limits, web_address
from engine.errors import ConfigError

CheckpointKind = Literal["full", "weights", "none"]
"""Kinds of checkpoints (`output.checkpoint`)."""
KeepBest = Literal["loss", "exact_match", "none"]
"""Criteria by which the best weights are kept (`output.keep_best`)."""
TRACKERS = ("tensorboard", "trackio", "wandb", "mlflow")
"""Trackers that curves can also go to (`output.trackers`)."""
MOST_PROMPTS = 50
"""Largest number of prompts that an evaluation answers."""


@dataclass(frozen=True)
class OutputConfig:
    """Settings of what a run writes and reports."""

    checkpoint: CheckpointKind = "full"
    """`full` checkpoints hold the weights and AdamW's moments: the run can be resumed from them.
    `weights` hold the fp32 masters alone, in a third of the space that fp32 moments need. They can
    be exported, chatted with and trained on from in a new run, but the run cannot be resumed.
    `none` writes no checkpoint, not even at a stop or a failure; only the export at the end is
    kept.
    """

    checkpoint_every: Annotated[int, Meta(ge=0)] = 0
    """A checkpoint is written after every so many steps; 0 writes one at the end only."""

    keep_checkpoints: Annotated[int, Meta(ge=1)] = 2
    """This many checkpoints, the newest ones, are kept on disk."""

    eval_every: Annotated[int, Meta(ge=0)] = 0
    """The validation rows are evaluated before the first step and after every so many steps; 0
    evaluates at the end only.
    """

    keep_best: KeepBest = "loss"
    """The best weights so far are kept beside the checkpoints: those with the lowest validation
    loss (`loss`), or those that answer most of `exact_match_samples` exactly and, of equal ones,
    have the lower loss (`exact_match`); or none are kept (`none`). They are fp32 masters, 4 bytes a
    parameter, and twice that while new ones take the place of the old: they can be exported,
    chatted with and trained on from. Nothing is kept that is no better than before training, with
    `eval_every` at 0, or where the disk has no room for it.
    """

    exact_match_samples: Annotated[int, Meta(ge=0)] = 0
    """This many validation examples are answered greedily before and after training, and compared
    with the expected answer. They are also answered at each evaluation where `keep_best` is
    `exact_match`; elsewhere the first three are, in at most 2 % of the run's time.
    """

    sample_prompts: tuple[str, ...] = ()
    """These prompts are answered greedily before the first step and at each evaluation; the answers
    are kept with the run. Without prompts there are no answers.
    """

    sample_tokens: Annotated[int, Meta(ge=1)] = 64
    """Largest number of tokens of each of these answers."""

    timeline_every: Annotated[int, Meta(ge=1)] = 10
    """A timeline of all units is recorded after every so many steps (at most 500 are kept,
    fewer for models of very many blocks; the log says when there are no more).
    """

    export: bool = True
    """The run writes a Hugging Face folder when it ends."""

    export_from: ExportFrom = "best"
    """The folder has the `best` weights, if they are kept and better than the last, or the `last`.
    """

    export_dtype: ExportDtype = "auto"
    """The folder has its weights in this dtype. `auto` means the dtype of the model. `float32`
    writes the fp32 masters, which lose nothing and take twice the space of bfloat16.
    """

    export_form: ExportForm = "model"
    """With the method `lora`, the folder has the whole model, into which the adapters are merged
    (`model`), or the adapters alone, as PEFT writes and reads them (`adapter`).
    """

    price_per_kwh: float | None = None
    """A kilowatt hour has this price, in any currency: the fit report estimates what the run's
    electricity costs.
    """

    webhook: str | None = None
    """This address gets a POST of JSON when the run ends: {text, run, name, state, reason, step,
    loss, ...}.
    """

    trackers: tuple[str, ...] = ()
    """The curves also go to these trackers, while the run continues: any of `tensorboard`,
    `trackio`, `wandb` (Weights & Biases) and `mlflow`. Data may leave this machine for them; what
    is checked before Start says where they go. Logins come from the trackers' own settings.
    """

    def check(self) -> None:
        """Raises ConfigError for the first rule that is broken."""
        if self.keep_best == "exact_match" and not self.exact_match_samples:
            raise ConfigError(
                "output.keep_best",
                "exact_match compares answers to validation prompts, and none is asked; set "
                "output.exact_match_samples, or output.keep_best to loss.",
            )
        if any(not prompt.strip() for prompt in self.sample_prompts):
            raise ConfigError("output.sample_prompts", "one of the prompts is empty; leave it out.")
        check_limits("output.sample_prompts", len(self.sample_prompts), Meta(le=MOST_PROMPTS))
        for name in self.trackers:
            if name not in TRACKERS:
                known = ", ".join(TRACKERS)
                raise ConfigError("output.trackers", f"{name!r} is unknown; known are {known}.")
        if len(set(self.trackers)) < len(self.trackers):
            raise ConfigError("output.trackers", "a tracker is named twice; name each once.")
        if self.webhook is not None:
            web_address("output.webhook", self.webhook)

    @property
    def best_by(self) -> Literal["loss", "exact_match"]:
        """Criterion by which evaluations are compared, whether or not weights are kept."""
        return "exact_match" if self.keep_best == "exact_match" else "loss"

    @property
    def keeps_best(self) -> bool:
        """Whether the best weights of a run that has validation rows are to be kept."""
        return self.keep_best != "none" and self.eval_every > 0
