"""Everything that the app uses from the engine exists, and none of it loads torch before it is
called.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys

import pytest

from engine.paths import PROGRAM_ROOT


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_the_app_is_imported_without_what_takes_seconds():
    code = (
        "from app.gradio_stubs import leave_out_stubs\n"
        "leave_out_stubs()\n"
        "import sys, app.main\nprint(sorted({'torch', 'transformers', 'datasets', 'numba', "
        "'accelerate'} & set(sys.modules)))\n"
        "print(sys.modules['gradio.component_meta'].create_or_modify_pyi.__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=PROGRAM_ROOT, capture_output=True, text=True, check=True
    )
    # Nor does Gradio parse its own sources, for a second, to write stubs for editors.
    assert done.stdout == "[]\napp.gradio_stubs\n"


def test_what_is_imported_at_the_first_call_is_there():
    found = []
    for file in sorted((PROGRAM_ROOT / "app").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.col_offset:
                module = importlib.import_module(node.module)
                for name in node.names:
                    if not hasattr(module, name.name):
                        importlib.import_module(f"{node.module}.{name.name}")
                    found.append(name.name)
    assert {"export_run", "load_tokenizer", "borrow", "open_backend"} <= set(found)
