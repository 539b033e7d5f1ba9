"""The programs that the tasks of a person's folder run, found before any of them runs.

A task is a YAML file. With `!function` it names Python, which lm-evaluation-harness imports; a
metric that the harness does not have is a program that the library `evaluate` fetches and runs; a
data set of pickles runs their programs. Texts with Jinja in them are programs too: the harness
renders them with all that Python can do, so they get a sandbox here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml

from engine.errors import DataError, first_line

FUNCTION = "!function"
_MOST_BYTES = 4 << 20
_MOST_SHOWN = 8
_PICKLES = ("pandas",)
"""Readers of `datasets` whose data sets are pickles."""


_Safe: Any = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader


class _Named(str):
    """A function that a task names."""


def _function(loader: Any, node: yaml.Node) -> _Named:
    return _Named(loader.construct_scalar(node)) if isinstance(node, yaml.ScalarNode) else _Named()


class _Loader(_Safe):
    """Reads a task without importing what it names."""

    yaml_constructors: ClassVar[dict[Any, Any]] = {**_Safe.yaml_constructors, FUNCTION: _function}


@dataclass
class _TaskFile:
    """What a task file contains."""

    path: Path
    names: set[str] = field(default_factory=set)
    """Names by which its tasks are asked for."""
    needs: set[str] = field(default_factory=set)
    """Names of the tasks of a group."""
    includes: list[Path] = field(default_factory=list)
    code: list[str] = field(default_factory=list)
    """Descriptions of the programs that it runs."""

    def add(self, tree: dict[Any, Any], metrics: Collection[str]) -> None:
        """Adds the content of a task or a group. The harness itself has the `metrics`."""
        for key in ("task", "group", "tag"):
            value = tree.get(key)
            for each in value if isinstance(value, list) else [value]:
                if isinstance(each, dict):  # a task within a group
                    self.add(each, metrics)
                    self.needs |= {str(each[name]) for name in ("task", "group") if name in each}
                elif each is not None:
                    in_group = key == "task" and isinstance(value, list)
                    (self.needs if in_group else self.names).add(str(each))
        included = tree.get("include")
        for each in included if isinstance(included, list) else [included]:
            if isinstance(each, str):
                self.includes.append((self.path.parent / Path(each).expanduser()).resolve())
        self.code += [f"{what} ({self.path.name})" for what in _programs_in(tree, metrics)]


def programs_of(folder: Path, names: Collection[str], metrics: Collection[str]) -> list[str]:
    """Returns descriptions of the programs that the tasks `names` run, as far as files in `folder`
    name them. The harness itself has the `metrics`.

    Raises DataError for a task file that cannot be read.
    """
    files = {path.resolve(): _read(path, metrics) for path in folder.rglob("*.yaml")}
    wanted, included, found = set(names), set[Path](), list[str]()
    waiting = sorted(files)
    is_new = True
    while is_new:
        is_new = False
        for place in list(waiting):
            file = files[place]
            if place not in included and not file.names & wanted:
                continue
            is_new = True
            waiting.remove(place)
            found += file.code
            wanted |= file.needs
            for other in file.includes:
                included.add(other)
                if other not in files:  # it is outside of the folder
                    files[other] = _read(other, metrics)
                    waiting.append(other)
    return list(dict.fromkeys(found))


def tasks_in(file: Path) -> tuple[str, ...]:
    """Returns the names of the tasks in a user's task file. Raises DataError where it cannot be
    read or has none.
    """
    if not file.is_file():
        raise DataError(f"There is no task file {file}; give the path of a YAML file.")
    names = tuple(sorted(_read(file, ()).names))
    if not names:
        raise DataError(f"The task file {file} names no task; give it one, as in task: my_task.")
    return names


def programs_text(programs: Collection[str]) -> str:
    """Returns a few of the programs as the end of a sentence."""
    shown = ", ".join(list(programs)[:_MOST_SHOWN])
    more = len(programs) - _MOST_SHOWN
    return f"{shown} and {more:,} more" if more > 0 else shown


def sandbox_templates() -> None:
    """Makes the harness render the texts of tasks in a sandbox, from here on in this process."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        sandbox = SandboxedEnvironment(
            loader=utils.env.loader,
            undefined=utils.env.undefined,
            keep_trailing_newline=utils.env.keep_trailing_newline,
        )
        sandbox.filters.update(utils.env.filters)
        utils.env = sandbox


def metrics_of_the_harness() -> set[str]:
    """Returns the names of the metrics that need no program from elsewhere."""
    import lm_eval.api.metrics  # noqa: F401  it registers them
    from lm_eval.api import registry

    for name in ("metric_registry", "METRIC_REGISTRY"):  # of newer and of older versions
        known = getattr(registry, name, None)
        if known is not None:
            return set(known.keys() if hasattr(known, "keys") else known)
    return set()


def _read(path: Path, metrics: Collection[str]) -> _TaskFile:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"The task file {path} is larger than {_MOST_BYTES >> 20} MiB.")
        tree = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a safe loader
        file = _TaskFile(path)
        if isinstance(tree, dict):
            file.add(tree, metrics)
        return file
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise DataError(
            f"The task file {path} cannot be read ({first_line(error)}); mend or remove it."
        ) from None


def _programs_in(tree: dict[Any, Any], metrics: Collection[str]) -> Iterator[str]:
    yield from _functions_in(tree)
    if tree.get("dataset_path") in _PICKLES:
        yield f"pickles of {tree['dataset_path']}"
    listed = tree.get("metric_list")
    for each in listed if isinstance(listed, list) else []:
        metric = each.get("metric") if isinstance(each, dict) else None
        if not isinstance(metric, str) or isinstance(metric, _Named):
            continue
        if metric not in metrics or each.get("hf_evaluate") is True:
            yield f"the metric {metric} of evaluate"


def _functions_in(value: Any, seen: set[int] | None = None) -> Iterator[str]:
    """Yields the functions that a value names. Aliases may form a circle."""
    seen = set() if seen is None else seen
    if isinstance(value, _Named):
        yield str(value) or "a function"
    elif isinstance(value, (dict, list)) and id(value) not in seen:
        seen.add(id(value))
        for each in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _functions_in(each, seen)
