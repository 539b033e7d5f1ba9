"""Layouts of a model of which some parts are trained are made here from those of the whole model.
No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from engine.config.trained_parts import BLOCKS, NAMES, Parts
from engine.errors import ConfigError
from engine.planning.layout.layout import UnitLayout, lay_out


def with_frozen(
    layouts: Sequence[UnitLayout], aliases: Mapping[str, str], parts: Parts
) -> list[UnitLayout]:
    """Returns the layouts of embed, the blocks and the head, in which all parameters are frozen
    but those of `parts`.

    aliases: the first name of each tied parameter, by its second name. A pattern may fit either.
    Raises ConfigError where the model lacks what `parts` names.
    """
    trained = _named(layouts, aliases, parts.names) | _in_last_blocks(layouts, parts.last_blocks)
    return [frozen_but(layout, trained) for layout in layouts]


def frozen_but(layout: UnitLayout, trained: Collection[str]) -> UnitLayout:
    """Returns the layout in which all parameters are frozen but those of these full names."""
    specs = [replace(spec, frozen=spec.full_name not in trained) for spec in layout.parameters]
    return lay_out(layout.unit, specs)


def _in_last_blocks(layouts: Sequence[UnitLayout], count: int) -> set[str]:
    """Returns the names of the parameters of the last blocks."""
    blocks = layouts[1:-1]
    if count > len(blocks):
        raise ConfigError(
            BLOCKS,
            f"{count} blocks are to be trained, and this model has {len(blocks)}; lower it to "
            f"{len(blocks)} or less.",
        )
    last = blocks[len(blocks) - count :]
    return {spec.full_name for layout in last for spec in layout.parameters}


def _named(
    layouts: Sequence[UnitLayout], aliases: Mapping[str, str], patterns: Sequence[str]
) -> set[str]:
    """Returns the names of the parameters that fit one of the patterns."""
    own = {spec.full_name: spec.full_name for layout in layouts for spec in layout.parameters}
    names = own | dict(aliases)
    found: set[str] = set()
    for pattern in patterns:
        fitting = {first for name, first in names.items() if fnmatchcase(name, pattern)}
        if not fitting:
            raise ConfigError(NAMES, f"{pattern} fits no parameter of this model; {_examples(own)}")
        found |= fitting
    return found


def _examples(names: Mapping[str, str]) -> str:
    """Returns names that a pattern may fit, in words: the first, a middle one and the last."""
    first, *others = names
    middle = others[len(others) // 2 : -1][:1]
    shown = dict.fromkeys([first, *middle, *others[-1:]])
    return f"its parameters have names such as {', '.join(shown)}."
