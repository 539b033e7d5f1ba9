"""Who may change what, read off the syntax trees of every file.

An object's fields are set by its own methods and read by their public names, no function changes a
list, set or mapping of its module, and importing a module does nothing but define. What breaks a
rule is told by its file and its text, without a line, so that the lists below outlive other changes
of a file.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

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

TORCH_MODULE = "torch keeps the parts of a module there, and takes ours in no other way"
TORCH_SETTING = "a setting of torch's compiler, which has no other place"
TRANSFORMERS = "transformers takes it, or tells it, in no other way"
ONE_CAPTURE = "what one capture hands to attention, by thread; both are of this file"
HANDED_ON = "a step under way is where an op leaves what the next ones take"

REASONS: dict[str, dict[str, str]] = {
    "app/main.py": {"os._exit is private": "a public function of Python, in spite of its name"},
    "app/pages/page.py": {
        "os.environ is changed": "Gradio reads there that it must not report its use"
    },
    "app/pages/talk.py": {"self._idle.daemon is set": "a timer of Python takes it in no other way"},
    "app/web/requests.py": {
        "response.headers is changed": "so Starlette's answers are given headers"
    },
    "app/web/server.py": {
        "page._queue.sleep_when_free is set": "Gradio takes it in no other way",
        "page._queue.progress_update_sleep_when_free is set": "Gradio takes it in no other way",
        "page._queue is private": "Gradio takes it in no other way",
    },
    "engine/bench/resident.py": {
        "module._parameters is changed": TORCH_MODULE,
        "module._parameters is private": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "module._buffers is changed": TORCH_MODULE,
    },
    "engine/checkpoints/export.py": {
        "config.use_cache is set": TRANSFORMERS,
        "whole.generation_config is set": TRANSFORMERS,
        "whole.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "whole.get_submodule(owner)._parameters is private": TORCH_MODULE,
    },
    "engine/checkpoints/weights.py": {
        "model.skeleton.model._init_weights is private": TRANSFORMERS,
        "block.__dict__ is changed": TORCH_MODULE,
        "alone.__dict__ is changed": TORCH_MODULE,
        "alone._modules is set": TORCH_MODULE,
        "alone._parameters is set": TORCH_MODULE,
        "child.__dict__ is changed": TORCH_MODULE,
        "parameter.data is set": TORCH_MODULE,
        "alone._parameters is private": TORCH_MODULE,
        "block.__dict__ is private": TORCH_MODULE,
        "alone.__dict__ is private": TORCH_MODULE,
        "child.__dict__ is private": TORCH_MODULE,
        "owner._parameters is private": TORCH_MODULE,
    },
    "engine/cli/train.py": {
        "os._exit is private": "a public function of Python, in spite of its name"
    },
    "engine/config/tree.py": {
        "_SHORT.maxstring is set": "Repr takes them in no other way before Python 3.12",
        "_SHORT.maxother is set": "Repr takes them in no other way before Python 3.12",
        "_SHORT.maxlevel is set": "Repr takes them in no other way before Python 3.12",
    },
    "engine/data/identity.py": {"_code() at import": "the engine's code as this process read it"},
    "engine/data/tokenise.py": {
        "self._writer.eval is changed": "`add` is a method of ours, not a set's",
        "self._writer.train is changed": "`add` is a method of ours, not a set's",
    },
    "engine/model/activations.py": {
        "block.__dict__ is changed": TORCH_MODULE,
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "model.skeleton.model.config.get_text_config()._attn_implementation is "
        "private": TRANSFORMERS,
        "block.__dict__ is private": TORCH_MODULE,
        "given.kwargs is changed": "the arguments were copied for this trial",
        "func._overloadpacket is private": "torch tells it in no other way",
    },
    "engine/model/attention.py": {
        "_capture.documents is set": ONE_CAPTURE,
        "_capture.kinds is set": ONE_CAPTURE,
        "model.config.get_text_config()._attn_implementation is private": TRANSFORMERS,
        "_capture.kinds is changed": ONE_CAPTURE,
    },
    "engine/model/block_trial.py": {
        "block.__dict__ is changed": TORCH_MODULE,
        "block.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "tensor._version is private": "torch tells it in no other way",
        "block.__dict__ is private": TORCH_MODULE,
        "block.get_submodule(owner)._parameters is private": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "buffer._version is private": "torch tells it in no other way",
    },
    "engine/model/build.py": {
        "config.use_cache is set": TRANSFORMERS,
        "modules[owner]._parameters is changed": TORCH_MODULE,
        "modules[owner]._parameters is private": TORCH_MODULE,
    },
    "engine/model/find_shape.py": {
        "_failures of the module is changed": "a cache of answers, under a lock",
        "_known of the module is changed": "a cache of answers, under a lock",
    },
    "engine/model/hub.py": {
        "_fetched of the module is changed": "a cache: files that this process has found whole"
    },
    "engine/model/hub_download.py": {
        "constants.DOWNLOAD_CHUNK_SIZE is set": "huggingface_hub takes it in no other way, in a process of ours",
        "os._exit is private": "a public function of Python, in spite of its name",
    },
    "engine/model/kept_shapes.py": {
        "_sources() at import": "the engine's code as this process read it"
    },
    "engine/model/library.py": {"part.dtype is set": TORCH_MODULE},
    "engine/model/packing_trial.py": {
        "model.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "model.get_submodule(owner)._parameters is private": TORCH_MODULE,
    },
    "engine/model/skeleton.py": {"block.forward is set": TORCH_MODULE},
    "engine/runs/folder.py": {
        "_held of the module is changed": "the process's own locks, which a forked child must close"
    },
    "engine/runtime/block_ops.py": {
        "step.inputs.caches is changed": HANDED_ON,
        "step.hidden is changed": HANDED_ON,
        "step.shapes is changed": HANDED_ON,
        "step.arguments is changed": HANDED_ON,
        "self.state.norms is changed": "the plan gives this element of a tensor on the device to the op",
        "step.saved is changed": HANDED_ON,
        "step.logits is changed": HANDED_ON,
    },
    "engine/runtime/boundaries.py": {
        "self._unregister.atexit is set": "a finalizer of Python takes it in no other way"
    },
    "engine/runtime/compiled.py": {
        "_this_thread.set_up is set": "a mark of each thread, of what it has set up",
        "os.environ is changed": "torch reads there how many helpers it may start",
        "torch._dynamo.config.recompile_limit is set": TORCH_SETTING,
        "torch._functorch.config.ban_recompute_materialized_backward is set": TORCH_SETTING,
        "torch._functorch.config.ban_recompute_used_far_apart is set": TORCH_SETTING,
        "torch._inductor.config.compile_threads is set": TORCH_SETTING,
        "torch._dynamo.config.nested_graph_breaks is set": TORCH_SETTING,
        "torch._dynamo is private": TORCH_SETTING,
        "torch._functorch is private": TORCH_SETTING,
        "torch._inductor is private": TORCH_SETTING,
        "threading.local() at import": "a mark of each thread, of what it has set up",
    },
    "engine/runtime/cuda_backend.py": {
        "os.environ is changed": "CUDA and torch read there how they are to start"
    },
    "engine/runtime/device_state.py": {
        "template.__dict__ is changed": TORCH_MODULE,
        "template.get_submodule(owner)._parameters is changed": TORCH_MODULE,
        "template.get_submodule(owner)._buffers is changed": TORCH_MODULE,
        "template.get_submodule(name).layer_idx is set": TORCH_MODULE,
        "template.__dict__ is private": TORCH_MODULE,
        "template.get_submodule(owner)._parameters is private": TORCH_MODULE,
        "template.get_submodule(owner)._buffers is private": TORCH_MODULE,
        "module._parameters is changed": TORCH_MODULE,
        "module._buffers is private": TORCH_MODULE,
        "module._buffers is changed": TORCH_MODULE,
        "module._parameters is private": TORCH_MODULE,
    },
    "engine/runtime/eager_overhead.py": {
        "tensor.untyped_storage()._cdata is private": "torch tells it in no other way",
        "storage._cdata is private": "torch tells it in no other way",
    },
    "engine/runtime/host_kernels.py": {"types.void() at import": "a type of numba, made once"},
    "engine/runtime/host_store.py": {
        "_libc.madvise.argtypes is set": "ctypes takes it in no other way",
        "weakref.finalize(self, "
        "_unregister_all, self._registered, "
        "unregister).atexit is set": "a finalizer of Python takes it in no other way",
    },
    "engine/train/explain.py": {
        "setattr of error": "an error carries a note to whoever explains it"
    },
    "engine/train/prepare.py": {
        "_first_resident of the module is changed": "a cache: RAM of this process at its first run"
    },
}
"""What stays, by file and text, and why."""


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


# ------------------------------------------------------------------ tests


def test_whoever_owns_a_thing_changes_it():
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
    ("code", "said"),
    [
        ("def f(x):\n    x.a = 1\n", "x.a is set"),
        ("def f(x):\n    x.a, y = 1, 2\n", "x.a is set"),
        ("def f(x):\n    x.a += 1\n", "x.a is set"),
        ("def f(x):\n    del x.a\n", "x.a is set"),
        ("def f(x):\n    x.a[0] = 1\n", "x.a is changed"),
        ("def f(x):\n    x.a.append(1)\n", "x.a is changed"),
        ("def f(x):\n    setattr(x, 'a', 1)\n", "setattr of x"),
        ("def f(x):\n    return x._a\n", "x._a is private"),
        ("def f(x):\n    return x.__dict__\n", "x.__dict__ is private"),
        ("class C:\n    def f(self):\n        self.a.b = 1\n", "self.a.b is set"),
        ("from engine.words import _a\n", "engine.words._a is private"),
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
def test_an_offender_is_found(tmp_path, code, said):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "offender.py").write_text(code)
    assert list(findings(tmp_path)) == [("app/offender.py", said)]


@pytest.mark.parametrize(
    "code",
    [
        "class C:\n    def f(self):\n        self.a = 1\n        self.b[0] = 1\n        "
        "self.c.append(1)\n",
        "import re\n_NAME = re.compile('a')\n",
        "def f():\n    made = {}\n    made[1] = 2\n    made.update(a=1)\n    return made\n",
        "KNOWN = {}\ndef f():\n    KNOWN = []\n    KNOWN.append(1)\n",
        "LATER = {'a': lambda x: x.go()}\n",
    ],
)
def test_what_an_owner_does_is_no_finding(tmp_path, code):
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "owner.py").write_text(code)
    assert list(findings(tmp_path)) == []
