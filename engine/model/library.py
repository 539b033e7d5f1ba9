"""Whoever needs transformers asks here, since several threads use it: the page builds models to
estimate them while a run trains.

The library is not made for that:

- Its names are imported lazily from modules that import each other in circles. Two threads that
  enter a circle at different places get half-made modules. So one thread imports all at once.
- Building a model without weights swaps a method of `nn.Module`. So one thread builds at a time.
- Building a model in bf16 changes torch's default dtype for the whole process, also under the feet
  of a run. So we build in fp32 as far as the library knows, and give the dtype to each tensor.
"""

from __future__ import annotations

import functools
import importlib
import os
import socket
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_NAMES = (
    "AutoConfig",
    "AutoTokenizer",
    "AutoModelForCausalLM",
    "GenerationConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerFast",
)
_IMPORTING = threading.Lock()
_BUILDING = threading.Lock()


def transformers() -> ModuleType:
    """Returns the library, with every module that we use of it loaded."""
    with _IMPORTING:
        return _imported()


@functools.cache
def _imported() -> ModuleType:
    module = importlib.import_module("transformers")
    for name in _NAMES:
        getattr(module, name)
    importlib.import_module("transformers.trainer_pt_utils")
    importlib.import_module("transformers.models.auto.modeling_auto")
    # A hub that cannot be reached ends in one sentence of ours, not in one warning for every try.
    importlib.import_module("huggingface_hub").utils.logging.set_verbosity_error()
    return module


def hub_is_cut_off() -> bool:
    """Tells whether the name of the hub does not resolve on this machine.

    If so, only what is cached can be had, and asking the hub would be tried for half a minute. With
    a proxy, names are the proxy's affair.
    """
    if "https" in getproxies():
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port or 443)
    except OSError:
        return True
    return False


def empty_model(config: Any, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """Returns `AutoModelForCausalLM.from_config(config, dtype=dtype)` with its parameters on the
    meta device and real buffers.

    `config` is told the dtype, and the attention implementation if one is given. Raises ValueError
    for an implementation that the family does not have.
    """
    from accelerate import init_empty_weights

    chosen = {} if attention is None else {"attn_implementation": attention}
    with _BUILDING, init_empty_weights(include_buffers=False), _DefaultDtype(dtype):
        # The library would set torch's default dtype to the one that it is given.
        model = transformers().AutoModelForCausalLM.from_config(
            config, dtype=torch.get_default_dtype(), **chosen
        )
    model.tie_weights()
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    return model


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switches transformers' own progress bars off: our record tells progress."""
    logging = transformers().utils.logging
    were_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if were_on:
            logging.enable_progress_bar()


@contextmanager
def errors_only() -> Iterator[None]:
    """Makes transformers log no warnings: what its report on loaded weights says, we say in one
    sentence.
    """
    logging = transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def told_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Calls `report(share)` as the library loads weights in this thread, in place of its bar."""
    logging = transformers().utils.logging
    thread = threading.get_ident()

    def bar(factory: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        is_ours = threading.get_ident() == thread
        if is_ours and args and hasattr(args[0], "__len__"):
            return _told(args[0], report)
        return factory(*args, **kwargs)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _told(items: Collection[Any], report: Callable[[float], None]) -> Iterator[Any]:
    """Yields the items, and reports before each what share of them is done."""
    for done, item in enumerate(items):
        report(done / len(items))
        yield item


class _DefaultDtype(TorchFunctionMode):
    """While it is active, tensors that are made without naming a dtype have this one.

    It does for one thread what `torch.set_default_dtype` does for all of them.
    """

    _ALWAYS_DEFAULT: ClassVar = {
        torch.empty,
        torch.ones,
        torch.zeros,
        torch.rand,
        torch.randn,
        torch.eye,
        torch.linspace,
        torch.logspace,
    }
    """These functions make tensors of the default dtype."""
    _DEFAULT_FOR_FLOATS: ClassVar = {torch.full, torch.tensor, torch.scalar_tensor, torch.arange}
    """These functions do so where they are given numbers of Python with a fraction."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if func in self._ALWAYS_DEFAULT:
            return func(*args, **kwargs | {"dtype": self._dtype})
        made = func(*args, **kwargs)
        if func in self._DEFAULT_FOR_FLOATS and made.is_floating_point():
            # A tensor or an array that is given keeps its own dtype.
            has_own_dtype = any(hasattr(argument, "dtype") for argument in args)
            return made if has_own_dtype else made.to(self._dtype)
        return made
