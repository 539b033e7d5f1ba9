"""transformers, used from several threads: the page builds models to estimate them while a run
trains.

The library is not made for that. Its names are imported lazily from modules that import each other
in circles, and two threads that enter a circle at different places get half-made modules. Building
a model without weights swaps a method of `nn.Module`, and building one in bf16 changes torch's
default dtype for the whole process, also under the feet of a run. So whoever needs the library asks
here.
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
from typing import Any
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
_IMPORTING, _BUILDING = threading.Lock(), threading.Lock()


def transformers() -> ModuleType:
    """The library, with every module that we use of it loaded."""
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
    """Whether the name of the hub does not resolve here: then asking it would be tried for half a
    minute, and only what is cached can be had. With a proxy, names are the proxy's affair.
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
    """`AutoModelForCausalLM.from_config(config, dtype=dtype)` with its parameters on the meta
    device and real buffers.

    `config` is told the dtype, and the attention implementation if one is given. Raises ValueError
    for one that the family does not have.
    """
    from accelerate import init_empty_weights

    chosen = {} if attention is None else {"attn_implementation": attention}
    with _BUILDING, init_empty_weights(include_buffers=False), _DefaultDtype(dtype):
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
    """Transformers' own progress bars are off inside: progress is told by the record."""
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
    """Transformers logs no warnings inside: what its report on loaded weights says, we say in one
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
    """`report(share)` is called as the library loads weights in this thread, in place of its own
    bar.
    """
    logging, thread = transformers().utils.logging, threading.get_ident()

    def bar(factory: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        items = args[0] if args else None
        if threading.get_ident() != thread or not hasattr(items, "__len__"):
            return factory(*args, **kwargs)
        return _told(items, report)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def _told(items: Collection[Any], report: Callable[[float], None]) -> Iterator[Any]:
    for done, item in enumerate(items):
        report(done / len(items))
        yield item


class _DefaultDtype(TorchFunctionMode):
    """torch's default dtype for this thread alone: what is made without naming a dtype has this
    one.
    """

    _ALWAYS_DEFAULT = {
        torch.empty,
        torch.ones,
        torch.zeros,
        torch.rand,
        torch.randn,
        torch.eye,
        torch.linspace,
        torch.logspace,
    }
    _DEFAULT_FOR_FLOATS = {torch.full, torch.tensor, torch.scalar_tensor, torch.arange}

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if kwargs.get("dtype") is None:
            if func in self._ALWAYS_DEFAULT:
                return func(*args, **kwargs | {"dtype": self._dtype})
            if func in self._DEFAULT_FOR_FLOATS and not any(
                hasattr(argument, "dtype") for argument in args
            ):
                made = func(*args, **kwargs)
                return made.to(self._dtype) if made.is_floating_point() else made
        return func(*args, **kwargs)
