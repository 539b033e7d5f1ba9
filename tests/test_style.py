"""The house's style, as far as a program can read it: tensors have shapes, expressions are not
nested, and a file has one job.

Ruff, mypy and Biome check the rest. Their rules stand in pyproject.toml and biome.json.
`python -m tests.test_style engine/planning/schedule` prints what a folder still has to mend.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from tests.support.house import TREES

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

LONGEST_FILE = 700
"""A longer file probably has two jobs."""
LONGEST_LINE = 100
DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
TENSORS = {"torch.Tensor", "Tensor", "np.ndarray", "torch.Tensor | None", "np.ndarray | None"}
SHAPE = re.compile(r"\w*\[[^\]]*\]|scalar|\bshapes?\b")


def shapeless(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields public functions and fields with tensors whose docstring tells no shape."""
    for line, node, text in _public_docstrings(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            types = [argument.annotation for argument in arguments] + [node.returns]
        elif isinstance(node, ast.AnnAssign):
            types = [node.annotation]
        else:
            continue
        named = {ast.unparse(annotation) for annotation in types if annotation is not None}
        if named & TENSORS and not SHAPE.search(text):
            yield line, f"a tensor without its shape: {' '.join(text.split())[:70]!r}"


def nested(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields comprehensions and conditional expressions that stand in one of their kind."""
    for enclosing in ast.walk(tree):
        if isinstance(enclosing, COMPREHENSIONS):
            inner = [node for node in ast.walk(enclosing) if node is not enclosing]
            if any(isinstance(node, COMPREHENSIONS) for node in inner):
                yield enclosing.lineno, "a comprehension in a comprehension"
            if any(isinstance(node, ast.IfExp) for node in inner):
                yield enclosing.lineno, "a conditional expression in a comprehension"
        elif isinstance(enclosing, ast.IfExp):
            parts = [enclosing.test, enclosing.body, enclosing.orelse]
            inner = [node for part in parts for node in ast.walk(part)]
            if any(isinstance(node, ast.IfExp) for node in inner):
                yield enclosing.lineno, "a conditional expression in another"


def long_files(root: Path = PROGRAM_ROOT) -> Iterator[str]:
    """Yields the files of the house and of its tests that are longer than LONGEST_FILE lines."""
    for file in _files(root, "*.py", "*.js", trees=(*TREES, "tests")):
        length = len(file.read_text(encoding="utf-8").splitlines())
        if length > LONGEST_FILE:
            yield f"{file.relative_to(root)} has {length} lines"


def wide_lines(root: Path = PROGRAM_ROOT) -> Iterator[str]:
    """Yields the lines of code, of any language, that are longer than LONGEST_LINE characters. Ruff
    lets lines without a space pass, and Biome lines that cannot be broken.
    """
    patterns = ("*.py", "*.js", "*.css", "*.html")
    others = [root / name for name in (".ci/run", "biome.json", "package.json", "pyproject.toml")]
    for file in [*_files(root, *patterns, trees=(*TREES, "tests", "assets/make")), *others]:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            if len(line) > LONGEST_LINE:
                yield f"{file.relative_to(root)}:{number}: {len(line)} characters"


RULES: dict[str, Callable[[ast.Module], Iterator[tuple[int, str]]]] = {
    "tensors have shapes": shapeless,
    "expressions are not nested": nested,
}


@pytest.mark.parametrize("rule", RULES)
def test_every_file_keeps_the_rule(rule: str) -> None:
    assert list(_broken(RULES[rule])) == []


def test_no_file_is_long() -> None:
    assert list(long_files()) == []


def test_no_line_is_wide() -> None:
    assert list(wide_lines()) == []


def test_planted_offences_are_found() -> None:
    tree = ast.parse(
        '"""This file counts."""\n'
        "def loss(x: torch.Tensor) -> float:\n"
        '    """Returns the loss."""\n'
        "    return [[a for a in b] for b in x] if x else 1 if y else 2\n"
    )
    assert [words.split(":")[0] for _, words in shapeless(tree)] == ["a tensor without its shape"]
    assert {words for _, words in nested(tree)} == {
        "a comprehension in a comprehension",
        "a conditional expression in another",
    }


def _public_docstrings(tree: ast.Module) -> Iterator[tuple[int, ast.AST, str]]:
    """Yields line, node and text of the docstrings of a module and of its public definitions."""
    yield from _docstrings_in(tree, tree.body)
    for node in ast.walk(tree):
        if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
            is_class = isinstance(node, ast.ClassDef)
            yield from _docstrings_in(node, node.body, fields=is_class)


def _docstrings_in(
    owner: ast.AST, body: list[ast.stmt], fields: bool = True
) -> Iterator[tuple[int, ast.AST, str]]:
    """Yields the docstring of `owner`, and those that stand under an assignment of its body."""
    before: ast.AST | None = owner
    for statement in body:
        text = _text(statement)
        if text is not None and before is owner:
            yield statement.lineno, owner, text
        elif text is not None and fields and before is not None and _is_public(before):
            yield statement.lineno, before, text
        is_assignment = isinstance(statement, (ast.Assign, ast.AnnAssign))
        before = statement if is_assignment else None


def _text(statement: ast.stmt) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return value if isinstance(value, str) else None
    return None


def _is_public(assignment: ast.AST) -> bool:
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    return not any(ast.unparse(target).startswith("_") for target in targets)


def _files(root: Path, *patterns: str, trees: tuple[str, ...] = TREES) -> list[Path]:
    found = [root / "launch.py"]
    for tree in trees:
        for pattern in patterns:
            found.extend((root / tree).rglob(pattern))
    return sorted(found)


def _broken(
    rule: Callable[[ast.Module], Iterator[tuple[int, str]]], root: Path = PROGRAM_ROOT
) -> Iterator[str]:
    for file in _files(root, "*.py"):
        for line, words in rule(ast.parse(file.read_text(encoding="utf-8"))):
            yield f"{file.relative_to(root)}:{line}: {words}"


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else ""
    offences = [words for rule in RULES.values() for words in _broken(rule)] + list(long_files())
    print("\n".join(sorted(words for words in offences if words.startswith(folder))))
