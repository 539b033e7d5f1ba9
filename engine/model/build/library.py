"""All use of transformers goes through this module, because several threads need it: the page
builds models for estimates while a run trains.

The library is not thread-safe:

- Its names are imported lazily from modules that import each other in circles. Two threads that
  enter a circle at different places get incomplete modules. So a single thread imports everything
  at once.
- Building a model without weights swaps a method of `nn.Module`. So only one thread builds at a
  time.
- Building a model in bf16 changes torch's default dtype for the whole process, including a run in
  progress. So the library builds in fp32, and each tensor is given the real dtype.
"""

from __future__ import annotations

import functools
import gc
import importlib
import math
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

from engine.model.lora.inject import Family

_NAMES = (
    "AutoConfig",
    "AutoTokenizer",
    "AutoModelForCausalLM",
    "AutoModelForMultimodalLM",
    "GenerationConfig",
    "PreTrainedModel",
    "PreTrainedTokenizerFast",
)
_IMPORTING = threading.Lock()
_BUILDING = threading.Lock()


def transformers() -> ModuleType:
    """Returns the library, with all of its modules that we use loaded."""
    with _IMPORTING:
        return _imported()


@functools.cache
def _imported() -> ModuleType:
    with _no_collections():
        return _import()


@contextmanager
def _no_collections() -> Iterator[None]:
    """Pauses the collection of garbage. An import makes a million objects and no garbage; to
    traverse them again and again would take half a second.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _import() -> ModuleType:
    module = importlib.import_module("transformers")
    for name in _NAMES:
        getattr(module, name)
    _let_weights_be_read(importlib.import_module("transformers.core_model_loading"))
    _let_weights_be_prepared(importlib.import_module("transformers.modeling_utils"))
    _let_llama_4_answer(importlib.import_module("transformers.modeling_outputs"))
    importlib.import_module("transformers.trainer_pt_utils")
    importlib.import_module("transformers.models.auto.modeling_auto")
    # We report an unreachable hub in one sentence, so the library's warning for every attempt is
    # off.
    importlib.import_module("huggingface_hub").utils.logging.set_verbosity_error()
    return module


def family_of(model_type: str) -> Family:
    """Returns what the library knows of the models with this `model_type`."""
    library = transformers()
    mapping = importlib.import_module("transformers.conversion_mapping")
    patterns = getattr(mapping, "_MODEL_TO_CONVERSION_PATTERN", {})
    stacked = patterns.get(model_type, model_type)
    return Family(model_type, stacked, library.pytorch_utils.Conv1D)


def hub_is_cut_off() -> bool:
    """Returns whether the hub's host name fails to resolve on this machine.

    If so, only cached files are available, and the library would retry requests to the hub for half
    a minute. With a proxy, names are not checked, because the proxy resolves them.
    """
    if "https" in getproxies():
        return False
    endpoint = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co")
    try:
        socket.getaddrinfo(endpoint.hostname, endpoint.port or 443)
    except OSError:
        return True
    return False


def reads_more_than_text(config: Any) -> bool:
    """Returns whether a checkpoint with this configuration is of a class that also reads images or
    sound. Some families have a class for text alone with the same configuration; then the
    checkpoint's `architectures` decide.
    """
    classes = transformers().models.auto.modeling_auto
    whole, text = classes.MODEL_FOR_MULTIMODAL_LM_MAPPING, classes.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in whole:
        return False
    if type(config) not in text or text[type(config)] is whole[type(config)]:
        return True
    return whole[type(config)].__name__ in (config.architectures or ())


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that makes and reads the model of a configuration."""
    library = transformers()
    if reads_more_than_text(config):
        return library.AutoModelForMultimodalLM
    return library.AutoModelForCausalLM


def empty_model(config: Any, dtype: torch.dtype, attention: str | None = None) -> nn.Module:
    """Returns `auto_class(config).from_config(config, dtype=dtype)` with its parameters on the
    meta device and real buffers. What `from_pretrained` keeps in fp32 is in fp32.

    The dtype is set in `config`, and so is the attention implementation if one is given. Raises
    ValueError for an implementation that the family does not have.
    """
    from accelerate import init_empty_weights

    chosen = {} if attention is None else {"attn_implementation": attention}
    with _BUILDING, init_empty_weights(include_buffers=False), _DefaultDtype(dtype):
        # The library would set torch's default dtype to a dtype that it receives.
        model = auto_class(config).from_config(config, dtype=None, **chosen)
    model.tie_weights()
    for part in (config, *(getattr(config, name) for name in config.sub_configs)):
        if part is not None:
            part.dtype = dtype
    _compute_buffers(model)
    _keep_in_fp32(model, dtype)
    return model


