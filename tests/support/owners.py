"""Finds who changes what is not its own, off the syntax trees of every file; tests/test_owners.py
has the rules.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from engine.paths import PROGRAM_ROOT

OWN = {"self", "cls"}


CHANGES = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "move_to_end",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "reverse",
    "setdefault",
    "sort",
    "update",
}
"""Methods of lists, sets, mappings and queues that change them."""


MADE = {"list", "dict", "set", "deque", "OrderedDict", "defaultdict", "Counter"}
CONSTANTS = {
    "compile",
    "datetime",
    "encode",
    "enumerate",
    "escape",
    "fields",
    "float",
    "float32",
    "fromkeys",
    "frozenset",
    "get_args",
    "int",
    "items",
    "join",
    "keys",
    "len",
    "map",
    "max",
    "min",
    "partial",
    "range",
    "replace",
    "resolve",
    "round",
    "sorted",
    "split",
    "strftime",
    "sum",
    "tuple",
    "union",
    "values",
    "zip",
}
"""What a module may call while it is imported: it makes a constant of what is there already."""
DEFINES = (
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
)


def findings(
    root: Path = PROGRAM_ROOT, trees: tuple[str, ...] = ("engine", "app")
) -> Iterator[tuple[str, str]]:
    """File and text of everything that breaks a rule."""
    for file in sorted(path for tree in trees for path in (root / tree).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for text in dict.fromkeys(
            [*fields_of_others(tree), *state_of_the_module(tree), *work_at_import(tree)]
        ):
            yield file.relative_to(root).as_posix(), text


def fields_of_others(tree: ast.Module) -> Iterator[str]:
    """`x.field = …`, `del x.field`, `x.field[…] = …`, `x.field.append(…)`, `setattr(x, …)`,
    `x.__dict__` and `x._private`, where x is neither the object itself nor a class of this file;
    and private names of other modules.
    """
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and not _is_own(node)
        ):
            yield f"{ast.unparse(node)} is set"
        elif (
            isinstance(node, ast.Subscript)
            and isinstance(node.ctx, (ast.Store, ast.Del))
            and _is_others(node.value)
        ):
            yield f"{ast.unparse(node.value)} is changed"
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
            and _is_others(node.func.value)
        ):
            yield f"{ast.unparse(node.func.value)} is changed"
        elif isinstance(node, ast.Call) and _name(node.func) in (
            "setattr",
            "delattr",
            "__setattr__",
        ):
            yield f"{ast.unparse(node.func)} of {ast.unparse(node.args[0])}"
        elif (
            isinstance(node, ast.Attribute)
            and not _is_own(node)
            and (node.attr == "__dict__" or _is_private(node.attr))
            and _name(node.value) not in classes
        ):
            yield f"{ast.unparse(node)} is private"
        elif isinstance(node, ast.ImportFrom):
            yield from (
                f"{node.module}.{alias.name} is private"
                for alias in node.names
                if _is_private(alias.name)
            )


def state_of_the_module(tree: ast.Module) -> Iterator[str]:
    """Names of the module that a function assigns, or whose list, set or mapping it changes."""
    made = {
        target.id
        for node in tree.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and _is_changeable(node.value)
    }
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        local = {
            node.id
            for node in ast.walk(function)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        for node in ast.walk(function):
            changed = None
            if isinstance(node, ast.Global):
                yield from (f"{name} of the module is set" for name in node.names)
            elif isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
                changed = node.value
            elif (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in CHANGES
            ):
                changed = node.func.value
            if isinstance(changed, ast.Name) and changed.id in made - local:
                yield f"{changed.id} of the module is changed"


def work_at_import(tree: ast.Module) -> Iterator[str]:
    """Statements of a module that are neither definitions nor texts, and calls that do not make a
    constant.
    """
    for node in tree.body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if not (isinstance(node, DEFINES) or _is_for_types(node)):
            yield f"{ast.unparse(node).splitlines()[0]} at import"
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            defined = {one.name for one in tree.body if isinstance(one, ast.ClassDef)}
            for call in _calls_now(node.value):
                name = _name(call.func)
                if name not in CONSTANTS | MADE | defined and not name[:1].isupper():
                    yield f"{ast.unparse(call.func)}() at import"


def _calls_now(value: ast.AST) -> Iterator[ast.Call]:
    """Those that are made while the value is, not later by a lambda in it."""
    if isinstance(value, ast.Lambda):
        return
    if isinstance(value, ast.Call):
        yield value
    for child in ast.iter_child_nodes(value):
        yield from _calls_now(child)


def _is_own(node: ast.Attribute) -> bool:
    value = node.value
    return (isinstance(value, ast.Name) and value.id in OWN) or (
        isinstance(value, ast.Call) and _name(value.func) == "super"
    )


def _is_others(node: ast.AST) -> bool:
    """Whether it is a field, and of another object."""
    return isinstance(node, ast.Attribute) and not _is_own(node)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _is_changeable(value: ast.AST) -> bool:
    return isinstance(
        value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    ) or (isinstance(value, ast.Call) and _name(value.func) in MADE)


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")
