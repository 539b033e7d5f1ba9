"""Python runs this file at its start in processes that have its folder in PYTHONPATH. The app does
in tests in a browser. Long runs, which these tests only need to be under way, rest between steps.
A core that trains would be missing to the browser, which has to draw each step as well.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import time

LONG = 1_000
"""A run of so many steps does not end in a test."""
FIRST = 20
"""Steps that are made without a rest."""
REST_SECONDS = 0.3
STEP_LOOP = "engine.training.loop.step_loop"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module of the step loop, and changes it once it is executed."""

    def find_spec(self, name, path, target=None):
        if name != STEP_LOOP:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            _let_rest(module.Steps)

        spec.loader.exec_module = exec_module
        return spec


def _let_rest(steps_class) -> None:
    advance = steps_class.advance

    def with_rest(self, *arguments, **named):
        if self._prepared.total_steps >= LONG and self.done >= FIRST:
            time.sleep(REST_SECONDS)
        return advance(self, *arguments, **named)

    steps_class.advance = with_rest


if STEP_LOOP in sys.modules:  # in a process that was forked
    _let_rest(sys.modules[STEP_LOOP].Steps)
else:
    sys.meta_path.insert(0, _Finder())
