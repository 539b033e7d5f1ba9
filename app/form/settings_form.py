"""The settings form is data here: each field of `TrainConfig` is a `Setting`, which describes the
component of the page that shows it.

Settings are generated from the fields and their docstrings. This file needs no gradio;
`panels.component` makes the components.

All values pass through this file, in both directions:
- `shown_values` turns a config into the values of components.
- `read_config` turns the values of components into a config.

Numbers are entered in text boxes, so that `1e-5`, `auto` and an empty box are possible, as in a
preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from app.form import adapter_labels, preference_labels, source_labels
from engine.config.help_texts import field_docs
from engine.config.optimizers import OPTIMIZERS
from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError

_UNPRINTABLE = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")
"""Characters that YAML refuses, or takes for the end of a line."""

Kind = Literal["text", "lines", "switch", "choice", "whole", "number"]
"""Kind of a component's value."""

SECTION_TITLES = {
    "": "Run",
    "model": "Model",
    "data": "Data",
    "data.columns": "Columns of the data",
    "train": "Training",
    "preference": "Preferences",
    "engine": "Engine (experts)",
    "output": "Output",
}

LABELS = {
    "name": "Run name",
    **source_labels.LABELS,
    "train.steps": "Train for",
    "train.epochs": "Train for",
    "train.batch_size": "Batch size",
    "train.method": "What is trained",
    "train.part_names": "Parameters to train (one pattern a line)",
    "train.last_blocks": "Last blocks to train",
    "train.micro_batch_size": "Micro-batch size",
    "train.eps": "AdamW epsilon",
    "train.beta1": "AdamW beta 1",
    "train.beta2": "AdamW beta 2",
    "train.max_grad_norm": "Gradient norm to clip to",
    "train.neftune_alpha": "NEFTune: noise on embeddings (alpha)",
    "train.nonfinite": "A loss that is not finite",
    "train.patience": "End early after (evaluations)",
    **preference_labels.LABELS,
    "engine.gpus": "GPUs that compute together",
    "engine.across_nodes": "Weights and moments of several nodes",
    "engine.gpu_memory_gib": "GPU memory cap (GiB)",
    "engine.states": "Where the model lives",
    "engine.disk": "Disk for what fits nowhere else (folder)",
    "output.checkpoint": "Kind of checkpoints",
    "output.checkpoint_every": "Checkpoint every (steps)",
    "output.keep_checkpoints": "Checkpoints to keep",
    "output.eval_every": "Evaluate every (steps)",
    "output.keep_best": "Best weights",
    "output.exact_match_samples": "Exact-match samples",
    "output.sample_prompts": "Sample prompts (one a line)",
    "output.sample_tokens": "Sample tokens",
    "output.timeline_every": "Timeline every (steps)",
    "output.export": "Export when finished",
    "output.export_from": "Weights to export",
    "output.export_dtype": "Precision of the export",
    "output.price_per_kwh": "Price of electricity (a kWh)",
    "output.webhook": "Web address to tell when the run ends",
    "output.trackers": "Trackers (one a line)",
    **adapter_labels.LABELS,
}

CHOICE_LABELS: Mapping[str, Mapping[str, str]] = {
    **source_labels.CHOICE_LABELS,
    **preference_labels.CHOICE_LABELS,
    "train.optimizer": {name: each.label for name, each in OPTIMIZERS.items()},
    "output.checkpoint": {
        "full": "full: the run can be resumed",
        "weights": "weights alone: no resume",
        "none": "none are written",
    },
    "output.keep_best": {
        "loss": "kept: those with the lowest validation loss",
        "exact_match": "kept: those with the most right answers",
        "none": "not kept",
    },
    "output.export_from": {"best": "the best that are kept", "last": "those of the last step"},
    "output.export_dtype": {
        "bfloat16": "bfloat16",
        "float32": "float32, the whole masters",
    },
    "engine.activation_checkpointing": {
        "full": "block inputs, on the GPU",
        "offload": "block inputs, in RAM",
        "offload_pairs": "every second block's input, in RAM",
        "none": "all activations",
    },
    "engine.gradients": {"host": "in RAM", "gpu": "on the GPU, until they are applied"},
    "engine.across_nodes": {
        "replicate": "each node has a copy",
        "shard": "each node has a shard",
    },
    "engine.states": {"host": "all of it in RAM"},
    "engine.kernels": {"compiled": "compiled by torch", "eager": "one by one"},
    **adapter_labels.CHOICE_LABELS,
}

PROMINENT = ("name", "model.source", "data.source", "train.steps", "train.epochs")
"""Fields that are always visible; all others are folded away."""
FIRST = ("train.learning_rate", "train.batch_size", "data.max_seq_len", "model.dtype")
"""Fields that come first among the others."""

