"""The settings form as data: every field of `TrainConfig` in the words and values of one component,
generated from the fields and their docstrings. No gradio needed; `panels.component` makes the
components.

Values travel both ways through this file only: `shown_values` (config to components) and
`read_config` (components to config). Numbers are text boxes, so that `1e-5`, `auto` and nothing at
all can be typed as in a preset.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import yaml

from engine.config.help_texts import field_docs
from engine.config.settings import AUTO, TrainConfig
from engine.errors import ConfigError

SECTION_TITLES = {
    "": "Run",
    "model": "Model",
    "data": "Data",
    "data.columns": "Columns of the data",
    "train": "Training",
    "engine": "Engine",
    "output": "Output",
}

LABELS = {
    "name": "Run name",
    "model.source": "Model",
    "model.init": "Weights to start from",
    "model.dtype": "Precision",
    "data.source": "Data set",
    "data.columns.messages": "Column of the turns",
    "data.columns.prompt": "Column of the prompt",
    "data.columns.completion": "Column of the completion",
    "data.columns.input": "Column added to the prompt",
    "data.columns.system": "Column of the system message",
    "data.columns.tools": "Column of the tools",
    "data.columns.text": "Column of the text",
    "data.max_seq_len": "Sequence length (tokens)",
    "data.train_on": "Tokens to train on",
    "data.eval_fraction": "Held-out share",
    "train.batch_size": "Batch size (rows)",
    "train.micro_batch_size": "Micro-batch size (rows)",
    "train.eps": "AdamW epsilon",
    "train.beta1": "AdamW beta 1",
    "train.beta2": "AdamW beta 2",
    "train.max_grad_norm": "Gradient norm to clip to",
    "engine.gpu_memory_gib": "GPU memory cap (GiB)",
    "output.checkpoint_every": "Checkpoint every (steps)",
    "output.keep_checkpoints": "Checkpoints to keep",
    "output.eval_every": "Evaluate every (steps)",
    "output.exact_match_samples": "Exact-match samples",
    "output.sample_prompts": "Sample prompts (one a line)",
    "output.sample_tokens": "Sample tokens",
    "output.timeline_every": "Timeline every (steps)",
    "output.export": "Export when finished",
    "output.price_per_kwh": "Price of electricity (a kWh)",
    "output.webhook": "Web address to tell when the run ends",
}

CHOICE_LABELS = {
    "model.init": {
        "pretrained": "the model's own weights",
        "random": "random weights (from scratch)",
    },
    "model.dtype": {"bfloat16": "bfloat16, fp32 masters", "float32": "float32"},
    "data.train_on": {"assistant": "the answers only", "all": "every token"},
    "engine.save_level": {
        "boundary_host": "block inputs, in host RAM",
        "boundary": "block inputs, on the GPU",
        "all": "all activations",
    },
    "engine.kernels": {"compiled": "compiled by torch", "eager": "one by one"},
}

PROMINENT = (
    "model.source",
    "model.dtype",
    "data.source",
    "data.max_seq_len",
    "train.steps",
    "train.epochs",
    "train.batch_size",
    "train.learning_rate",
)
"""Fields that are always in sight; the rest are folded away."""

SHORT_HELP = {
    "model.source": "A local folder or a Hugging Face id.",
    "model.dtype": "What blocks compute in.",
    "data.source": "A file, a folder or a Hugging Face id; several as [{source: a, weight: 2}, {source: b}].",
    "data.max_seq_len": "Longer examples are cut and counted.",
    "train.steps": "Give these or epochs.",
    "train.epochs": "Passes over the data.",
    "train.batch_size": "Per optimizer step.",
    "train.learning_rate": "Peak, AdamW.",
}


@dataclass(frozen=True)
class Setting:
    """One field of `TrainConfig`: its dotted name, what kind of value it takes, and how it is
    shown.
    """

    dotted: str
    kind: Literal["text", "lines", "switch", "choice", "whole", "number"]
    choices: tuple[str, ...]
    auto: bool
    optional: bool
    mixed: bool
    """A text or a list of texts with their settings, written as YAML on one line."""
    help: str

    @property
    def section(self) -> str:
        return self.dotted.rpartition(".")[0]

    @property
    def label(self) -> str:
        return (
            LABELS.get(self.dotted) or self.dotted.rpartition(".")[2].replace("_", " ").capitalize()
        )

    @property
    def elem_id(self) -> str:
        """The component's id in the page, by which `train.js` tells which field a box is of and
        marks the one that is wrong.
        """
        return "field-" + self.dotted.replace(".", "-")

    @property
    def empty_means(self) -> str:
        """What an empty text box stands for, in a word."""
        return AUTO if self.auto else "none" if self.optional else ""

    def holds(self, shown: Any) -> bool:
        """Whether its component can have this value; an empty one has None."""
        return shown is None or isinstance(shown, bool if self.kind == "switch" else str)

    def show(self, value: Any) -> Any:
        """The component's value for a config value."""
        if self.kind in ("switch", "choice"):
            return value
        if value is None or (value == AUTO and self.auto):
            return ""
        if self.kind == "lines":
            return "\n".join(map(_as_line, value))
        if isinstance(value, tuple):  # a mix of data sets, as a preset writes it on one line
            return json.dumps(
                [_given(dataclasses.asdict(part)) for part in value], ensure_ascii=False
            )
        if self.kind == "text" and self.optional:
            return (
                json.dumps(value)
                if value.lower() in (self.empty_means, "null")
                else _as_line(value)
            )
        return _shortest(value) if isinstance(value, float) else str(value)

    def read(self, shown: Any) -> Any:
        """The config value for a component's value; what cannot be read stays text, for the config
        to refuse.
        """
        if self.kind in ("switch", "choice"):
            return shown
        text = str(shown if shown is not None else "").strip()
        if self.kind == "lines":
            return [_of_line(line) for line in text.splitlines() if line.strip()]
        if self.kind == "text" and self.optional:
            return None if text.lower() in ("", self.empty_means, "null") else _of_line(text)
        if self.kind == "text":
            return _listed(text) if self.mixed and text.startswith("[") else text
        if text.lower() in ("", self.empty_means, "null"):
            if self.auto or self.optional:
                return AUTO if self.auto else None
            raise ConfigError(self.dotted, "this is empty; give a number.")
        try:
            return int(text)
        except ValueError:
            pass
        try:
            return float(text)
        except ValueError:
            return text


