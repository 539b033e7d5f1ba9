"""`TrainConfig` is everything that defines a run, as plain and validated data. It is loaded from
YAML presets and saved to them.

No torch is imported: the command line and the app read presets before anything heavy is there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from msgspec import Meta

from engine.config.adapters import ALL_LINEAR, Adapters
from engine.config.data_settings import DataConfig
from engine.config.engine_config import AUTO, Auto, EngineConfig
from engine.config.gpu_shares import check_shares
from engine.config.limits import LARGEST
from engine.config.optimizers import ADAMW, Optimizer, OptimizerSettings
from engine.config.output_settings import OutputConfig
from engine.config.preference_settings import Objective, ObjectiveName, PreferenceConfig, read_as
from engine.config.regularization import Regularization
from engine.config.renamed_settings import refuse_renamed
from engine.config.rope_settings import ROPE_SCALING, USUAL_FACTOR, RopeScaling, check_rope
from engine.config.trained_parts import Parts, check_parts
from engine.config.tree import assign, build, override, read_preset
from engine.errors import ConfigError
from engine.safe_files import write_whole

FORMAT = 2
"""Format of presets, and of the settings and the record in a run's folder. Every file that is saved
begins with it; a preset that is written by hand need not have it.
"""


@dataclass(frozen=True)
class ModelConfig:
    """Settings that choose the model."""

    source: str = ""
    """The model is a decoder-only language model: a local folder or a Hugging Face id."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads the weights; `random` initializes them from the model's own configuration.
    """

    start_from: str | None = None
    """The run trains on from the weights of an earlier run: this is the run's folder, of which the
    newest checkpoint counts, its folder `best`, or the folder of one checkpoint. Steps, moments and
    the order of rows begin anew. Leave empty to start from the model above.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """The GPU computes in this type. `bfloat16` keeps an exact fp32 master in split planes (14
    bytes a parameter on the host, gradient and fp32 moments included); `float32` computes in fp32
    (16 bytes). `train.optimizer` makes the moments smaller.
    """

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention is computed by this implementation of transformers. `auto` goes document by
    document, without masks, where that is exact for the model, and is `sdpa` or `eager` elsewhere.
    """

    rope_scaling: RopeScaling = "none"
    """Rotary embeddings are scaled for rows that are longer than those of the model: by `yarn` or
    `linear`, or by `dynamic` when the trained model reads such rows. Short rows are then read a
    little differently too, so the model must be trained to get used to it.
    """

    rope_factor: float = USUAL_FACTOR
    """With `rope_scaling`, rows may be this many times as long as those of the model."""

    def check(self) -> None:
        """Raises ConfigError when no model is given, or for a factor that scales nothing."""
        check_rope(self)
        if not self.source.strip():
            raise ConfigError(
                "model.source", "no model is given; name a local folder or a Hugging Face id."
            )


@dataclass(frozen=True)
class OptimConfig:
    """Settings of the objective, the optimizer and its steps."""

    objective: ObjectiveName = "sft"
    """`sft` trains answers as they are written, of a pair the chosen one alone. `dpo` and `orpo`
    learn from both answers of each pair (columns chosen and rejected), and count in pairs: those
    of a step are `train.batch_size`. `kto` learns from answers that a column `label` marks as good
    or bad. `dpo` and `kto` compare with the weights before the first step. Their settings are in
    the section `preference`.
    """

    steps: Annotated[int | None, Meta(ge=1, le=LARGEST["steps"])] = None
    """Number of optimizer steps of the run; give this or `epochs`. When neither is given, it makes
    one pass.
    """

    epochs: Annotated[float | None, Meta(gt=0, description="1 is one pass")] = None
    """The run makes this many passes over the training rows; give this or `steps`."""

    batch_size: Annotated[int, Meta(ge=1, le=LARGEST["batch_size"])] = 32
    """Number of rows of an optimizer step."""

    micro_batch_size: Annotated[int | Auto, Meta(ge=1)] = AUTO
    """Number of rows that pass through a block at once; it must divide `batch_size`. `auto` takes
    the largest that fits.
    """

    optimizer: Optimizer = ADAMW
    """AdamW keeps its two moments in fp32 (`adamw`), in bf16 (`adamw_bf16`) or in 8 bits
    (`adamw_8bit`). With gradients and fp32 masters, which stay, a parameter takes 14, 10 or about
    8.03 bytes of RAM (in `float32` 16, 12 or 10.03). Results change slightly with smaller moments.
    `muon` updates the matrices of blocks with Muon, which keeps one state (10 bytes, in `float32`
    12), and everything else with `adamw`.
    """

    method: Literal["full", "parts", "lora"] = "full"
    """Every parameter is trained (`full`), those alone that `part_names` and `last_blocks` name
    (`parts`), or adapters that are added to layers (`lora`). The others are frozen: a frozen one
    takes 2 bytes of RAM (4 in `float32`), and nothing is computed below the first parameter that is
    trained but a forward pass.
    """

    part_names: tuple[str, ...] = ()
    """With the method `parts`, parameters are trained whose full name fits one of these patterns,
    such as `model.layers.*.mlp.*` or `lm_head.weight`; * stands for any letters.
    """

    last_blocks: Annotated[int, Meta(ge=0)] = 0
    """With the method `parts`, all parameters of this many blocks are trained, counted from the
    last. Final norm and head are not among them: name them in `part_names`.
    """

    lora_rank: int = 16
    """With the method `lora`, a layer of `in` and `out` features gets two factors of this width,
    which are trained: `lora_A` [rank, in] and `lora_B` [out, rank].
    """

    lora_alpha: float = 32.0
    """What an adapter adds to the result of its layer is multiplied by `lora_alpha / lora_rank`."""

    lora_dropout: float = 0.0
    """So much of what goes into an adapter is dropped in training, drawn anew in each step."""

    lora_rslora: bool = False
    """Adapters are multiplied by `lora_alpha / sqrt(lora_rank)` instead (rank-stabilized LoRA)."""

    lora_targets: tuple[str, ...] = (ALL_LINEAR,)
    """Layers that get an adapter: `all-linear` is every linear layer of every block; a name such as
    `q_proj` is every layer whose full name ends with it; in a pattern, * stands for any letters.
    """

    lora_save_modules: tuple[str, ...] = ()
    """These modules are trained whole, beside the adapters: all whose full name ends with one of
    these, such as `norm` or `lm_head`.
    """

    lora_target_parameters: tuple[str, ...] = ()
    """Experts that are stacked in one parameter get adapters, too: those whose full name ends with
    one of these, such as `experts.gate_up_proj` and `experts.down_proj`, or fits it as a pattern.
    """

    learning_rate: Annotated[float, Meta(gt=0, description="1e-5 is usual")] = 1.0e-5
    """The learning rate of AdamW rises to this peak."""

    schedule: Literal["cosine", "linear", "constant", "warmup_stable_decay"] = "cosine"
    """After warm-up, the learning rate falls along a cosine or a line, or stays constant. With
    `warmup_stable_decay` it stays, and falls along a cosine in the last `decay_steps`.
    """

    warmup_steps: Annotated[int, Meta(ge=0)] = 10
    """The learning rate rises from 0 over this many steps."""

    decay_steps: Annotated[int | None, Meta(ge=1)] = None
    """With the schedule `warmup_stable_decay`, the learning rate falls over so many steps at the
    end; null takes a tenth of the run.
    """

    min_learning_rate: float = 0.0
    """The learning rate falls to this by the end of the run."""

    weight_decay: Annotated[float, Meta(ge=0, description="give 0 or more")] = 0.01
    """The decoupled weight decay acts on weight matrices only (not on norms and biases)."""

    beta1: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    """AdamW decays its first moment by this factor."""

    beta2: Annotated[float, Meta(ge=0, lt=1)] = 0.999
    """AdamW decays its second moment by this factor."""

    eps: Annotated[float, Meta(gt=0, description="1e-8 is usual")] = 1.0e-8
    """AdamW adds this to the root of the second moment, by which it divides."""

    max_grad_norm: Annotated[float | None, Meta(gt=0, description="give null to never clip")] = 1.0
    """The global gradient norm is clipped to this; null never clips."""

    label_smoothing: Annotated[float, Meta(ge=0, lt=1, description="0.1 is usual")] = 0.0
    """This share of a target's probability is spread evenly over the vocabulary, as by the Trainer
    of transformers. The loss of training steps has it; validation losses are plain cross-entropies.
    """

    neftune_alpha: Annotated[float, Meta(ge=0, description="5 is usual, and 0 adds no noise")] = 0.0
    """In training, each embedding gets uniform noise of at most `neftune_alpha / sqrt(tokens of the
    row x width)` (NEFTune); 5 is usual, 0 adds none. Evaluations and samples are without noise.
    """

    nonfinite: Literal["stop", "skip"] = "stop"
    """A step whose loss or gradient norm is not a finite number changes no weight. `stop` then
    saves the step before it and ends the run; `skip` passes the step without an update and
    continues, at most 5 times in a row and 100 times in a run. Its rows are recorded.
    """

    patience: Annotated[int, Meta(ge=0)] = 0
    """The run ends early once this many evaluations in a row (`output.eval_every`) were not better
    than the best one, by validation loss or by right answers, as `output.keep_best` says; 0 never
    ends it early.
    """

    seed: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 42
    """The data order, dropout and the random initialization depend on this seed."""

    def check(self) -> None:
        """Raises ConfigError for the first rule that is broken."""
        if self.steps is not None and self.epochs is not None:
            raise ConfigError(
                "train.steps",
                "steps and epochs are both given; keep one and set the other to null.",
            )
        if self.micro_batch_size != AUTO and self.batch_size % self.micro_batch_size:
            raise ConfigError(
                "train.micro_batch_size",
                f"{self.micro_batch_size} does not divide train.batch_size {self.batch_size}; "
                "choose a divisor.",
            )
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise ConfigError(
                "train.min_learning_rate",
                f"{self.min_learning_rate} is not between 0 and train.learning_rate "
                f"{self.learning_rate}; lower it.",
            )
        check_parts(self.method, self.part_names, self.last_blocks)
        if self.method == "lora":
            self._adapters.check()

    @property
    def parts(self) -> Parts | Adapters | None:
        """What is trained of the model, or beside it; None where all of it is."""
        if self.method == "lora":
            return self._adapters
        return Parts(self.part_names, self.last_blocks) if self.method == "parts" else None

    @property
    def hyperparameters(self) -> OptimizerSettings:
        """Hyperparameters of the optimizer, which have the same names there."""
        names = [each.name for each in dataclasses.fields(OptimizerSettings)]
        return OptimizerSettings(**{name: getattr(self, name) for name in names})

    @property
    def regularization(self) -> Regularization:
        return Regularization(self.label_smoothing, self.neftune_alpha)

    @property
    def _adapters(self) -> Adapters:
        return Adapters(
            self.lora_rank,
            self.lora_alpha,
            self.lora_dropout,
            self.lora_rslora,
            self.lora_targets,
            self.lora_save_modules,
            self.lora_target_parameters,
        )


@dataclass(frozen=True)
class TrainConfig:
    """Everything that defines a run."""

    name: str = "Untitled"
    """A name that you will recognize later."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: OptimConfig = field(default_factory=OptimConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    # ------------------------------------------------------------------ building

    @classmethod
    def from_dict(cls, tree: Any) -> TrainConfig:
        """Builds and validates a configuration. Raises ConfigError, which names the first unknown,
        mistyped or out-of-range field, or all that have another name now.
        """
        refuse_renamed(tree)
        config = build(cls, tree, "")
        config.validate()
        return config

    @classmethod
    def load(
        cls, path: str | Path, overrides: Sequence[str] = (), within: Path | None = None
    ) -> TrainConfig:
        """Reads a YAML preset and applies `a.b=value` overrides, values in YAML syntax. `within`:
        the folder of runs, for the settings of a run, which somebody else may have written. Raises
        ConfigError.
        """
        tree = read_preset(Path(path), within)
        _refuse_other_format(tree.pop("format", FORMAT))
        for text in overrides:
            override(tree, text)
        return cls.from_dict(tree)

    # ------------------------------------------------------------------ reading data

    @property
    def objective(self) -> Objective:
        """The objective (`train.objective`) with the settings of preferences."""
        return Objective(**vars(self.preference), name=self.train.objective)

    @property
    def read_data(self) -> DataConfig:
        """The data section as the run reads it: rows become examples, or pairs."""
        return read_as(self.data, self.objective.reads)

    @property
    def row_tokens(self) -> int:
        """Number of tokens of a row of a batch at most. A pair has two lines."""
        return self.objective.sequences * self.data.max_seq_len

    @property
    def packs(self) -> bool:
        """Whether several examples may share a row. Answers of preferences never do."""
        return self.data.packing and not self.objective.is_preference

    # ------------------------------------------------------------------ writing

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path, within: Path | None = None) -> None:
        """Writes a preset. When this returns, the complete file is on the disk. `within`: as in
        `load`. Raises OSError.
        """
        tree = {"format": FORMAT} | self.to_dict()
        text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
        write_whole(Path(path), text, Path(path).parent if within is None else within)

    def with_values(self, values: dict[str, Any]) -> TrainConfig:
        """Returns a validated copy with the fields of these dotted names replaced, such as
        ``{"train.steps": 10}``.
        """
        tree = self.to_dict()
        for dotted, value in values.items():
            assign(tree, dotted, value)
        return type(self).from_dict(tree)

    def with_overrides(self, overrides: Sequence[str]) -> TrainConfig:
        """Returns a validated copy with `a.b=value` overrides, values in YAML syntax."""
        tree = self.to_dict()
        for text in overrides:
            override(tree, text)
        return type(self).from_dict(tree)

    @property
    def exports_adapter(self) -> bool:
        """Whether the run exports its adapters alone."""
        return self.train.method == "lora" and self.output.export_form == "adapter"

    # ------------------------------------------------------------------ checking

    def validate(self) -> None:
        """Raises ConfigError for the first rule that is broken."""
        self.model.check()
        self.data.check()
        self.train.check()
        self.objective.check_with(self.data.train_on, self.train.regularization)
        if self.objective.is_preference and self.train.method == "lora" and self.train.lora_dropout:
            raise ConfigError(
                "train.lora_dropout",
                f"{self.train.lora_dropout} is given, but preferences are learned without dropout; "
                "set it to 0, or train.objective to sft.",
            )
        self.engine.check()
        self.output.check()
        rows, size = self.train.batch_size, self.train.micro_batch_size
        check_shares(self.engine.gpus, rows, size, self.engine.disk)
        if self.exports_adapter and self.model.init == "random" and self.model.start_from is None:
            raise ConfigError(
                "output.export_form",
                "adapters beside random weights fit no model that anybody has; set it to model, or "
                "model.init to pretrained.",
            )
        if self.exports_adapter and self.model.rope_scaling != "none":
            raise ConfigError(
                "output.export_form",
                f"adapters alone do not tell of {ROPE_SCALING} {self.model.rope_scaling}, and the "
                "model beside them would read other positions; set it to model.",
            )
        if self.train.patience and not self.output.eval_every:
            raise ConfigError(
                "train.patience",
                f"{self.train.patience} evaluations are waited for, but none is made during the "
                "run; set output.eval_every, or train.patience to 0.",
            )


def _refuse_other_format(value: Any) -> None:
    """Raises ConfigError for a preset of another format."""
    if type(value) is int and value == FORMAT:
        return
    which = "a later version" if type(value) is int and value > FORMAT else "no version"
    raise ConfigError(
        "format",
        f"{str(value)[:40]} is what {which} of Ramstream writes, and this one reads {FORMAT}; "
        "leave the line out if all settings have their names of today.",
    )
