"""The files of the product, and what each of them imports, read off their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.paths import PROGRAM_ROOT

TREES = ("engine", "app")


@dataclass(frozen=True)
class Import:
    """An import of `module` in `file`."""

    file: str
    line: int
    module: str
    late: bool
    """Whether it is inside a function, or for types alone."""


def files(root: Path = PROGRAM_ROOT) -> list[Path]:
    """Returns the Python files of the product, relative to `root`."""
    return sorted(path.relative_to(root) for tree in TREES for path in (root / tree).rglob("*.py"))


def packages(tree: str, root: Path = PROGRAM_ROOT) -> list[str]:
    """Returns the names of the packages and modules directly in a tree."""
    found = {path.parent.name for path in (root / tree).glob("*/__init__.py")}
    found |= {path.stem for path in (root / tree).glob("*.py")}
    return sorted(found - {"__init__"})


def module_of(file: Path) -> str:
    """Returns the name of the module in a file."""
    return ".".join(file.with_suffix("").parts).removesuffix(".__init__")


def imports(root: Path = PROGRAM_ROOT) -> Iterator[Import]:
    """Yields each import of a file of the product."""
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
