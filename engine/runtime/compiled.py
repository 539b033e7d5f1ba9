"""Torch compiles blocks and the loss here: into fused kernels in forward and backward, with what is
cheap recomputed in backward.

The attention stays outside of the compiled parts: which kernel runs it, and how a packed row is
split, is decided as it runs. Autograd then keeps of a compiled block the block's input, the results
of its matrix products (but for the last one) and what attention keeps. Norms, rotary embeddings,
activations and residual sums are computed again from these.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from engine.errors import first_line
from engine.model.attention import leave_uncompiled

RECOMPILE_LIMIT = 64
"""The code of one block may be compiled to this many graphs: for its kinds, with and without
training, and for a few shapes, for every engine of the process.
"""


_this_thread = threading.local()


def set_up_compiler() -> None:
    """Makes the settings of torch's compiler for this thread. It must run before anything is
    compiled in a thread: in newer torch, settings belong to a thread.
    """
    if getattr(_this_thread, "set_up", False):
        return
    _this_thread.set_up = True
    # Compile in this process: helpers would be forked from a process that holds the planes. The
    # setting goes by the environment too, since autograd compiles backward in threads of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config

    torch._dynamo.config.recompile_limit = max(
        RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
    )
    # Otherwise the inputs of every matrix product are kept as well as recomputed: half as much
    # memory again.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # The same goes for what is gathered for experts.
    torch._functorch.config.ban_recompute_used_far_apart = False
    # Go on inside the module that calls the attention. Otherwise each call around it is a graph of
    # its own, and what the first norm gives is kept as the input of the next one.
    if hasattr(torch._dynamo.config, "nested_graph_breaks"):
        torch._dynamo.config.nested_graph_breaks = True
    torch._inductor.config.compile_threads = 1
    leave_uncompiled()


class CompiledBlock:
    """A `CompiledBlock` is compiled when it first runs, and again for shapes that differ much.
    Where that fails the block runs as it is, and `problem` says why.
    """

    def __init__(self, block: nn.Module):
        set_up_compiler()
        self._block = block
        self._compiled = torch.compile(block)
        self.problem = ""
        self.seconds = 0.0
        """The first run took this long: nearly all of it is compiling."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        set_up_compiler()  # the caller's thread may be a new one
        if self.problem:
            return self._block(*args, **kwargs)
        began = time.perf_counter()
        try:
            out = self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001  the compiler raises many kinds
            # An error of the block itself comes again below.
            self.give_up(error)
            return self._block(*args, **kwargs)
        self.seconds = self.seconds or time.perf_counter() - began
        return out

    def give_up(self, error: Exception) -> None:
        """Runs the block as it is from now on. Backward is compiled when it first runs, so it may
        be what fails.
        """
        self.problem = first_line(error)


class CompiledFunction:
    """A `CompiledFunction` is compiled for each shape that it is called with, or once for all
    (`dynamic`). Where that fails the function runs as it is, and `problem` says why.
    """

    def __init__(self, function: Callable[..., Any], dynamic: bool):
        self._function = function
        self._compiled = torch.compile(function, dynamic=dynamic)
        self.problem = ""
        self.ran = False
        """It has run compiled, for some shape."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        set_up_compiler()
        if not self.problem:
            try:
                out = self._compiled(*args, **kwargs)
                self.ran = True
                return out
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001  the compiler raises many kinds
                # Nothing was changed in place before the kernels were there, so the call below
                # begins anew. An error of the function itself comes again there.
                self.give_up(error)
        return self._function(*args, **kwargs)

    def give_up(self, error: Exception) -> None:
        """Runs the function as it is from now on."""
        self.problem = first_line(error)


@functools.cache
def compiled_function(function: Callable[..., Any], dynamic: bool = False) -> CompiledFunction:
    """Returns the one compiled form of `function` in this process, so that a second run finds what
    the first one compiled.
    """
    return CompiledFunction(function, dynamic)
