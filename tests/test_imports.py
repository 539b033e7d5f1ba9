"""Imports: import-linter's contracts in pyproject.toml hold, they are red where one is broken, no
files import each other in a circle, and each import inside a function has its reason.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from tests.support.house import TREES, files, imports, module_of

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

LATE = {
    "app/pages/hardware/measuring.py": (
        {
            "engine.runtime.measure.machine_rates",
            "engine.runtime.device.open_backend",
        },
        "the page is served before torch is loaded, and a measurement needs the devices",
    ),
    "app/session/engine_calls.py": (
        {
            "engine.training.export.export",
            "engine.model.build.build",
            "engine.model.build.pretrained_files",
            "engine.tools.chat.chat_sources",
            "engine.tools.chat.chat_engines",
            "engine.tools.chat.prompt_builder",
            "engine.tools.evaluate.evaluate_run",
            "engine.tools.serve.served_model",
            "engine.training.loop.prepare",
        },
        "the page is served before torch is loaded",
    ),
    "engine/tools/cli/doctor.py": (
        {"engine.runtime.device.cuda_trial"},
        "it loads torch, which a machine without a GPU is not asked about",
    ),
    "engine/tools/evaluate/harness.py": (
        {"engine.tools.evaluate.streamed_lm"},
        "it imports lm_eval, which may not be installed",
    ),
    "engine/training/checkpoints/checkpoint.py": (
        {"engine.runtime.host.host_states"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/training/checkpoints/frozen_files.py": (
        {"engine.runtime.host.host_states"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/training/checkpoints/restore.py": (
        {"engine.runtime.host.host_states", "engine.runtime.optimizer.moment_conversion"},
        "the app finds checkpoints without torch, and few resumes convert moments",
    ),
    "engine/training/checkpoints/same_model.py": (
        {"engine.runtime.host.host_states"},
        "for types alone: the app finds checkpoints without torch",
    ),
    "engine/training/checkpoints/plane_snapshot.py": (
        {"engine.runtime.host.host_states"},
        "for types alone: the app lists checkpoints without torch",
    ),
    "engine/training/weights/usable_start.py": (
        {"engine.training.weights.start_weights"},
        "a model that starts from itself is checked without torch",
    ),
    "engine/tools/cli/check_data.py": (
        {"engine.model.build.pretrained_files"},
        "a check of a model alone is answered without torch",
    ),
    "engine/model/build/find_shape.py": (
        {
            "engine.model.build.build",
            "engine.model.build.measure_shape",
            "engine.model.build.pretrained_files",
        },
        "torch is loaded only for a model that nobody has built here before",
    ),
    "engine/model/build/shape_of_run.py": (
        {"engine.model.build.pretrained_files", "engine.model.build.read_model"},
        "torch is loaded only for settings that change the model",
    ),
    "engine/training/loop/paused_calls.py": (
        {"engine.training.loop.prepare"},
        "for types alone: the app asks a paused run without torch",
    ),
    "engine/runs/trackers/open_tracker.py": (
        {
            "engine.runs.trackers.to_mlflow",
            "engine.runs.trackers.to_tensorboard",
            "engine.runs.trackers.to_trackio",
            "engine.runs.trackers.to_wandb",
        },
        "each imports the package of a tracker, which may not be installed",
    ),
    "engine/training/loop/run.py": (
        {
            "engine.runtime.device.open_backend",
            "engine.training.loop.explain",
            "engine.runtime.distributed.launched_group",
            "engine.training.loop.failures",
            "engine.training.loop.prepare",
            "engine.training.loop.session",
            "engine.training.loop.trainer",
        },
        "a run has its folder, and is shown, before torch is loaded",
    ),
}
"""By file: modules of the house that it imports inside functions or for types alone, and why not
when it is imported.
"""


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


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """What `lint-imports`, a command of the linters, says of the tree in `root`."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    return subprocess.run(
        [*command, "--no-cache"], cwd=root, capture_output=True, text=True, check=False
    )


def test_no_files_import_each_other_in_a_circle():
    assert circles() == []


def test_a_circle_through_a_function_is_found(tmp_path):
    copy_as_text(tmp_path)
    folder = tmp_path / "engine" / "planning" / "schedule"
    (folder / "one.py").write_text("from engine.planning.schedule import two\n")
    (folder / "two.py").write_text(
        "def late():\n    from engine.planning.schedule.one import anything\n"
    )
    assert circles(tmp_path) == [{"engine.planning.schedule.one", "engine.planning.schedule.two"}]


def test_every_package_has_one_docstring_and_no_code():
    for file in files():
        if file.name == "__init__.py":
            body = ast.parse((PROGRAM_ROOT / file).read_text(encoding="utf-8")).body
            assert len(body) == 1 and isinstance(body[0], ast.Expr), (
                f"{file} holds more than a docstring"
            )


def test_imports_inside_functions_have_a_reason():
    late: dict[str, set[str]] = {}
    for one in imports():
        if one.late and one.module.split(".")[0] in TREES:
            late.setdefault(one.file, set()).add(one.module)
    assert late == {file: modules for file, (modules, _) in LATE.items()}


def test_the_contracts_hold():
    pytest.importorskip("importlinter")
    done = lint_imports(PROGRAM_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("code", "contract"),
    [
        ("import gradio\n", "engine works without a browser"),
        ("def late():\n    import app.labels\n", "engine works without a browser"),
        ("def late():\n    import engine.runtime.step.step\n", "packages of engine in order"),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import engine.runs\n",
            "packages of engine in order",
        ),
        ("import engine.planning.fit.choose\n", "packages of planning in order"),
        ("import torch\n", "what needs no torch imports none"),
    ],
)
def test_a_broken_contract_is_found(tmp_path, code, contract):
    pytest.importorskip("importlinter")
    copy_as_text(tmp_path)
    shutil.copy(PROGRAM_ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "engine" / "planning" / "schedule" / "offender.py").write_text(code)
    done = lint_imports(tmp_path)
    assert done.returncode == 1 and f"{contract} BROKEN" in done.stdout, done.stdout + done.stderr
    assert "engine.planning.schedule.offender" in done.stdout


def copy_as_text(root: Path) -> None:
    """Copies the product's files, as text alone."""
    for file in files():
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).write_bytes((PROGRAM_ROOT / file).read_bytes())


def test_tests_import_no_tests():
    """What several tests need is in tests/support, and fixtures of a folder in its conftest.py."""
    found = [
        f"{file.relative_to(PROGRAM_ROOT)}: {name}"
        for file in sorted((PROGRAM_ROOT / "tests").rglob("*.py"))
        for name in imported_names(file)
        if name.startswith("tests.") and re.search(r"\.(test_\w+|conftest)(\.|$)", name)
    ]
    assert found == []


def imported_names(file: Path) -> set[str]:
    """Returns the dotted name of each module, and of each name of one, that `file` imports."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{each.name}" for each in node.names}
    return names
