"""Names and patterns in `train.lora_targets`, `train.lora_target_parameters` and
`train.lora_save_modules` mean layers, parameters and modules of a model. This file finds them, by
the rules of PEFT, and refuses what cannot be meant. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from engine.config.adapters import (
    ALL_LINEAR,
    SAVE_MODULES,
    TARGET_PARAMETERS,
    TARGETS,
    Adapters,
)
from engine.errors import ConfigError
from engine.planning.layout.layout import UnitLayout


@dataclass(frozen=True)
class Modules:
    """The full names of a model's modules."""

    linear: Mapping[str, str]
    """Linear layers of blocks, each with the reason why it can have no adapter, or an empty text.
    """
    others: Mapping[str, str]
    """All other modules in blocks, with their class."""
    outside: Collection[str]
    """Modules outside of blocks, such as the embedding and the head."""
    stacked: Mapping[str, str]
    """Weights of three dimensions in blocks, which are no modules: one matrix an expert. Each has
    the reason why it can have no adapter, or an empty text.
    """


def chosen_layers(modules: Modules, adapters: Adapters) -> list[str]:
    """Returns the full names of the layers that get an adapter, in the order of the model.

    A layer in a module that is trained whole gets none, as in PEFT. Raises ConfigError for a target
    that fits no layer, or something else.
    """
    saved = [name for name in modules.linear if _is_in_saved(name, adapters.save_modules)]
    if not adapters.targets:  # stacked experts alone have adapters
        return []
    if adapters.targets == (ALL_LINEAR,):
        found = {name for name, reason in modules.linear.items() if not reason}
        if not found:
            raise ConfigError(
                TARGETS,
                "this model has no linear layer in its blocks that can have an adapter; set "
                "train.method to full.",
            )
    else:
        found = set()
        for target in adapters.targets:
            found |= _fitting(modules, target)
    chosen = [name for name in modules.linear if name in found and name not in saved]
    if not chosen:
        raise ConfigError(
            TARGETS,
            f"every layer that is named is in a module of {SAVE_MODULES}; name other layers, or "
            "set train.method to parts.",
        )
    return chosen


def _fitting(modules: Modules, target: str) -> set[str]:
    """Returns the names of the layers that fit a target."""
    found = {name for name in modules.linear if _fits(name, target)}
    if "*" not in target:
        other = next((name for name in modules.others if is_named(name, target)), None)
        if other is not None:
            raise ConfigError(
                TARGETS,
                f"{target} is a {modules.others[other]} in this model ({other}), and adapters are "
                f"for linear layers alone; {_examples(modules)}, or give {ALL_LINEAR}.",
            )
        if any(is_named(name, target) for name in modules.outside):
            raise ConfigError(
                TARGETS,
                f"{target} is outside of the blocks, where no adapters are; name it in "
                f"{SAVE_MODULES} to train it whole, or leave it out.",
            )
    experts = next((name for name in modules.stacked if _fits(name, target)), None)
    if experts is not None and not found:
        raise ConfigError(
            TARGETS,
            f"{target} fits {experts}, which is no layer but has the weights of all experts of a "
            f"block; name it in {TARGET_PARAMETERS} instead.",
        )
    refused = next(
        (name for name in modules.linear if name in found and modules.linear[name]), None
    )
    found = {name for name in found if not modules.linear[name]}
    if refused is not None and not found:
        raise ConfigError(
            TARGETS,
            f"{refused} can have no adapter, since {modules.linear[refused]}; leave {target} out.",
        )
    if not found:
        raise ConfigError(
            TARGETS,
            f"{target} fits no linear layer in the blocks of this model; {_examples(modules)}, or "
            f"give {ALL_LINEAR}.",
        )
    return found


def chosen_stacks(modules: Modules, adapters: Adapters) -> list[str]:
    """Returns the full names of the parameters that get an adapter for each expert, in the order of
    the model. Raises ConfigError for a name that fits none.
    """
    found: set[str] = set()
    for target in adapters.target_parameters:
        fitting = [name for name in modules.stacked if _fits(name, target)]
        if not fitting:
            raise ConfigError(TARGET_PARAMETERS, _no_stack(modules, target))
        refused = [name for name in fitting if modules.stacked[name]]
        if len(refused) == len(fitting):
            raise ConfigError(
                TARGET_PARAMETERS,
                f"{refused[0]} can have no adapter, since {modules.stacked[refused[0]]}; leave "
                f"{target} out.",
            )
        found |= set(fitting) - set(refused)
    return [
        name
        for name in modules.stacked
        if name in found and not _is_in_saved(name.rpartition(".")[0], adapters.save_modules)
    ]


def _no_stack(modules: Modules, target: str) -> str:
    """Returns a sentence on a target that fits no stacked experts."""
    if not modules.stacked:
        return (
            f"{target} fits nothing, since this model has no experts that are stacked in one "
            f"parameter; leave it out, or name layers in {TARGETS}."
        )
    ends = dict.fromkeys(".".join(name.split(".")[-2:]) for name in modules.stacked)
    return (
        f"{target} fits no stacked experts of this model, which are called "
        f"{' and '.join(list(ends)[:4])}; give one of these, or leave it out."
    )


def _fits(name: str, target: str) -> bool:
    """Returns whether a full name fits a target, which is a pattern if it has a *."""
    return fnmatchcase(name, target) if "*" in target else is_named(name, target)


def _examples(modules: Modules) -> str:
    """Returns a text with names that a target may have."""
    last = dict.fromkeys(name.rpartition(".")[2] for name in modules.linear)
    return f"its layers have names such as {', '.join(list(last)[:6])}"


def is_named(name: str, end: str) -> bool:
    """Returns whether a full name is `end`, or ends with it after a dot."""
    return name == end or name.endswith(f".{end}")


def _is_in_saved(name: str, saved: Sequence[str]) -> bool:
    """Returns whether a module is one of those that are trained whole, or is within one."""
    parts = name.split(".")
    parents = [".".join(parts[:stop]) for stop in range(1, len(parts) + 1)]
    return any(is_named(each, end) for each in parents for end in saved)


def saved_parameters(
    layouts: Sequence[UnitLayout], aliases: Mapping[str, str], saved: Sequence[str]
) -> set[str]:
    """Returns the full names of the parameters of the modules that are trained whole.

    aliases: as in `engine.planning.layout.freezing`. Raises ConfigError for a name that no module
    has, and for one of a tied parameter, which PEFT would untie.
    """
    own = [spec.full_name for layout in layouts for spec in layout.parameters]
    found: set[str] = set()
    for end in saved:
        fitting = {name for name in own if _is_in_saved(name.rpartition(".")[0], [end])}
        tied = [*aliases, *aliases.values()]
        shared = next((n for n in tied if _is_in_saved(n.rpartition(".")[0], [end])), None)
        if shared is not None:
            raise ConfigError(
                SAVE_MODULES,
                f"{end} has weights that embedding and head of this model share, and PEFT keeps a "
                "copy of them for each; leave it out, or set train.method to parts.",
            )
        if not fitting:
            last = dict.fromkeys(name.split(".")[-2] for name in own if "." in name)
            raise ConfigError(
                SAVE_MODULES,
                f"{end} is no module of this model; its modules have names such as "
                f"{', '.join([*list(last)[:2], *list(last)[-2:]])}.",
            )
        found |= fitting
    return found
