"""The house: which room may import which, read off the syntax trees of every file.

The order of the rooms stands in one place, the docstrings of `engine` and `app`. Imports inside
functions and under TYPE_CHECKING count like all others.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT

TREES = ("engine", "app")
FOREIGN = {"engine": {"app", "gradio", "plotly"}}
"""What no file of a tree may import."""

LATE = {
    "app/pages/measuring.py": (
        {
            "engine.measuring.ceilings",
            "engine.measuring.one_thread",
            "engine.runtime.open_backend",
        },
        "the page is served before torch is loaded, and a measurement needs the devices",
    ),
    "app/session/engine_calls.py": (
        {
            "engine.checkpoints.export",
            "engine.model.build",
            "engine.model.pretrained_files",
            "engine.talk.talk_sources",
            "engine.talk.talkers",
            "engine.talk.voice",
            "engine.train.prepare",
        },
        "the page is served before torch is loaded",
    ),
    "engine/benchmarks/harness.py": (
        {"engine.benchmarks.streamed_lm"},
        "it imports lm_eval, which may not be installed",
    ),
    "engine/checkpoints/checkpoint.py": (
        {"engine.host.host_store"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/checkpoints/frozen_files.py": (
        {"engine.host.host_store"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/checkpoints/restore.py": (
        {"engine.host.host_store"},
        "for types alone: the app finds checkpoints without torch",
    ),
    "engine/checkpoints/same_model.py": (
        {"engine.host.host_store"},
        "for types alone: the app finds checkpoints without torch",
    ),
    "engine/checkpoints/plane_snapshot.py": (
        {"engine.host.host_store"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/checkpoints/usable_start.py": (
        {"engine.checkpoints.start_weights"},
        "a model that starts from itself is checked without torch",
    ),
    "engine/cli/check_data.py": (
        {"engine.model.pretrained_files"},
        "a check of a model alone is answered without torch",
    ),
    "engine/data/text_tokens.py": (
        {"engine.dividing.word_tokens"},
        "numba is loaded only for long texts",
    ),
    "engine/model/find_shape.py": (
        {"engine.model.build", "engine.model.measure_shape", "engine.model.pretrained_files"},
        "torch is loaded only for a model that nobody has built here before",
    ),
    "engine/run_model/shape_of_run.py": (
        {"engine.model.pretrained_files", "engine.run_model.read_model"},
        "torch is loaded only for settings that change the model",
    ),
    "engine/train/paused_calls.py": (
        {"engine.train.prepare"},
        "for types alone: the app asks a paused run without torch",
    ),
    "engine/trackers/open_tracker.py": (
        {
            "engine.trackers.to_mlflow",
            "engine.trackers.to_tensorboard",
            "engine.trackers.to_trackio",
            "engine.trackers.to_wandb",
        },
        "each imports the package of a tracker, which may not be installed",
    ),
    "engine/train/run.py": (
        {
            "engine.runtime.open_backend",
            "engine.memory.explain",
            "engine.ranks.gathering",
            "engine.train.failures",
            "engine.train.prepare",
            "engine.train.session",
            "engine.train.trainer",
        },
        "a run has its folder, and is shown, before torch is loaded",
    ),
}
"""By file: modules of the house that it imports inside functions or for types alone, and why not
when it is imported.
"""


@dataclass(frozen=True)
class Import:
    """`file` imports `module`, on a line, at the file's own level or later."""

    file: str
    line: int
    module: str
    late: bool


def rooms(tree: str, root: Path = PROGRAM_ROOT) -> list[str]:
    """The rooms of a tree, in order, as the docstring of its package lists them."""
    docstring = ast.get_docstring(
        ast.parse((root / tree / "__init__.py").read_text(encoding="utf-8"))
    )
    return [f"{tree}.{name}" for name in re.findall(r"^    (\w+)  ", docstring, re.MULTILINE)]


def files(root: Path = PROGRAM_ROOT) -> list[Path]:
    return sorted(path.relative_to(root) for tree in TREES for path in (root / tree).rglob("*.py"))


