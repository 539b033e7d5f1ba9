"""Texts name what there is: files, folders, modules and commands in README, docs, docstrings and
comments.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.config.renamed_settings import RENAMED
from engine.config.settings import EngineConfig
from engine.paths import PROGRAM_ROOT
from tests.support.house import TREES, packages

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

PAGES = (
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/architecture.md",
    "docs/capture.md",
    "docs/data.md",
    "docs/families.md",
    "docs/performance-log.md",
    "docs/performance.md",
    "docs/plan.md",
    "docs/planes.md",
    "docs/planner.md",
    "docs/record.md",
    "docs/remote.md",
    "docs/serve.md",
    "docs/verdict.md",
)
FOLDERS = "engine|app|tests|assets|presets|docs"
PATH = re.compile(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*\w")
DOTTED = re.compile(r"(?<![\w./-])(?:engine|app|tests)(?:\.\w+)+")
COMMAND = re.compile(r"python -m (tests[\w.]+)")
LINK = re.compile(r"\]\(([^)#:]+)\)")
SETTINGS = {field.name for field in dataclasses.fields(EngineConfig)}
OLD_SETTINGS = {renamed.old for renamed in RENAMED}
"""The changelog alone may name them."""


def texts(root: Path = PROGRAM_ROOT) -> Iterator[tuple[str, str]]:
    """File and text: whole pages, and of Python files their docstrings and comments."""
    for page in PAGES:
        if (root / page).exists():
            yield page, (root / page).read_text(encoding="utf-8")
    for file in sorted(
        path
        for folder in (*TREES, "tests", "assets/make")
        for path in (root / folder).rglob("*.py")
    ):
        code = file.read_text(encoding="utf-8")
        yield file.relative_to(root).as_posix(), "\n".join(_said(code))


def wrong_names(root: Path = PROGRAM_ROOT) -> list[str]:
    """What a text names and what is not there, in words."""
    found = []
    for file, text in texts(root):
        here = PROGRAM_ROOT / file
        names = [name for name in PATH.findall(text) if not (PROGRAM_ROOT / name).exists()]
        names += [name for name in DOTTED.findall(text) if not _is_there(name)]
        if file == "CHANGELOG.md":
            names = [name for name in names if name not in OLD_SETTINGS]
        names += [name for name in COMMAND.findall(text) if importlib.util.find_spec(name) is None]
        names += [
            name
            for name in LINK.findall(text)
            if file in PAGES and not (here.parent / name).exists()
        ]
        found += [f"{file} names {name}" for name in dict.fromkeys(names)]
    return found


def _said(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        for statement in (
            getattr(node, "body", ()) if not isinstance(node, (ast.Lambda, ast.IfExp)) else ()
        ):
            if (
                isinstance(statement, ast.Expr)
                and isinstance(statement.value, ast.Constant)
                and isinstance(statement.value.value, str)
            ):
                yield statement.value.value
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def _is_there(name: str) -> bool:
    """Whether it is a module, a folder, something that a module says, a file such as
    `engine/text.py`, or a setting.
    """
    parts = name.split(".")
    if parts[0] == "engine" and parts[1] in SETTINGS:
        return True
    for length in range(len(parts), 0, -1):
        path = PROGRAM_ROOT.joinpath(*parts[:length])
        module = path.with_suffix(".py")
        if module.exists():
            return length == len(parts) or bool(
                re.search(rf"\b{parts[length]}\b", module.read_text(encoding="utf-8"))
            )
        if path.is_dir():
            return length == len(parts)
    return False


def test_every_name_in_a_text_is_there():
    assert wrong_names() == []


NAMED_IN = re.compile(
    r"`([A-Za-z_][\w.]*)`(?:,? and `[\w.]+`)? (?:in\s+|\()`((?:engine|app|tests)/[\w/]+\.py)`"
)
"""A name, and the file in which a page says that it is."""


def test_names_are_in_the_files_in_which_pages_say_they_are():
    pairs = []
    for page in PAGES:
        pairs += NAMED_IN.findall((PROGRAM_ROOT / page).read_text(encoding="utf-8"))
    assert len(pairs) > 15
    assert [
        f"{name} is not in {file}"
        for name, file in pairs
        if not re.search(
            rf"\b{name.split('.')[-1]}\b", (PROGRAM_ROOT / file).read_text(encoding="utf-8")
        )
    ] == []


def test_the_readme_shows_every_package():
    readme = (PROGRAM_ROOT / "README.md").read_text(encoding="utf-8")
    for tree in TREES:
        shown = re.search(rf"^{tree}/ .*\n((?:  .*\n)+)", readme, re.MULTILINE)[1]
        names = [
            name.removesuffix("/").removesuffix(".py")
            for name in re.findall(r"^  (\S+)  ", shown, re.MULTILINE)
        ]
        assert sorted(names) == packages(tree)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('"""See engine/leak.py."""\n', "engine/leak.py"),
        ("# as in `engine.planner`\n", "engine.planner"),
        (
            "def f():\n    '''What `engine.text.nothing_of_that_name` does.'''\n",
            "engine.text.nothing_of_that_name",
        ),
        ('"""`python -m tests.nothing`"""\n', "tests.nothing"),
    ],
)
def test_an_offender_is_found(tmp_path, text, name):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "offender.py").write_text(text)
    assert f"app/offender.py names {name}" in wrong_names(tmp_path)


def test_a_dead_link_is_found(tmp_path):
    (tmp_path / "README.md").write_text(
        "[settings](engine/config.py), [words](engine/text.py), [the tabs](#the-other-tabs)\n"
    )
    assert wrong_names(tmp_path) == ["README.md names engine/config.py"]
