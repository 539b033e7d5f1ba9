"""The model card, README.md of an exported folder, filled from the run. It shows where the model
comes from. Folders of this machine are named by their last part alone.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.config.settings import TrainConfig
from engine.model.lora.peft_folder import is_peft_folder
from engine.paths import is_path, resolve_source
from engine.runs.record.before_training import worse_than_before
from engine.runs.record.event_tables import EvalTable
from engine.runs.record.snapshot import RunSnapshot
from engine.runs.summaries.benchmark_results import BenchmarkResult
from engine.runs.summaries.evaluation_figures import Figure
from engine.text import counted

CARD = "README.md"
_SHOWN = (
    "model.dtype",
    "data.max_seq_len",
    "data.packing",
    "data.train_on",
    "train.batch_size",
    "train.learning_rate",
    "train.schedule",
    "train.warmup_steps",
    "train.min_learning_rate",
    "train.optimizer",
    "train.weight_decay",
    "train.beta1",
    "train.beta2",
    "train.max_grad_norm",
    "train.label_smoothing",
    "train.neftune_alpha",
    "train.seed",
)
"""Settings that the card lists."""
_OF_ADAPTERS = (
    "train.lora_rank",
    "train.lora_alpha",
    "train.lora_rslora",
    "train.lora_dropout",
    "train.lora_targets",
    "train.lora_save_modules",
    "train.lora_target_parameters",
)
"""Further settings for a run that trained adapters."""
_OF_PREFERENCES = {
    "sft": (),
    "dpo": (
        "train.objective",
        "preference.beta",
        "preference.loss",
        "preference.label_smoothing",
        "preference.sft_weight",
    ),
    "orpo": ("train.objective", "preference.beta"),
    "kto": (
        "train.objective",
        "preference.beta",
        "preference.desirable_weight",
        "preference.undesirable_weight",
    ),
}
"""Further settings for a run with that objective."""
_LEARNED_FROM = {
    "dpo": "pairs of a chosen and a rejected answer (DPO)",
    "orpo": "pairs of a chosen and a rejected answer (ORPO)",
    "kto": "answers that are marked as good or bad (KTO)",
}
_REWARDS = (
    ("rewards/margins", "Mean margin of the rewards", "{:.4f}"),
    ("rewards/accuracies", "Pairs with the chosen answer ahead", "{:.1%}"),
)
"""Figures of preferences among the results, with their labels and formats."""
_EVALUATION, _BENCHMARKS = "## Evaluation", "## Benchmarks"
_LOADING = """## How to load it

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # this folder, or the id of this repository
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
```

`Modelfile` is for Ollama."""


_LOADING_WHOLE = """## How to load it

```python
from transformers import AutoProcessor, {name}

folder = "."  # this folder, or the id of this repository
processor = AutoProcessor.from_pretrained(folder)
model = {name}.from_pretrained(folder, dtype="auto")
```

Its language model was trained on text. Everything else, such as what reads images or sound, is as
it was in the base model."""


_LOADING_ADAPTER = """## How to load it

```python
from peft import AutoPeftModelForCausalLM
from transformers import AutoTokenizer, GenerationConfig