SHORT_HELP = {
    **source_labels.SHORT_HELP,
    "train.steps": "",
    "train.epochs": "",
    "train.batch_size": "Examples per update.",
    "train.optimizer": (
        "14, 10 or 8.03 bytes of RAM a parameter, fp32 masters and gradient included (2 more in "
        "float32; 10 for embeddings in 8 bits). Smaller moments change results slightly. "
        "Muon takes 10 bytes for the matrices of blocks, and trains on one GPU."
    ),
    "train.method": (
        "A frozen parameter takes 2 bytes of RAM (4 in float32), and units below the first trained "
        "one have no backward."
    ),
    "train.part_names": "Full names, such as model.layers.*.mlp.* or lm_head.weight.",
    "train.last_blocks": "All parameters of so many blocks; final norm and head are named above.",
    **preference_labels.SHORT_HELP,
    "train.learning_rate": "How big each update is. Start with the default.",
    "train.decay_steps": "Of warmup_stable_decay, at the end; empty: a tenth of the run.",
    "train.min_learning_rate": "Reached by the end of the run.",
    "train.label_smoothing": "Of the loss of steps; 0 is none. Validation losses are without it.",
    "train.neftune_alpha": "In training alone; 5 is usual, 0 is none.",
    "engine.gpus": "Of this machine. Each computes its share of the rows of every step.",
    "engine.across_nodes": "For runs that torchrun starts on several nodes.",
    "engine.states": (
        "auto: the first units live on the GPU as far as it has room; they take no RAM and are not "
        "moved. The others live in RAM and pass through the GPU in each step."
    ),
    "engine.gradients": "On the GPU they take 2 bytes a parameter there instead of in RAM.",
    "engine.disk": "A folder on a local disk. Each step then writes there, which wears it.",
    **adapter_labels.SHORT_HELP,
}


@dataclass(frozen=True)
class Setting:
    """How the form shows one field of `TrainConfig`."""

    dotted: str
    """Dotted name with the field's sections first, as in `train.batch_size`."""
    kind: Kind
    choices: tuple[str, ...]
    """Possible values of a setting of kind `choice`."""
    auto: bool
    """Whether the value can be `auto`, which lets the planner choose."""
    optional: bool
    """Whether the value can be None."""
    mixed: bool
    """Whether the value can be one text or a list of texts with settings for each. The list is
    shown as YAML on one line.
    """
    help: str

    @property
    def section(self) -> str:
        return self.dotted.rpartition(".")[0]

    @property
    def label(self) -> str:
        own = self.dotted.rpartition(".")[2]
        return LABELS.get(self.dotted) or own.replace("_", " ").capitalize()

    @property
    def elem_id(self) -> str:
        """Id of the component in the page. `train.js` reads the field's name from it, and uses it
        to mark an invalid field.
        """
        return "field-" + self.dotted.replace(".", "-")

    @property
    def empty_means(self) -> str:
        """The word that an empty text box stands for; empty if a value is required."""
        if self.auto:
            return AUTO
        return "none" if self.optional else ""

    def holds(self, shown: Any) -> bool:
        """Returns whether the component can show this value; it is None for an empty component."""
        return shown is None or isinstance(shown, bool if self.kind == "switch" else str)

    def show(self, value: Any) -> Any:
        """Returns the value that the component shows for a config value."""
        if self.kind in ("switch", "choice"):
            return value
        if value is None or (value == AUTO and self.auto):
            return ""
        if self.kind == "lines":
            return "\n".join(map(_as_line, value))
        if isinstance(value, tuple):  # a mix of data sets, on one line as in a preset
            parts = [what_is_given(dataclasses.asdict(part)) for part in value]
            return in_yaml_line(parts)
        if self.kind == "text" and self.optional:
            # A text that would be read as "no value" is put in quotes.
            return json.dumps(value) if self._means_empty(value) else _as_line(value)
        return _shortest(value) if isinstance(value, float) else str(value)

    def read(self, shown: Any) -> Any:
        """Returns the config value for a component's value. A text that cannot be parsed is
        returned unchanged, and the config rejects it. Raises ConfigError for an empty box that
        needs a number.
        """
        if self.kind in ("switch", "choice"):
            return shown
        text = "" if shown is None else str(shown).strip()
        if self.kind == "lines":
            return [_of_line(line) for line in text.splitlines() if line.strip()]
        if self.kind == "text":
            return self._read_text(text)
        return self._read_number(text)

    def _read_text(self, text: str) -> Any:
        if self.optional:
            return None if not text or self._means_empty(text) else _of_line(text)
        if self.mixed and text.startswith("["):
            return _listed(text)
        return text

    def _read_number(self, text: str) -> Any:
        if text and not self._means_empty(text):
            return _number_or_text(text)
        if self.auto:
            return AUTO
        if self.optional:
            return None
        raise ConfigError(self.dotted, "this is empty; give a number.")

    def _means_empty(self, text: str) -> bool:
        """Returns whether a text is one of the words for an empty box: `auto`, `none` or `null`."""
        return text.lower() in (self.empty_means, "null")


