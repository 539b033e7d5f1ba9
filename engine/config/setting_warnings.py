"""Settings that are valid, and yet hardly what a person means. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.preference_settings import OBJECTIVE, PreferenceConfig
from engine.config.rope_settings import ROPE_FACTOR, ROPE_SCALING, USUAL_FACTOR
from engine.config.settings import OptimConfig, TrainConfig
from engine.paths import resolve_source

HIGHEST_RATE, LOWEST_RATE = 2e-2, 1e-8
"""Peak rates between which language models are trained: about 1e-6 to 1e-4 for large models, up to
1e-2 for tiny ones from scratch.
"""
LOW_FOR_ADAPTERS = 2e-5
"""Rate below which adapters are hardly trained: they need about ten times the rates of whole
models.
"""
_OF_METHODS = {
    "parts": ("part_names", "last_blocks"),
    "lora": (
        "lora_rank",
        "lora_alpha",
        "lora_dropout",
        "lora_rslora",
        "lora_targets",
        "lora_save_modules",
        "lora_target_parameters",
    ),
}
"""Settings that only these methods of training read."""
MOST_PASSES, FEW_ROWS = 25, 1000
"""Number of passes over fewer rows than this that are doubtful: models then learn rows by heart."""


@dataclass(frozen=True)
class SettingWarning:
    """A sentence about one setting, which a run would accept."""

    field: str
    """Dotted name of the setting."""
    text: str


def setting_warnings(config: TrainConfig) -> tuple[SettingWarning, ...]:
    """Returns what is doubtful in the settings, in the order of a preset."""
    train, output = config.train, config.output
    found = [*_of_gguf(config), *_of_rope(config), *_of_another_method(train)]
    rate, steps = train.learning_rate, train.steps
    if rate > HIGHEST_RATE:
        text = f"A learning rate of {rate:g} is far too high (usual: 1e-6 to 1e-2)"
        found.append(SettingWarning("train.learning_rate", f"{text}: the loss would diverge."))
    if rate < LOWEST_RATE:
        text = f"A learning rate of {rate:g} is far too low (usual: 1e-6 to 1e-2)"
        found.append(SettingWarning("train.learning_rate", f"{text}: nothing would be learned."))
    elif train.method == "lora" and rate < LOW_FOR_ADAPTERS:
        text = (
            f"A learning rate of {rate:g} is low for adapters (usual: 1e-4 to 1e-3): little would "
            "be learned."
        )
        found.append(SettingWarning("train.learning_rate", text))
    if steps is not None and train.warmup_steps >= steps > 1:
        text = (
            f"The warm-up ({train.warmup_steps:,} steps) is as long as the run ({steps:,}) or "
            "longer."
        )
        found.append(SettingWarning("train.warmup_steps", text))
    if config.preference.beta != PreferenceConfig().beta and not config.objective.is_preference:
        text = (
            f"preference.beta is {config.preference.beta:g} and changes nothing: {OBJECTIVE} is "
            "sft, which learns from no preferences."
        )
        found.append(SettingWarning("preference.beta", text))
    if steps is not None and output.eval_every > steps:
        text = (
            f"With an evaluation every {output.eval_every:,} steps, a run of {steps:,} is "
            "evaluated only at the end, so no best weights can be kept."
        )
        found.append(SettingWarning("output.eval_every", text))
    if output.export_form == "adapter" and train.method != "lora":
        text = (
            f"output.export_form is adapter, but train.method is {train.method}: no adapters are "
            "trained, and the whole model is exported."
        )
        found.append(SettingWarning("output.export_form", text))
    return tuple(found)


def _of_gguf(config: TrainConfig) -> list[SettingWarning]:
    """Returns a doubt about a hub id that publishers give to models for llama.cpp."""
    source = config.model.source.strip()
    if not source.lower().endswith("-gguf") or resolve_source(source) is not None:
        return []
    text = (
        f"{source} is named as a model in GGUF, the format of llama.cpp, which cannot be trained: "
        "a run refuses it, unless it has safetensors too. Take the model from which it was made."
    )
    return [SettingWarning("model.source", text)]


def _of_rope(config: TrainConfig) -> list[SettingWarning]:
    """Returns what scaled rotary embeddings do to a model, or that they are not scaled."""
    kind, factor = config.model.rope_scaling, config.model.rope_factor
    if kind == "none":
        if factor == USUAL_FACTOR:
            return []
        text = f"{ROPE_FACTOR} changes nothing: {ROPE_SCALING} is none."
        return [SettingWarning(ROPE_FACTOR, text)]
    if kind == "dynamic":
        text = (
            "Rotary embeddings that are scaled by dynamic change nothing in training: the trained "
            f"model reads rows up to {factor:g} times as long, without having learned to."
        )
    else:
        text = (
            f"Rotary embeddings that are scaled by {kind} change how all texts are read, short "
            "ones too, so the model gets worse at first: train it with rows of the new length "
            f"until it is used to a factor of {factor:g}."
        )
    return [SettingWarning(ROPE_SCALING, text)]


def _of_another_method(train: OptimConfig) -> list[SettingWarning]:
    """Returns a doubt for each setting of what is trained that `train.method` does not read."""
    usual, found = OptimConfig(), []
    for method, names in _OF_METHODS.items():
        for name in names:
            if method == train.method or getattr(train, name) == getattr(usual, name):
                continue
            text = (
                f"train.{name} changes nothing: it is for the method {method}, and train.method is "
                f"{train.method}."
            )
            found.append(SettingWarning(f"train.{name}", text))
    return found


def warning_about_passes(passes: float, rows: int) -> str | None:
    """Returns a sentence if this number of passes over so few rows is doubtful."""
    if passes <= MOST_PASSES or rows >= FEW_ROWS:
        return None
    which = "a single row" if rows == 1 else f"{rows:,} rows"
    return (
        f"About {passes:,.0f} passes over {which} make the model memorize them: fewer passes "
        "or more data would be better."
    )
