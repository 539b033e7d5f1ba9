"""`TrainConfig`: everything that defines a run, validated, as plain data, loaded from and saved to
YAML presets.

No torch here: the command line and the app read presets before anything heavy is imported.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import yaml

from engine.config.data_settings import DataConfig, check_columns
from engine.config.tree import assign, build, override, read_yaml
from engine.errors import ConfigError
from engine.files import write_whole
from engine.words import GIB

Auto = Literal["auto"]
AUTO: Auto = "auto"

LARGEST = {"max_seq_len": 1 << 24, "steps": 10**9, "batch_size": 1 << 20}
"""Beyond these a number is a slip of the keyboard, and arithmetic on it would take hours."""


MOST_PROMPTS = 50
"""That are answered at each evaluation."""

MOST_PASSES = 1000
"""Of one epoch over the examples of one source among several."""


@dataclass(frozen=True)
class ModelConfig:
    source: str = ""
    """Local folder or Hugging Face id of a decoder-only language model."""

    init: Literal["pretrained", "random"] = "pretrained"
    """`pretrained` loads the weights; `random` initialises them from the model's own configuration.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the GPU computes in. `bfloat16` keeps an exact fp32 master in split planes (14 bytes a
    parameter on the host, gradient included); `float32` computes in fp32 (16 bytes).
    """

    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation of transformers; `auto` goes document by document, without masks,
    where that is exact for the model, and is `sdpa` or `eager` elsewhere.
    """


@dataclass(frozen=True)
class OptimConfig:
    steps: int | None = None
    """Optimizer steps of the run; give this or `epochs`. When neither is given, one epoch."""

    epochs: float | None = None
    """Passes over the training rows; give this or `steps`."""

    batch_size: int = 32
    """Rows per optimizer step."""

    micro_batch_size: int | Auto = AUTO
    """Rows that pass through a block at once; must divide `batch_size`. `auto` takes the largest
    that fits.
    """

    learning_rate: float = 1.0e-5
    """Peak learning rate of AdamW."""

    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after warm-up: cosine or linear down to 0, or constant."""

    warmup_steps: int = 10
    """Steps over which the learning rate rises from 0."""

    weight_decay: float = 0.01
    """Decoupled weight decay, on weight matrices only (none on norms and biases)."""

    beta1: float = 0.9
    """AdamW's decay of the first moment."""

    beta2: float = 0.999
    """AdamW's decay of the second moment."""

    eps: float = 1.0e-8
    """AdamW's epsilon."""

    max_grad_norm: float | None = 1.0
    """Global gradient norm to clip to; null never clips."""

    seed: int = 42
    """Seed of data order, dropout and random initialisation."""


@dataclass(frozen=True)
class EngineConfig:
    device: Literal["auto", "cuda", "cpu"] = AUTO
    """Where blocks compute; `auto` is the GPU when there is one."""

    gpu_memory_gib: float | None = None
    """Hard cap on GPU memory that the plan may use; null is what is free."""

    slots: int | Auto = AUTO
    """Device buffers that hold one streamed block each; 2 lets a prefetch run under the compute of
    the block before.
    """

    save_level: Literal["auto", "boundary_host", "boundary", "all"] = AUTO
    """What is kept of blocks between forward and backward: their inputs on the host, their inputs
    on the device, or all activations (no recompute). `auto` keeps as many blocks' activations as
    there is memory for.
    """

    residency: int | Auto = AUTO
    """Blocks that stay on the device from forward to backward (the last ones), so they are fetched
    once a step.
    """

    rounds: int | Auto = AUTO
    """Whole forward and backward passes that a step's micro-batches are spread over: with few
    tokens at a time activations can be kept. `auto` takes what is fastest and sums gradients
    exactly.
    """

    kernels: Literal["auto", "compiled", "eager"] = AUTO
    """Compiled by torch (fused: faster, and half of the activations) or one by one. `auto` compiles
    in bfloat16 on a GPU where Triton and a C compiler are there.
    """

    def within_cap(self, nbytes: int) -> int:
        """Of so many bytes of GPU memory, those that the plan may use."""
        return (
            nbytes if self.gpu_memory_gib is None else min(nbytes, round(self.gpu_memory_gib * GIB))
        )


