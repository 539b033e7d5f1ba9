"""Which files of the engine a module imports, found by reading them."""

from __future__ import annotations

import ast
from pathlib import Path

from engine.paths import PROGRAM_ROOT


def imported_by(*modules: str) -> set[str]:
    """Returns these modules and all of the engine that they import, in whatever function and by way
    of others too.
    """
    found: set[str] = set()
    waiting = list(modules)
    while waiting:
        module = waiting.pop()
        file = _file_of(module)
        if file is None or module in found:
            continue
        found.add(module)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                waiting += [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert not node.level, f"{module} imports relative to itself"
                waiting += [f"{node.module}.{each.name}" for each in node.names]
                waiting.append(str(node.module))
    assert found >= set(modules)
    return found


def packages_of(modules: set[str]) -> set[str]:
    """Returns the packages of the engine, as paths such as `data/tokens`, in which modules are that
    are no single files.
    """
    return {
        "/".join(module.split(".")[1:-1])
        for module in modules
        if (file := _file_of(module)) is not None
        and file.name != "__init__.py"
        and module.count(".") > 1
    }


def _file_of(module: str) -> Path | None:
    if module.partition(".")[0] != "engine":
        return None
    path = PROGRAM_ROOT / module.replace(".", "/")
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)
