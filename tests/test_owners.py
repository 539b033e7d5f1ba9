"""No function changes a list, set or mapping of its module, and importing a module does nothing but
define: read off the syntax trees of every file. What breaks a rule is told by its file and its
text, without a line, so that the list below outlives other changes of a file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

READ_HERE = "how this thread reads weights; both are of this file"

REASONS: dict[str, dict[str, str]] = {
    "engine/data/tokens/cache_key.py": {
        "_code() at import": "the engine's code as this process read it",
    },
    "engine/model/build/find_shape.py": {
        "_failures of the module is changed": "a cache of answers, under a lock",
        "_known of the module is changed": "a cache of answers, under a lock",
    },
    "engine/model/hub/hub.py": {
        "_fetched of the module is changed": "a cache: files that this process has found whole",
    },
    "engine/model/build/library.py": {
        "threading.local() at import": READ_HERE,
    },
    "engine/runs/record/run_folder.py": {
        "_held of the module is changed": "the process's own locks, which a forked child must close"
    },
    "engine/runtime/device/compiled.py": {
        "_functions of the module is changed": "what its cache holds, which has no list of it",
        "threading.local() at import": "a mark of each thread, of what it has set up",
    },
    "engine/runtime/optimizer/host_kernels.py": {
        "types.void() at import": "a type of numba, made once",
    },
    "engine/runtime/optimizer/moment_kernels.py": {
        "types.void() at import": "a type of numba, made once",
    },
    "engine/runtime/optimizer/two_pass_kernels.py": {
        "types.void() at import": "a type of numba, made once",
    },
    "engine/runtime/optimizer/muon_kernels.py": {
        "types.void() at import": "a type of numba, made once",
    },
    "engine/config/optimizers.py": {
        "_moments() at import": "the states of each AdamW, which differ by their format alone",
    },
    "engine/planning/layout/layout.py": {
        "planes_of() at import": "the names of all planes, from the descriptions of optimizers",
    },
    "engine/model/blocks/tiled_module.py": {
        "threading.local() at import": "whether a thread is running a sequence chunk",
    },
    "engine/model/lora/adapted_linear.py": {
        "adapted_linear.register_autograd(_backward, setup_context=_keep) at import": (
            "an operation of torch learns its gradient where it is defined"
        ),
    },
    "engine/runtime/optimizer/fused_adamw.py": {
        f"{each} of the module is set": "Triton looks up the names of a kernel in its module"
        for each in ("tl", "moments_of", "written", "encoded")
    },
    "engine/training/loop/planning.py": {
        "_first_resident of the module is changed": "a cache: RAM of this process at its first run",
    },
}
"""What stays, by file and text, and why."""

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
        for text in dict.fromkeys([*state_of_the_module(tree), *work_at_import(tree)]):
            yield file.relative_to(root).as_posix(), text


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


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and _name(node.test) == "TYPE_CHECKING"


def _is_changeable(value: ast.AST) -> bool:
    return isinstance(
        value, (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)
    ) or (isinstance(value, ast.Call) and _name(value.func) in MADE)


def _name(function: ast.AST) -> str:
    return getattr(function, "attr", None) or getattr(function, "id", "")


def test_modules_define_and_keep_what_they_defined():
    found: dict[str, list[str]] = {}
    for file, text in findings():
        if text not in REASONS.get(file, ()):
            found.setdefault(file, []).append(text)
    assert found == {}


def test_no_reason_outlives_what_it_is_for():
    found = set(findings())
    assert [
        (file, text)
        for file, texts in REASONS.items()
        for text in texts
        if (file, text) not in found
    ] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("KNOWN = {}\ndef f():\n    KNOWN[1] = 2\n", "KNOWN of the module is changed"),
        ("KNOWN: set = set()\ndef f():\n    KNOWN.add(1)\n", "KNOWN of the module is changed"),
        ("last = None\ndef f():\n    global last\n    last = 1\n", "last of the module is set"),
        ("import os\nos.makedirs('a')\n", "os.makedirs('a') at import"),
        ("if 1 < 2:\n    import os\n", "if 1 < 2: at import"),
        (
            "from pathlib import Path\nNAMES = Path('a').read_text()\n",
            "Path('a').read_text() at import",
        ),
    ],
)
def test_an_offender_is_found(tmp_path, code, text):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "offender.py").write_text(code)
    assert list(findings(tmp_path)) == [("app/offender.py", text)]


@pytest.mark.parametrize(
    "code",
    [
        "import re\n_NAME = re.compile('a')\n",
        "def f():\n    made = {}\n    made[1] = 2\n    made.update(a=1)\n    return made\n",
        "KNOWN = {}\ndef f():\n    KNOWN = []\n    KNOWN.append(1)\n",
        "LATER = {'a': lambda x: x.go()}\n",
    ],
)
def test_what_is_usual_is_no_finding(tmp_path, code):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "usual.py").write_text(code)
    assert list(findings(tmp_path)) == []