@cache
def settings() -> tuple[Setting, ...]:
    """Every field of `TrainConfig`, in the order of the preset."""
    docs = field_docs()
    found: list[Setting] = []

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if dataclasses.is_dataclass(hints[field.name]):
                walk(hints[field.name], f"{prefix}{field.name}.")
            else:
                found.append(
                    _setting(prefix + field.name, hints[field.name], docs[prefix + field.name])
                )

    walk(TrainConfig, "")
    return tuple(found)


def shown_values(config: TrainConfig) -> dict[str, Any]:
    """Component values by dotted field name."""
    values = {}
    for setting in settings():
        value: Any = config
        for part in setting.dotted.split("."):
            value = getattr(value, part)
        values[setting.dotted] = setting.show(value)
    return values


def read_config(shown: dict[str, Any]) -> TrainConfig:
    """The validated config that the components say. Raises ConfigError naming the first wrong
    field.
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
    """The error's sentence with the field called as the form calls it."""
    problem = str(error).removeprefix(f"{error.field}: ")
    return f"{_labels().get(error.field, error.field)}: {problem}"


def as_labelled(sentence: str) -> str:
    """A sentence of the engine with settings called as the form calls them."""
    return re.sub(
        r"\b[a-z]+(?:\.[a-z_0-9]*[a-z0-9])+", lambda name: _labels().get(name[0], name[0]), sentence
    )


@cache
def _labels() -> dict[str, str]:
    """What the form calls each setting, and each group of settings inside a section."""
    groups = {name: title for name, title in SECTION_TITLES.items() if "." in name}
    return groups | {setting.dotted: setting.label for setting in settings()}


def _setting(dotted: str, hint: Any, doc: str) -> Setting:
    options = (
        typing.get_args(hint)
        if typing.get_origin(hint) in (typing.Union, types.UnionType)
        else (hint,)
    )
    literals = [
        choice
        for option in options
        if typing.get_origin(option) is Literal
        for choice in typing.get_args(option)
    ]
    plain = [option for option in options if typing.get_origin(option) is not Literal]
    kinds = {bool: "switch", int: "whole", float: "number", str: "text", tuple[str, ...]: "lines"}
    kind = next((kinds[option] for option in plain if option in kinds), "choice")
    choices = tuple(literals) if kind == "choice" else ()
    return Setting(
        dotted,
        kind,
        choices,
        auto=kind != "choice" and AUTO in literals,
        optional=type(None) in plain,
        mixed=any(typing.get_origin(option) is tuple for option in plain),
        help=doc.replace("`", ""),
    )


def _given(tree: dict[str, Any]) -> dict[str, Any]:
    """What of a mapping is not null, nor a mapping of nulls."""
    kept = {key: _given(item) if isinstance(item, dict) else item for key, item in tree.items()}
    return {key: item for key, item in kept.items() if item is not None and item != {}}


def _as_line(text: str) -> str:
    """A text on one line of a box: as it is, or in JSON where it would not come back as it was."""
    return (
        text
        if text and text == text.strip() and len(text.splitlines()) == 1 and text[0] != '"'
        else json.dumps(text)
    )


def _of_line(line: str) -> str:
    """The text that `_as_line` wrote."""
    line = line.strip()
    if line.startswith('"'):
        with contextlib.suppress(ValueError):
            return str(json.loads(line))
    return line


def _listed(text: str) -> Any:
    """The list that a text writes in YAML; the text where it is none."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return found if isinstance(found, list) and found else text


def _shortest(value: float) -> str:
    """A float as people write it: 1e-5, 0.01, 3."""
    text = f"{value:.10g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else text
