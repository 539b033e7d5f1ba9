"""The tiny models that come with the program, each for one data set."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.settings import TrainConfig


@dataclass(frozen=True)
class Example:
    """A tiny model that comes with the program."""

    source: str
    title: str
    data: str
    """The data set that it is made for, the only one whose tokens it knows."""


EXAMPLES = (
    Example("assets/starter-model", "Starter model", "assets/starter.jsonl"),
    Example("assets/preference-model", "Politeness model", "assets/preferences.jsonl"),
)


def example_of(source: str) -> Example | None:
    """Returns the example whose model this is."""
    return next((each for each in EXAMPLES if each.source == source.strip()), None)


def example_on_other_data(config: TrainConfig) -> Example | None:
    """Returns the example whose model is to learn other data than its own, or None."""
    example = example_of(config.model.source)
    if example is None or config.model.init != "pretrained":
        return None
    if all(part.only_source.strip() == example.data for part, _ in config.data.parts()):
        return None
    return example
