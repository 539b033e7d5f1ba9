"""The memory of a GPU and the RAM are one pool: units, activations and boundaries go where there is
room. `gains` says what more of either would be worth. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.config.settings import TrainConfig
from engine.fit.memory_items import PartName
from engine.fit.needs import PART_WORDS, needs_of
from engine.machine.read_machine import Machine
from engine.model.shape import ModelShape
from engine.words import GIB, in_seconds

FURTHER_GIB = 8
"""The planner is asked for so much more, since single gibibytes may be too small for a block."""
LEAST_GAIN = 0.001
"""A part of a step's time that is smaller than this is no gain."""


def gains(config: TrainConfig, machine: Machine, shape: ModelShape) -> Mapping[PartName, float]:
    """Returns the seconds of a step that each further GiB of a memory saves, on average over
    `FURTHER_GIB` of them. It is 0 where nothing is gained. The result is empty without a GPU and
    where no time is predicted.
    """
    now = needs_of(config, machine, shape).step_seconds
    if now is None or not machine.gpus:
        return {}
    first, more = machine.gpus[0], FURTHER_GIB * GIB
    card = replace(first, free=first.free + more)  # a card is known by its total
    found: dict[PartName, float] = {}
    for name, larger in (
        (PartName.GPU, replace(machine, gpus=(card, *machine.gpus[1:]))),
        (PartName.HOST, replace(machine, ram_available=machine.ram_available + more)),
    ):
        then = needs_of(config, larger, shape).step_seconds
        saved = 0.0 if then is None else now - then
        found[name] = saved / FURTHER_GIB if saved > LEAST_GAIN * now else 0.0
    return found


def gains_in_words(found: Mapping[PartName, float]) -> str:
    """Returns one sentence about gains; an empty text where there are none to tell of."""
    if not any(found.values()):
        return "More GPU memory or RAM would not make a step shorter." if found else ""
    said = ", ".join(f"{PART_WORDS[name]} {_saved(seconds)}" for name, seconds in found.items())
    return f"Of a step, each further GiB, up to {FURTHER_GIB}, would save: {said}."


def _saved(seconds: float) -> str:
    return f"about {in_seconds(seconds)}" if seconds else "nothing"