folder = "."  # this folder, or the id of this repository
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto")
model.generation_config = GenerationConfig.from_pretrained(folder)  # says what ends an answer
```

It is an adapter: `base_model_name_or_path` in adapter_config.json says where its base model is."""


@dataclass(frozen=True)
class Exported:
    """An exported model: the weights after `step`, written in `dtype`."""

    step: int
    dtype: str
    benchmarks: Sequence[BenchmarkResult] = ()
    """Benchmarks of these weights and of the base model; empty where there are none."""
    is_adapter: bool = False
    """An adapter was written, without its base model."""
    whole_class: str = ""
    """Class in transformers of a model that also reads images or sound."""
    ends: Sequence[str] = ()
    """Tokens that were trained to end an answer."""
    figures: Sequence[Figure] = ()
    """These weights beside the base model; empty where they were not evaluated."""


def model_card(config: TrainConfig, snapshot: RunSnapshot, exported: Exported) -> str:
    """Returns the card of a model that a run has trained, in Markdown."""
    name = snapshot.name or config.name
    parts = [
        _front(config, exported.is_adapter),
        f"# {name}",
        _origin(config, snapshot, exported),
        _worse(snapshot, exported.step),
        _results(snapshot, exported.step, config.objective.name),
        _evaluation(exported.figures),
        _benchmarks(exported.benchmarks),
        _data(config, snapshot),
        _settings(config, snapshot),
        _loading(exported),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _loading(exported: Exported) -> str:
    text = _LOADING
    if exported.is_adapter:
        text = _LOADING_ADAPTER
    elif exported.whole_class:
        text = _LOADING_WHOLE.format(name=exported.whole_class)
    if exported.ends:
        ends = " or ".join(f"`{end}`" for end in exported.ends)
        text += f"\n\nAn answer ends with {ends}, as `generation_config.json` says."
    return text


def _front(config: TrainConfig, is_adapter: bool) -> str:
    """Returns the front matter of a card, which the hub reads. It names models and data sets of the
    hub alone.
    """
    library = "peft" if is_adapter else "transformers"
    front: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    if _is_of_hub(config.model.source):
        front["base_model"] = config.model.source
    names = [source for source in _sources(config) if _is_of_hub(source)]
    if names:
        front["datasets"] = names
    front["tags"] = ["ramstream"]
    return f"---\n{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---"


def _origin(config: TrainConfig, snapshot: RunSnapshot, exported: Exported) -> str:
    base = f"`{_shown(config.model.source)}`"
    place = config.model.start_from
    has_adapter = place is not None and is_peft_folder(place)
    if place is not None and not has_adapter:
        begun = f"from the weights of an earlier run on {base}"
    elif config.model.init == "random":
        begun = f"from random weights, with the architecture of {base}"
    else:
        begun = f"from {base}"
    size = f"{snapshot.parameters:,} parameters, " if snapshot.parameters else ""
    what = "All weights were"
    if snapshot.trained_parameters is not None:
        what = f"{snapshot.trained_parameters:,} of the weights were"
        if config.train.method == "lora":
            before = ", which began as those of an earlier adapter," if has_adapter else ""
            what = f"Adapters of {snapshot.trained_parameters:,} weights{before} were"
            is_apart = "which is not part of this folder"
            begun += f", {is_apart}" if exported.is_adapter else ", and merged into it"
        else:
            begun += ", and the others are those from before"
    learned = ""
    if config.objective.is_preference:
        learned = f"They learned from {_LEARNED_FROM[config.objective.name]}. "
    return (
        f"{what} trained {begun}, with Ramstream "
        f"{snapshot.program_version}. {learned}These are the weights after step "
        f"{exported.step:,} of {snapshot.total_steps:,}: {size}written in "
        f"{exported.dtype}. The license of the base model goes on to apply."
    )


def _worse(snapshot: RunSnapshot, step: int) -> str:
    """Returns a warning if these are the last weights of a run that has made its model worse."""
    worse = worse_than_before(snapshot, is_over=True) if step == snapshot.step else None
    return "" if worse is None else f"**{worse.sentence()}**"


def _results(snapshot: RunSnapshot, step: int, objective: str) -> str:
    rows = []
    of = "" if objective == "sft" else f" ({objective.upper()})"
    evals = snapshot.evals
    losses = dict(zip(evals.step, evals.loss))
    if losses:
        first = min(losses)
        since = "before training" if not first else f"at step {first:,}"
        rows.append((f"Validation loss{of} {since}", f"{losses[first]:.4f}"))
        if step in losses and step != first:
            rows.append((f"Validation loss{of} of these weights", f"{losses[step]:.4f}"))
    if snapshot.best is not None:
        best = f"{snapshot.best.loss:.4f}, at step {snapshot.best.step:,}"
        rows.append((f"Lowest validation loss{of}", best))
    rows += _rewards(evals, step)
    for match in snapshot.exact_matches:
        if match.total and match.step in (0, step):
            whose = "of these weights" if match.step == step else "before training"
            share = f"{match.correct:,} of {match.total:,}"
            rows.append((f"Answers right, {whose}", share))
    if snapshot.steps.step:
        rows.append((f"Training loss{of} of the last step", f"{snapshot.steps.loss[-1]:.4f}"))
    return _table("Results", rows)


def _rewards(evals: EvalTable, step: int) -> list[tuple[str, str]]:
    """Returns the rows for the rewards of validation answers, if the weights of `step` have any."""
    rows = []
    places = [place for place, at in enumerate(evals.step) if at == step]
    for name, words, form in _REWARDS if places else ():
        values = evals.preference.get(name)
        if values and math.isfinite(values[places[-1]]):
            rows.append((f"{words}, validation, of these weights", form.format(values[places[-1]])))
    return rows


def _evaluation(figures: Sequence[Figure]) -> str:
    """Returns the section on the trained model beside its base model."""
    if not figures:
        return ""
    rows = []
    for one in figures:
        between = (
            "" if one.interval is None else f"{one.interval.low:+.4f} to {one.interval.high:+.4f}"
        )
        change = "" if one.difference is None else f"{one.difference:+.4f}"
        of = "" if one.count is None else f"{one.count:,} {one.of}"
        rows.append([one.name, _number(one.base), _number(one.trained), change, between, of])
    heads = ["", "Base model", "Trained", "Difference", "95 % interval", "Of"]
    return (
        f"{_EVALUATION}\n\nBoth models on the validation rows of the run; shares are from 0 to 1."
        f"\n\n{_lines(heads, rows)}"
    )


def _benchmarks(results: Sequence[BenchmarkResult]) -> str:
    """Returns the section on benchmarks. Results of the base model have a column beside
    those of the trained one.
    """
    trained = [one for one in results if one.weights != "base"]
    if not trained:
        return ""
    bases = {_asked(one): one.value for one in results if one.weights == "base"}
    has_bases = any(_asked(one) in bases for one in trained)
    rows = []
    for one in trained:
        error = "" if one.error is None else f"{one.error:.4f}"
        value = "not finite" if one.value is None else f"{one.value:.4f}"
        shots = "" if one.shots is None else str(one.shots)
        samples = "" if one.samples is None else f"{one.samples:,}"
        named = [_cell(one.task), _cell(one.metric) + (", chat template" if one.chat else "")]
        before = [_number(bases.get(_asked(one)))] if has_bases else []
        rows.append([*named, value, error, shots, samples, one.dtype, *before])
    heads = ["Task", "Metric", "Value", "Standard error", "Shots", "Samples", "Computed in"]
    heads += ["Base model"] if has_bases else []
    versions = ", ".join(sorted({one.harness for one in trained}))
    return (
        f"{_BENCHMARKS}\n\nlm-evaluation-harness {versions} asked, and Ramstream answered with "
        f"these weights.\n\n{_lines(heads, rows)}"
    )


def _asked(one: BenchmarkResult) -> tuple[object, ...]:
    return (one.task, one.metric, one.shots, one.limit, one.chat, one.dtype)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _lines(heads: list[str], rows: list[list[str]]) -> str:
    """Returns a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(text: str) -> str:
    """Returns a text in one line, without characters that end a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def with_results(
    card: str, results: Sequence[BenchmarkResult], figures: Sequence[Figure] = ()
) -> str:
    """Returns a card with the tables of these figures and results, in the place of earlier tables
    or before the section on data. The rest of the card is unchanged.
    """
    kept = card
    for title in (_EVALUATION, _BENCHMARKS):
        kept = re.sub(rf"^{title}\n.*?(?=^## |\Z)", "", kept, flags=re.MULTILINE | re.DOTALL)
    sections = "\n\n".join(filter(None, (_evaluation(figures), _benchmarks(results))))
    if not sections:
        return kept
    before, data, after = kept.partition("\n## Data\n")
    return f"{before.rstrip()}\n\n{sections}\n{data}{after}"


def _data(config: TrainConfig, snapshot: RunSnapshot) -> str:
    found = snapshot.data
    rows = [("Source", ", ".join(f"`{_shown(source)}`" for source in _sources(config)))]
    for label, key in (
        ("Examples to train on", "train_examples"),
        ("Rows to train on", "train_rows"),
        ("Validation rows", "eval_rows"),
        ("Tokens to train on", "train_tokens"),
    ):
        if isinstance(found.get(key), int):
            rows.append((label, f"{found[key]:,}"))
    return _table("Data", rows)


def _settings(config: TrainConfig, snapshot: RunSnapshot) -> str:
    tree = config.to_dict()
    rows = [("Steps", f"{counted(snapshot.step, 'step')} of {snapshot.total_steps:,}")]
    adapters = _OF_ADAPTERS if config.train.method == "lora" else ()
    for dotted in (*_SHOWN, *adapters, *_OF_PREFERENCES[config.objective.name]):
        section, _, name = dotted.partition(".")
        value = tree[section][name]
        text = ", ".join(value) or "none" if isinstance(value, list | tuple) else str(value)
        rows.append((f"`{dotted}`", text))
    if snapshot.device_name:
        rows.append(("Device", snapshot.device_name))
    return _table("Training", rows)


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    if not rows:
        return ""
    lines = [f"| {label} | {text.replace('|', chr(92) + '|')} |" for label, text in rows]
    return "\n".join([f"## {title}", "", "| | |", "|---|---|", *lines])


def _sources(config: TrainConfig) -> list[str]:
    source = config.data.source
    if isinstance(source, str):
        return [source]
    return [dataclasses.asdict(part)["source"] for part in source]


def _is_of_hub(source: str) -> bool:
    """Returns whether a source is an id of the hub, not a file or folder of this machine."""
    return "/" in source and not is_path(source) and resolve_source(source) is None


def _shown(source: str) -> str:
    return source if _is_of_hub(source) else Path(source).name
