"""Gradio is imported without its type stubs.

Whenever Gradio is imported, it parses the source of each of its components and compares it with a
stub for editors, a `.pyi` file beside that source, or writes the stub. That took a third of the
time until the app was there (1.1 of 3.3 seconds of a core, with Gradio 6.31).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType

_COMPONENTS = "gradio.component_meta"
"""The module whose `create_or_modify_pyi` is called for each class of components."""


def leave_out_stubs() -> None:
    """Lets Gradio write no stubs, if it is not imported yet."""
    if _COMPONENTS not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds that one module, once, with a loader that takes its stubs away."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _COMPONENTS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        module.__dict__["create_or_modify_pyi"] = _write_no_stub


def _write_no_stub(*_: object) -> None:
    """Stands for Gradio's function that writes the stub of a class."""
