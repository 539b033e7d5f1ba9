"""Torch compiles blocks and the loss here into fused kernels for forward and backward. Cheap
operations are recomputed in backward.

Where torch cannot compile, or has compiled as many graphs as it may, what was to be compiled runs
as it is. That is noted, and the run tells it; torch would say it in its own log, or not at all.

The attention is left out of the compiled graphs, because its kernel and the split of a packed row
are chosen at run time. For a compiled block, autograd then keeps the block's input, the results of
its matrix products (except for the last one) and the tensors that attention keeps. Norms, rotary
embeddings, activations and residual sums are computed again from these.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from engine.errors import first_line
from engine.model.build.attention import leave_uncompiled
from engine.paths import cache_folder

RECOMPILE_LIMIT = 64
"""Most graphs per process to which the code of one block class is compiled: one for each kind of
block, mode (training or not) and shape, for every engine.
"""
_ALL_GRAPHS = 1 << 16
"""Most compilations per process of the code of one block class, those graphs included that were
dropped with their blocks. An app that trains for months must not meet this limit.
"""


_this_thread = threading.local()


def _own_cache() -> str:
    """Returns a folder of this account alone for compiled code. torch's own is in the folder for
    temporary files, where another account may make it first, and its code would run here.
    """
    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return str(folder)
    except OSError:
        pass
    return tempfile.mkdtemp(prefix="ramstream-compiled-")


def set_up_compiler() -> None:
    """Configures torch's compiler for this thread. In newer torch the settings are local to a
    thread, so each thread must call this before it compiles anything.
    """
    if getattr(_this_thread, "set_up", False):
        return
    # Compile in this process: worker processes would be forked from a process that holds the
    # planes. The setting is also put in the environment, since autograd compiles backward in its
    # own threads.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # torch names its own folder there when it is imported, as transformers does. A user who wants
    # another one names it.
    named = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if named is None or named == default_cache_dir():
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = _own_cache()

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.accumulated_recompile_limit = _ALL_GRAPHS
    # By default, code that meets a limit runs uncompiled without an error. With an error, it is
    # told. Both settings together are an error of their own.
    torch._dynamo.config.suppress_errors = False
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # By default the inputs of every matrix product would be kept instead of recomputed, which takes
    # half as much memory again.
    torch._functorch.config.ban_recompute_materialized_backward = False
    # The same applies to the tokens that are gathered for experts.
    torch._functorch.config.ban_recompute_used_far_apart = False
    # Continue the graph inside the module that calls the attention. Otherwise each call around it
    # becomes a separate graph, and the output of the first norm is kept as the input of the next
    # graph.
    if hasattr(torch._dynamo.config, "nested_graph_breaks"):
        torch._dynamo.config.nested_graph_breaks = True
    torch._inductor.config.compile_threads = 1
    leave_uncompiled()
    _this_thread.set_up = True


class CompiledBlock:
    """Block that is compiled when it first runs, and again for shapes that differ much. Where
    compiling fails, it runs uncompiled, and `problem` says why.
    """

    def __init__(self, block: nn.Module):
        set_up_compiler()
        self._block = block
        self._compiled = torch.compile(block)
        self.problem = ""
        self.seconds = 0.0
        """Seconds of the first run, nearly all of them for compiling."""
        self._roomy = 0
        """The peak of the device's memory was raised for hidden states of this many bytes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        set_up_compiler()  # the calling thread may not be set up yet
        if self.problem:
            return self._block(*args, **kwargs)
        if not torch.is_grad_enabled():
            self._make_room(args[0])
        began = time.perf_counter()
        try:
            out = self._compiled(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
                raise  # the block cannot be recorded, which says nothing of its kernels
            # If the block itself raised the error, the call below raises it again.
            self.abort(error)
            return self._block(*args, **kwargs)
        self.seconds = self.seconds or time.perf_counter() - began
        return out

    def _make_room(self, hidden: Any) -> None:
        """Raises the peak of the device's memory by four of the block's widest results, before it
        runs on more `hidden` states [rows, tokens, width] without gradients than before.

        Torch times several forms of a kernel that works in place. In a pass without gradients, it
        copies what they overwrite to pinned host memory where a copy on the device would raise the
        peak (`copy_args_to_cpu_if_needed` in torch/_inductor/runtime/triton_heuristics.py), and
        never frees that memory: with 7.6 billion parameters and 16,384 tokens it is a GiB. The
        backward of a block takes more than these four, so the peak of a training stays its own.
        """
        if not isinstance(hidden, torch.Tensor) or hidden.device.type != "cuda":
            return
        if hidden.nbytes <= self._roomy:
            return
        self._roomy = hidden.nbytes
        widest = max((max(each.shape) for each in self._block.parameters()), default=1)
        with contextlib.suppress(torch.OutOfMemoryError):  # then the copy goes to the host
            room = 4 * hidden.nbytes // hidden.shape[-1] * widest
            torch.empty(room, dtype=torch.uint8, device=hidden.device)

    def abort(self, error: Exception) -> None:
        """Runs the block uncompiled from now on. Since backward is compiled only when it first
        runs, the error may come from there.
        """
        self.problem = _reason(error)


class CompiledFunction:
    """Function that is compiled for each shape that it is called with, or once for all (`dynamic`).
    Where compiling fails, it runs uncompiled, and `problem` says why. `what` names it in words.
    """

    def __init__(self, function: Callable[..., Any], what: str, dynamic: bool):
        self.what = what
        self._function = function
        self._compiled = torch.compile(function, dynamic=dynamic)
        self.problem = ""
        self.ran = False
        """Whether the function has run compiled for some shape."""

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
                # Nothing was changed in place before the kernels were compiled, so the call below
                # starts from the same inputs. If the function itself raised the error, that call
                # raises it again.
                self.abort(error)
        return self._function(*args, **kwargs)

    def abort(self, error: Exception) -> None:
        """Runs the function uncompiled until `try_again`."""
        self.problem = _reason(error)

    def try_again(self) -> None:
        """Compiles the function again, if it runs uncompiled."""
        if self.problem:
            self.problem, self.ran = "", False


@functools.cache
def compiled_function(
    function: Callable[..., Any], what: str, dynamic: bool = False
) -> CompiledFunction:
    """Returns the compiled form of `function`, which is `what` in words. A process has only one, so
    that a second run uses the kernels of the first.
    """
    made = CompiledFunction(function, what, dynamic)
    _functions.append(made)
    return made


class MayFail(Protocol):
    """A compiled function that may turn out to be impossible to compile."""

    what: str
    """What it is, in words."""
    problem: str
    """Why it runs uncompiled; empty where it runs compiled."""

    def try_again(self) -> None:
        """Compiles it again, if it runs uncompiled."""


_functions: list[MayFail] = []
"""Functions that were compiled in this process."""


def report_problems_of(function: MayFail) -> None:
    """Reports the problems of `function` with those of compiled functions."""
    _functions.append(function)


def functions_try_again() -> None:
    """Compiles functions again that run uncompiled. A new engine asks for it, as it compiles its
    blocks anew, so that what fails for it is found and reported in its own run.
    """
    for function in _functions:
        function.try_again()


def uncompiled_functions() -> list[tuple[str, str]]:
    """Returns for each function that runs uncompiled, what it is in words, and why."""
    return [(function.what, function.problem) for function in _functions if function.problem]


def _reason(error: Exception) -> str:
    """Returns in one line why something runs uncompiled."""
    from torch._dynamo.exc import FailOnRecompileLimitHit

    if isinstance(error, FailOnRecompileLimitHit):
        return f"it has more shapes than the {RECOMPILE_LIMIT} for which it may be compiled"
    return first_line(error)