def names_in_model(
    model: Any, stored: Collection[str]
) -> tuple[dict[str, tuple[str, ...]], list[Any]]:
    """Returns the names that the tensors of a checkpoint have in `model`, by those in its files,
    and what the library changes when it reads these files. A tensor has several names where the
    library splits it.
    """
    loading = importlib.import_module("transformers.core_model_loading")
    mapping = importlib.import_module("transformers.conversion_mapping")
    conversions = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, loading.WeightConverter)]
    known = model.state_dict()
    found = {}
    for name in stored:
        own, pattern = loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, known
        )
        if own not in known and name in known:
            own, pattern = name, None
        split = [each.target_patterns for each in converters if pattern in each.source_patterns]
        first, *others = split[0] if split else ("",)
        found[name] = (own, *(own.replace(first, each) for each in others))
    return found, [each for each in conversions if each.was_used()]


def write_as_read(model: Any, conversions: list[Any]) -> None:
    """Makes the library write `model` as a checkpoint that it reads with these `conversions`, which
    `names_in_model` has found.
    """
    model._weight_conversions = conversions


def _compute_buffers(model: Any) -> None:
    """Computes the buffers anew in float32, and rounds them to their dtypes. So does
    `from_pretrained`, which computes them once the weights are read.
    """
    for module in model.modules():
        if module._buffers:
            module.__dict__.pop("_is_hf_initialized", None)
    model.initialize_weights()


