"""Our style sheets and scripts, each joined into one file: a browser gets one answer in place of
seventy-six, each of which costs it and the server a millisecond or two.

A script stays a module of its own: a function that is called once and returns what the module
exports. That takes imports and exports of the forms that our scripts have; others are refused.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable
from pathlib import Path

_IMPORT = re.compile(r'^import (\{[^}]*\} from )?"(\.[^"]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const) (\w+)(?!.*,$))", re.MULTILINE)
"""An export of one name; a line that ends with a comma goes on with another."""
_OTHER = re.compile(r"^(import|export)\b.*", re.MULTILINE)


def bundled_styles(folder: Path, names: Iterable[str]) -> str:
    """Returns the style sheets `names` of `folder`, one after the other."""
    return "".join((folder / name).read_text(encoding="utf-8") for name in names)


def bundled_scripts(folder: Path, main: str) -> str:
    """Returns the script `main` of `folder` with all modules that it imports, each after those that
    it imports itself.
    """
    order = _in_order(folder, main)
    names = {module: f"module{number}" for number, module in enumerate(order)}
    return "".join(_as_function(folder, module, names) for module in order)


def _in_order(folder: Path, main: str) -> list[str]:
    order: list[str] = []
    under_way: list[str] = []

    def visit(module: str) -> None:
        if module in order:
            return
        if module in under_way:
            raise ValueError(f"{module} imports itself by {', '.join(under_way)}.")
        under_way.append(module)
        for imported in _IMPORT.finditer((folder / module).read_text(encoding="utf-8")):
            visit(_resolved(module, imported[2]))
        under_way.pop()
        order.append(module)

    visit(main)
    return order


def _resolved(module: str, address: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(module), address))


def _as_function(folder: Path, module: str, names: dict[str, str]) -> str:
    """Returns a statement that gives the module's exports to its name."""

    def imported(found: re.Match[str]) -> str:
        if found[1] is None:
            return ""
        given = found[1].removesuffix(" from ").replace(" as ", ": ")
        return f"const {given} = {names[_resolved(module, found[2])]};\n"

    text = _IMPORT.sub(imported, (folder / module).read_text(encoding="utf-8"))
    exported = _EXPORT.findall(text)
    text = _EXPORT.sub("", text)
    if other := _OTHER.search(text):
        raise ValueError(f"{module}: cannot be bundled with the others: {other[0]}")
    returned = f"return {{ {', '.join(exported)} }};\n" if exported else ""
    return f"// {module}\nconst {names[module]} = (() => {{\n{text}{returned}}})();\n"