def module_of(file: Path) -> str:
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imports(root: Path = PROGRAM_ROOT) -> Iterator[Import]:
    """Every import of a module in the house, or of a foreign one, by a file of the house."""
    known = {module_of(file) for file in files(root)}
    for file in files(root):
        tree = ast.parse((root / file).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file}:{node.lineno}: an import names its module in full"
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in names]
            else:
                continue
            for name in names:
                yield Import(str(file), node.lineno, name, node.col_offset > 0)


def room_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def broken_rules(root: Path = PROGRAM_ROOT) -> list[str]:
    """Imports that the order of the rooms forbids, in words."""
    order = [room for tree in TREES for room in rooms(tree, root)]
    found = []
    for one in imports(root):
        tree = one.file.split("/")[0]
        mine, target = room_of(module_of(Path(one.file))), room_of(one.module)
        if one.module.split(".")[0] in FOREIGN.get(tree, ()):
            found.append(f"{one.file}:{one.line} imports {one.module}, which {tree} never does")
        elif one.module.split(".")[0] in TREES and (
            target not in order or order.index(target) > order.index(mine)
        ):
            found.append(
                f"{one.file}:{one.line} imports {one.module}, which is not of a room before its own"
            )
    return found


def circles(root: Path = PROGRAM_ROOT) -> list[set[str]]:
    """Groups of files that import each other, directly or by way of others (Tarjan's strongly
    connected components).
    """
    edges: dict[str, set[str]] = {module_of(file): set() for file in files(root)}
    for one in imports(root):
        if one.module in edges:
            edges[module_of(Path(one.file))].add(one.module)
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for target in edges[module]:
            if target not in numbers:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in stack:
                lowest[module] = min(lowest[module], numbers[target])
        if lowest[module] == numbers[module]:
            place = stack.index(module)
            group, stack[place:] = set(stack[place:]), []
            if len(group) > 1 or module in edges[module]:
                found.append(group)

    for module in edges:
        if module not in numbers:
            visit(module)
    return found


def test_every_file_imports_from_its_own_room_and_from_those_before_it():
    assert broken_rules() == []


def test_no_files_import_each_other_in_a_circle():
    assert circles() == []


def test_every_package_has_one_docstring_and_no_code_and_is_listed():
    listed = {room for tree in TREES for room in rooms(tree)}
    found = set()
    for file in files():
        if file.name == "__init__.py":
            body = ast.parse((PROGRAM_ROOT / file).read_text(encoding="utf-8")).body
            assert len(body) == 1 and isinstance(body[0], ast.Expr), (
                f"{file} holds more than a docstring"
            )
        if len(file.parts) > 2 or file.name != "__init__.py":
            found.add(room_of(module_of(file)))
    assert found == listed


def test_imports_inside_functions_have_a_reason():
    late: dict[str, set[str]] = {}
    for one in imports():
        if one.late and one.module.split(".")[0] in TREES:
            late.setdefault(one.file, set()).add(one.module)
    assert late == {file: modules for file, (modules, _) in LATE.items()}


@pytest.mark.parametrize(
    "code, rule",
    [
        ("import gradio\n", "which engine never does"),
        ("from app.words import in_bytes\n", "which engine never does"),
        (
            "def late():\n    from engine.runtime.loss import chunked_loss\n",
            "not of a room before its own",
        ),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import engine.fit.choose\n",
            "not of a room before its own",
        ),
        ("from engine import nowhere\n", "not of a room before its own"),
    ],
)
def test_an_offender_is_found(tmp_path, code, rule):
    _copy(tmp_path)
    (tmp_path / "engine" / "plan" / "offender.py").write_text(code)
    (said,) = broken_rules(tmp_path)
    assert said.startswith("engine/plan/offender.py:") and rule in said


def test_a_circle_through_a_function_is_found(tmp_path):
    _copy(tmp_path)
    (tmp_path / "engine" / "plan" / "one.py").write_text("from engine.plan import two\n")
    (tmp_path / "engine" / "plan" / "two.py").write_text(
        "def late():\n    from engine.plan.one import anything\n"
    )
    assert circles(tmp_path) == [{"engine.plan.one", "engine.plan.two"}]


def _copy(root: Path) -> None:
    """The house, as text alone."""
    for file in files():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes((PROGRAM_ROOT / file).read_bytes())