def _keep_in_fp32(model: Any, dtype: torch.dtype) -> None:
    """Makes those parameters and persistent buffers fp32 that `from_pretrained` would read in fp32
    for a model in `dtype`.

    In bf16 these are the ones whose names match `_keep_in_fp32_modules_strict`. The names in
    `_keep_in_fp32_modules` count for fp16 alone, which we do not compute in. Parameters that the
    family's own code makes in fp32 are so already.
    """
    kept = list(model._get_dtype_plan(dtype))
    if not kept:
        return
    pattern, *_ = transformers().core_model_loading.build_glob_alternation(kept)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if pattern.search(name):
            tensor.data = tensor.data.float()


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switches transformers' own progress bars off, because our record reports progress."""
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
    """Stops transformers from logging warnings, because we report problems with loaded weights in
    one sentence.
    """
    logging = transformers().utils.logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def reported_progress(report: Callable[[float], None]) -> Iterator[None]:
    """Calls `report(share)` while the library loads or writes weights in this thread, instead of
    its progress bar.
    """
    logging = transformers().utils.logging
    thread = threading.get_ident()

    def bar(factory: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        is_ours = threading.get_ident() == thread
        if is_ours and args and hasattr(args[0], "__len__"):
            return _reporting(args[0], report)
        return factory(*args, **kwargs)

    before = logging.set_tqdm_hook(bar)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


Prepared = Callable[[dict[str, Any]], dict[str, Any]]
_READING = threading.local()
"""Its `read` is the function that reads weights in this thread (`weights_read_by`)."""


@contextmanager
def weights_read_by(
    read: Callable[[Any], torch.Tensor], prepared: Prepared | None = None
) -> Iterator[None]:
    """Makes the library read each weight that it loads in this thread by calling `read(stored)`, at
    the moment at which the model takes the weight. `stored` is a slice of safetensors, or a tensor
    of a mapped file, or what `prepared` puts in their place: before the library asks which weight
    of the model is made of which tensors, `prepared` is given all of them by name, and returns
    those that the library is to see.

    Otherwise the library's own threads read all weights at once, in the dtype of the model, ahead
    of those that the model has taken.
    """
    _READING.read, _READING.prepared = read, prepared
    try:
        yield
    finally:
        del _READING.read, _READING.prepared


def _let_weights_be_read(module: Any) -> None:
    """Makes `module`, the library's loader, ask `weights_read_by` how to read a weight."""
    ahead = module.spawn_materialize

    def spawn_materialize(threads: Any, stored: Any, *args: Any, **kwargs: Any) -> Any:
        read = getattr(_READING, "read", None)
        if read is None:
            return ahead(threads, stored, *args, **kwargs)
        # The library calls what it gets instead of a future once it needs the weight.
        return functools.partial(read, stored)

    module.spawn_materialize = spawn_materialize


def _let_weights_be_prepared(module: Any) -> None:
    """Makes `module`, which has the library's models, give all that is stored to `weights_read_by`
    before it is read.
    """
    convert = module.convert_and_load_state_dict_in_model

    def convert_prepared(model: Any, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        prepared = getattr(_READING, "prepared", None)
        stored = state_dict if prepared is None else prepared(state_dict)
        return convert(model, stored, *args, **kwargs)

    module.convert_and_load_state_dict_in_model = convert_prepared


def _let_llama_4_answer(module: Any) -> None:
    """Gives what a language model returns, of the library's `module`, the `image_outputs` for which
    the whole model of Llama 4 asks it. Without them it fails on any text (transformers 5.24).
    """
    if not hasattr(module.MoeCausalLMOutputWithPast, "image_outputs"):
        module.MoeCausalLMOutputWithPast.image_outputs = None


def _reporting(items: Collection[Any], report: Callable[[float], None]) -> Iterator[Any]:
    """Yields the items, and before each one reports the share done so far."""
    for done, item in enumerate(items):
        report(done / len(items))
        yield item


_HUGE = 1 << 28
"""Number of elements that no buffer has."""


def _size(args: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the size that a function which makes a tensor is given."""
    return tuple(args[0]) if args and isinstance(args[0], (tuple, list)) else args


class _DefaultDtype(TorchFunctionMode):
    """While it is active, tensors that are made without an explicit dtype get this one.

    It has the effect of `torch.set_default_dtype`, but in one thread only:

    - Functions that make tensors get the dtype. Zeros of `_HUGE` size, which can only be those of a
      parameter, occupy no memory: to write them takes minutes where a family's code makes stacks of
      experts so (Llama 4).
    - Whole numbers that become fractions, as in ``0.5 ** torch.arange(4)``, become fractions of
      this dtype.
    - `torch.get_default_dtype` cannot be changed for one thread, so it still says float32. But a
      tensor in float32 is here only cast to float32 where that function was asked, since the cast
      does nothing otherwise. So it is cast to this dtype.
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
    """Functions that make tensors of the default dtype."""
    _DEFAULT_FOR_FLOATS: ClassVar = {
        torch.full,
        torch.tensor,
        torch.scalar_tensor,
        torch.arange,
        torch.normal,
    }
    """Functions that do so if they are given Python floats."""
    _EXPLICIT: ClassVar = {torch.Tensor.float, torch.Tensor.to, torch.Tensor.type}
    """Functions that make tensors of the dtype that they are asked for."""
    _FILLING: ClassVar = {
        "normal_",
        "uniform_",
        "trunc_normal_",
        "kaiming_uniform_",
        "xavier_uniform_",
    }
    """Functions with these names fill a tensor with random numbers. The library puts functions of
    its own, with the same names, in place of those of torch.
    """

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self._dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else kwargs.get("tensor")
        if getattr(func, "__name__", "") in self._FILLING and tensor is not None and tensor.is_meta:
            # There is nothing to fill, and trying takes much of the time in which an empty model is
            # made.
            return tensor
        return self._made(func, args, kwargs)

    def _made(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns what `func` makes, in this dtype where it would make the default one."""
        if kwargs.get("dtype") is not None:
            return func(*args, **kwargs)
        if func in self._ALWAYS_DEFAULT:
            is_huge = func is torch.zeros and not kwargs and math.prod(_size(args)) >= _HUGE
            made = func(*((1,) if is_huge else args), **kwargs | {"dtype": self._dtype})
            return made.expand(_size(args)) if is_huge else made
        if func is torch.Tensor.to and args[1:] == (torch.float32,) and not kwargs:
            wanted = self._dtype if args[0].dtype == torch.float32 else torch.float32
            return func(args[0], wanted)
        made = func(*args, **kwargs)
        if self._became_fractions(func, made, args, kwargs):
            return made.to(self._dtype)
        if func in self._DEFAULT_FOR_FLOATS and made.is_floating_point():
            # A tensor or an array passed as an argument keeps its own dtype.
            has_own_dtype = any(hasattr(argument, "dtype") for argument in args)
            return made if has_own_dtype else made.to(self._dtype)
        return made

    def _became_fractions(
        self, func: Any, made: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Returns whether a function of tensors of whole numbers alone made fp32 without being
        asked for it.
        """
        if not isinstance(made, torch.Tensor) or made.dtype != torch.float32:
            return False
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, torch.Tensor)]
        asked = func in self._EXPLICIT or any(isinstance(value, torch.dtype) for value in given)
        return bool(tensors) and not asked and not any(each.is_floating_point() for each in tensors)