@cache
def settings() -> tuple[Setting, ...]:
    """Returns one setting for each field of `TrainConfig`, in the order of a preset."""
    docs = field_docs()
    found: list[Setting] = []

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            dotted, hint = prefix + field.name, hints[field.name]
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                walk(hint, f"{dotted}.")
            else:
                found.append(_setting(dotted, hint, docs[dotted]))

    walk(TrainConfig, "")
    return tuple(found)


def shown_values(config: TrainConfig) -> dict[str, Any]:
    """Returns the values of the components by dotted field name."""
    values = {}
    for setting in settings():
        value: Any = config
        for part in setting.dotted.split("."):
            value = getattr(value, part)
        values[setting.dotted] = setting.show(value)
    return values


def shown_changes(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the component values for config values, both by dotted field name."""
    return {
        setting.dotted: setting.show(changes[setting.dotted])
        for setting in settings()
        if setting.dotted in changes
    }


def read_config(shown: dict[str, Any]) -> TrainConfig:
    """Returns the validated config for the values of the components. Raises ConfigError, which
    names the first invalid field.
    """
    tree: dict[str, Any] = {}
    for setting in settings():
        *path, last = setting.dotted.split(".")
        section = tree
        for part in path:
            section = section.setdefault(part, {})
        section[last] = setting.read(shown[setting.dotted])
    return TrainConfig.from_dict(tree)


def describe_error(error: ConfigError) -> str:
    """Returns the error's sentence, with the field named by its label in the form. A form has no
    null, which stands for an empty box in a preset.
    """
    problem = re.sub(r"\bnull\b", "nothing", str(error).removeprefix(f"{error.field}: "))
    return f"{_labels().get(error.field, error.field)}: {problem}"


def as_labeled(sentence: str) -> str:
    """Returns a sentence from the engine with each setting named by its label in the form."""
    labels = _labels()
    dotted_name = r"\b[a-z]+(?:\.[a-z_0-9]*[a-z0-9])+"
    return re.sub(dotted_name, lambda found: labels.get(found[0], found[0]), sentence)


@cache
def _labels() -> dict[str, str]:
    """Returns the form's label of each setting, and of each group of settings inside a section."""
    groups = {name: title for name, title in SECTION_TITLES.items() if "." in name}
    return groups | {setting.dotted: setting.label for setting in settings()}


def _setting(dotted: str, hint: Any, doc: str) -> Setting:
    """Returns the setting of a field whose type is `hint`, such as `int | Literal["auto"]`."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    options = typing.get_args(hint) if is_union else (hint,)
    literals: list[Any] = []
    plain: list[Any] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            literals.extend(typing.get_args(option))
        else:
            plain.append(option)
    kinds: dict[Any, Kind] = {
        bool: "switch",
        int: "whole",
        float: "number",
        str: "text",
        tuple[str, ...]: "lines",
    }
    kind: Kind = next((kinds[option] for option in plain if option in kinds), "choice")
    return Setting(
        dotted,
        kind,
        choices=tuple(literals) if kind == "choice" else (),
        auto=kind != "choice" and AUTO in literals,
        optional=type(None) in plain,
        mixed=any(typing.get_origin(option) is tuple for option in plain),
        help=re.sub(r"\bnull\b", "an empty box", doc.replace("`", "")),
    )


def what_is_given(tree: dict[str, Any]) -> dict[str, Any]:
    """Returns a mapping without null values and without mappings that hold only nulls."""
    given = {}
    for key, item in tree.items():
        kept = what_is_given(item) if isinstance(item, dict) else item
        if kept is not None and kept != {}:
            given[key] = kept
    return given


def in_yaml_line(value: Any) -> str:
    """Returns a text or a list as one line that is both JSON and YAML."""
    text = json.dumps(value, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _as_line(text: str) -> str:
    """Returns a text as one line for a box: unchanged, or as JSON if `_of_line` would not read the
    same text back from the line.
    """
    is_plain = text == text.strip() and len(text.splitlines()) == 1 and text[0] != '"'
    return text if is_plain else json.dumps(text)


def _of_line(line: str) -> str:
    """Returns the text that `_as_line` turned into this line."""
    line = line.strip()
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(line))
    return line


def _listed(text: str) -> Any:
    """Returns the list that a text spells in YAML, or the text itself if it is not a list."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return found if isinstance(found, list) and found else text


def _number_or_text(text: str) -> int | float | str:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        return float(text)
    return text


def _shortest(value: float) -> str:
    """Returns a float in its usual short form: 1e-5, 0.01, 3."""
    text = f"{value:.10g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else text