@dataclass(frozen=True)
class OutputConfig:
    checkpoint_every: int = 0
    """Steps between checkpoints; 0 writes one at the end only."""

    keep_checkpoints: int = 2
    """Newest checkpoints kept on disk."""

    eval_every: int = 0
    """Steps between evaluations on the held-out rows; 0 evaluates at the end only."""

    exact_match_samples: int = 0
    """Held-out examples answered greedily before and after training, and compared with the expected
    answer.
    """

    sample_prompts: tuple[str, ...] = ()
    """Prompts answered greedily before the first step and at each evaluation; the answers are kept
    with the run. None are, when there are no prompts.
    """

    sample_tokens: int = 64
    """Tokens of each of these answers at most."""

    timeline_every: int = 10
    """Steps between recorded per-unit timelines (at most 500 are kept)."""

    export: bool = True
    """Write a Hugging Face folder when the run ends."""

    price_per_kwh: float | None = None
    """Price of a kilowatt hour, in any currency: the fit report estimates what the run's
    electricity costs.
    """

    webhook: str | None = None
    """Address that is told when the run ends, by a POST of JSON ({text, run, name, state, reason,
    step, loss, ...}).
    """


@dataclass(frozen=True)
class TrainConfig:
    name: str = "Untitled"
    """Name of the run, shown to people."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: OptimConfig = field(default_factory=OptimConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    output: OutputConfig = field(default_factory=OutputConfig)

    # ------------------------------------------------------------------ building

    @classmethod
    def from_dict(cls, tree: Any) -> TrainConfig:
        """Build and validate. Raises ConfigError naming the first unknown, mistyped or out-of-range
        field.
        """
        config = build(cls, tree, "")
        config.validate()
        return config

    @classmethod
    def load(cls, path: str | Path, overrides: list[str] | tuple[str, ...] = ()) -> TrainConfig:
        """Read a YAML preset and apply `a.b=value` overrides (values in YAML syntax)."""
        path = Path(path)
        try:
            tree = read_yaml(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                str(path), "there is no such preset file; give the path of a YAML preset."
            ) from None
        except IsADirectoryError:
            raise ConfigError(
                str(path), "this is a folder; give the path of a YAML preset."
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(str(path), f"the preset cannot be read ({error}).") from None
        except yaml.YAMLError as error:
            line = getattr(getattr(error, "problem_mark", None), "line", None)
            where = f" near line {line + 1}" if line is not None else ""
            raise ConfigError(
                str(path), f"this is not valid YAML{where}; fix the preset."
            ) from None
        if tree is None:
            tree = {}
        if not isinstance(tree, dict):
            raise ConfigError(
                str(path), "a preset is a mapping of sections (model, data, train, ...)."
            )
        for text in overrides:
            override(tree, text)
        return cls.from_dict(tree)

    # ------------------------------------------------------------------ writing

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def save(self, path: str | Path) -> None:
        """Whole, and on the disk when this returns. Raises OSError."""
        write_whole(Path(path), yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True))

    def with_values(self, values: dict[str, Any]) -> TrainConfig:
        """A validated copy with dotted fields replaced, such as ``{"train.steps": 10}``."""
        tree = self.to_dict()
        for dotted, value in values.items():
            assign(tree, dotted, value)
        return type(self).from_dict(tree)

    def with_overrides(self, overrides: list[str] | tuple[str, ...]) -> TrainConfig:
        """The same with `a.b=value` overrides, values in YAML syntax."""
        tree = self.to_dict()
        for text in overrides:
            override(tree, text)
        return type(self).from_dict(tree)

    # ------------------------------------------------------------------ rules across fields

    def validate(self) -> None:
        """Raises ConfigError for the first rule that is broken."""
        if not self.model.source.strip():
            raise ConfigError(
                "model.source", "no model is given; name a local folder or a Hugging Face id."
            )
        for part, weight in self.data.parts():
            if not part.source.strip():
                raise ConfigError(
                    "data.source", "no data set is given; name a file, a folder or a hub id."
                )
            if not 0 < weight <= MOST_PASSES:
                raise ConfigError(
                    "data.source",
                    f"the weight {weight:g} of {part.source} is outside 0 to {MOST_PASSES} (0 "
                    "excluded); 1 visits every example once an epoch.",
                )
        t, d, e, o = self.train, self.data, self.engine, self.output
        for part, _ in self.data.parts():
            check_columns(part)
        _at_least("data.max_seq_len", d.max_seq_len, 2)
        _at_most("data.max_seq_len", d.max_seq_len, LARGEST["max_seq_len"])
        _between("data.eval_fraction", d.eval_fraction, 0.0, 0.9)
        if t.steps is not None and t.epochs is not None:
            raise ConfigError(
                "train.steps",
                "steps and epochs are both given; keep one and set the other to null.",
            )
        if t.steps is not None:
            _at_least("train.steps", t.steps, 1)
            _at_most("train.steps", t.steps, LARGEST["steps"])
        if t.epochs is not None and not t.epochs > 0:
            raise ConfigError(
                "train.epochs", f"{t.epochs} is not above 0; give a positive number of passes."
            )
        _at_least("train.batch_size", t.batch_size, 1)
        _at_most("train.batch_size", t.batch_size, LARGEST["batch_size"])
        if t.micro_batch_size != AUTO:
            _at_least("train.micro_batch_size", t.micro_batch_size, 1)
            if t.batch_size % t.micro_batch_size:
                raise ConfigError(
                    "train.micro_batch_size",
                    f"{t.micro_batch_size} does not divide train.batch_size "
                    f"{t.batch_size}; choose a divisor.",
                )
        if not t.learning_rate > 0 or not math.isfinite(t.learning_rate):
            raise ConfigError(
                "train.learning_rate", f"{t.learning_rate} is not a positive number; 1e-5 is usual."
            )
        _at_least("train.warmup_steps", t.warmup_steps, 0)
        if t.weight_decay < 0:
            raise ConfigError(
                "train.weight_decay", f"{t.weight_decay} is negative; give 0 or more."
            )
        for name in ("beta1", "beta2"):
            value = getattr(t, name)
            if not 0.0 <= value < 1.0:
                raise ConfigError(f"train.{name}", f"{value} is outside 0 to 1 (1 excluded).")
        if not t.eps > 0:
            raise ConfigError("train.eps", f"{t.eps} is not above 0; 1e-8 is usual.")
        if t.max_grad_norm is not None and not t.max_grad_norm > 0:
            raise ConfigError(
                "train.max_grad_norm", f"{t.max_grad_norm} is not above 0; give null to never clip."
            )
        _between("train.seed", t.seed, 0, 2**32 - 1)
        if e.gpu_memory_gib is not None and not e.gpu_memory_gib > 0:
            raise ConfigError(
                "engine.gpu_memory_gib",
                f"{e.gpu_memory_gib} is not above 0; give null for all that is free.",
            )
        if e.slots != AUTO:
            _at_least("engine.slots", e.slots, 1)
        if e.residency != AUTO:
            _at_least("engine.residency", e.residency, 0)
        if e.rounds != AUTO:
            _at_least("engine.rounds", e.rounds, 1)
        for name in ("checkpoint_every", "eval_every", "exact_match_samples"):
            _at_least(f"output.{name}", getattr(o, name), 0)
        _at_least("output.keep_checkpoints", o.keep_checkpoints, 1)
        _at_least("output.timeline_every", o.timeline_every, 1)
        _at_least("output.sample_tokens", o.sample_tokens, 1)
        if any(not prompt.strip() for prompt in o.sample_prompts):
            raise ConfigError("output.sample_prompts", "one of the prompts is empty; leave it out.")
        _at_most("output.sample_prompts", len(o.sample_prompts), MOST_PROMPTS)
        if o.webhook is not None:
            _web_address("output.webhook", o.webhook)


def field_docs() -> dict[str, str]:
    """Dotted field name to its docstring: the app shows these beside the settings."""
    import ast
    import inspect

    docs: dict[str, str] = {}
    sections = _sections()
    for name, cls in {"": TrainConfig, **sections}.items():
        prefix = f"{name}." if name else ""
        (node,) = ast.parse(inspect.getsource(cls)).body
        for item, doc in zip(node.body, node.body[1:]):
            if not isinstance(item, ast.AnnAssign) or prefix + item.target.id in sections:
                continue
            if isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant):
                docs[prefix + item.target.id] = " ".join(str(doc.value.value).split())
    return docs


def _sections(cls: type = TrainConfig, prefix: str = "") -> dict[str, type]:
    """Dotted name of every section, of sections too, to its dataclass."""
    hints, found = typing.get_type_hints(cls), {}
    for f in fields(cls):
        if dataclasses.is_dataclass(hints[f.name]):
            found[prefix + f.name] = hints[f.name]
            found |= _sections(hints[f.name], f"{prefix}{f.name}.")
    return found


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(name, f"{value} is too small; the least is {low}.")


def _at_most(name: str, value: int, high: int) -> None:
    if value > high:
        raise ConfigError(name, f"{value:,} is too large; the most is {high:,}.")


def _web_address(name: str, value: str) -> None:
    try:
        parts = urlsplit(value)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ConfigError(
            name, "this is no web address; it begins with https:// or http:// and names a host."
        )


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(name, f"{value} is outside {low} to {high}.")
