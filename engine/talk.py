"""Talking to weights: a model's as a run began, a checkpoint's, an exported folder's, or those of a paused run, which are
neither copied nor disturbed. Conversations are written by the tokenizer's own chat template where there is one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from engine.backend import open_backend
from engine.config import DataConfig, ModelConfig, TrainConfig
from engine.data.dates import fixed_date
from engine.data.encode import Encoder
from engine.data.special import ReservedText
from engine.engine import StreamingEngine
from engine.errors import DataError, FitError, GpuMemoryError, ModelError
from engine.generate import end_tokens, longest_row, stream
from engine.host_store import WEIGHT_PLANES
from engine.hub import fetch
from engine.machine import sample_host_memory
from engine.model import StreamedModel, build_model, load_config, load_tokenizer
from engine.paths import resolve_source
from engine.paused import PausedCalls
from engine.saved import Saved, open_model, open_saved
from engine.sizes import MIB, in_gib
from engine.weights import initialise, load_pretrained

MARGIN_BYTES = 512 * MIB
"""Of RAM and of GPU memory that is left to everything else, such as the caches of the answers."""
_PROBE = "R7x9Q"

Progress = Callable[..., None]
"""Called with (done, total), and with (done, total, what is done) where weights are downloaded before they are loaded."""
Message = dict[str, str]
"""{role: system, user or assistant; content}."""


@dataclass(frozen=True)
class Sampling:
    """How an answer is drawn; temperature 0 always takes the likeliest token."""

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Source:
    """Weights that can be loaded. kind: `base` (as the run of `config` began), `checkpoint` (`step` of run `run_id`, None for
    its newest) or `folder` (a Hugging Face folder, which `config` names)."""

    kind: str
    label: str = field(compare=False)
    config: TrainConfig
    runs_dir: str = ""
    run_id: str = ""
    step: int | None = None

    @cached_property
    def size(self) -> Size:
        """Raises ModelError where the model cannot be built."""
        return size_of(build_model(load_config(self.config.model.source), self.config.model),
                       self.kind != "checkpoint" and self.config.model.init == "pretrained")


@dataclass(frozen=True)
class Size:
    """Bytes: `host` of the weight planes, `loading` more while they are read, `device` of the buffers that an answer needs."""

    host: int
    loading: int
    device: int


def size_of(model: StreamedModel, is_read: bool) -> Size:
    """`is_read`: from a Hugging Face folder, which takes a copy on the way."""
    planes = [layout.plane_bytes(model.dtype) for layout in model.layouts]
    host = sum(size for plane in planes for name, size in plane.items() if name in WEIGHT_PLANES)
    high = [plane["weight_high"] for plane in planes]
    return Size(host, sum(high) if is_read else 0, high[0] + high[-1] + 2 * max(high[1:-1], default=0))


def base_of(config: TrainConfig) -> Source:
    """The model of a run as it was before the first step."""
    what = config.model.source if config.model.init == "pretrained" else f"{config.model.source}, random weights"
    return Source("base", f"Before training: {what}", config)


def checkpoint_of(runs_dir: str | os.PathLike[str], run_id: str, config: TrainConfig, step: int | None,
                  label: str) -> Source:
    return Source("checkpoint", label, config, os.fspath(runs_dir), run_id, step)


def folder_of(folder: str, label: str = "") -> Source:
    """A Hugging Face folder on this machine, such as an export, called by its own name without a `label`. Raises ModelError
    where there is none."""
    path = resolve_source(folder.strip()) if folder.strip() else None
    if path is None or not path.is_dir():
        raise ModelError(f"{folder.strip() or 'Nothing'} is not a folder on this machine; give a folder that was exported.")
    dtype = "float32" if str(getattr(load_config(str(path)), "dtype", "")).endswith("float32") else "bfloat16"
    config = TrainConfig(name=path.name, model=ModelConfig(source=str(path), dtype=dtype), data=DataConfig(source="none"))
    return Source("folder", label or path.name, config)


# ---------------------------------------------------------------------- what fits

TOGETHER, IN_TURN = "together", "in_turn"
_ADVICE, _NO_BASE = "close other programs or stop a run that is paused", ", or talk to the tuned model alone"


def how_they_fit(sources: list[Source], room: tuple[int, int | None] | None = None) -> str:
    """TOGETHER where the weights of all sources can be in memory at once, else IN_TURN. `room`: bytes of RAM and of GPU memory
    (None where none is used) that are free; measured if not given. Raises FitError with one sentence where one of them does
    not fit at all."""
    host, device = room or _room(any(source.config.engine.device != "cpu" for source in sources))
    for source in sources:
        size = source.size
        if size.host + size.loading + MARGIN_BYTES > host:
            raise FitError(f"{source.label} needs {in_gib(size.host + size.loading)} of RAM to answer and {in_gib(host)} is "
                           f"free; {_ADVICE}{_NO_BASE if source.kind == 'base' else ''}.")
        if device is not None and size.device + MARGIN_BYTES > device:
            raise FitError(f"{source.label} needs {in_gib(size.device)} of GPU memory to answer and {in_gib(device)} is free; "
                           f"{_ADVICE}{_NO_BASE if source.kind == 'base' else ''}.")
    held = peak = 0
    for source in sources:
        peak = max(peak, held + source.size.host + source.size.loading)
        held += source.size.host
    fits = peak + MARGIN_BYTES <= host
    if device is not None:
        fits = fits and sum(source.size.device for source in sources) + MARGIN_BYTES <= device
    return TOGETHER if fits else IN_TURN


def _room(on_device: bool) -> tuple[int, int | None]:
    from engine.cuda_backend import cuda_available

    if not on_device or not cuda_available():
        return sample_host_memory()[1], None
    backend = open_backend("cuda")
    try:
        return sample_host_memory()[1], backend.room()
    finally:
        backend.close()


# ---------------------------------------------------------------------- conversations


class Voice:
    """How a model is spoken to: its tokenizer, its chat template, its ends."""

    def __init__(self, config: TrainConfig, hf_config: Any, tokenizer: Any):
        self.tokenizer = tokenizer
        self.longest = longest_row(hf_config)
        self.ends = end_tokens(hf_config, tokenizer, config.model.source)
        self._encoder = Encoder(tokenizer, config.data.train_on, config.data.max_seq_len)
        self._control = self._encoder.renderer.control

    @classmethod
    def of(cls, config: TrainConfig) -> Voice:
        """Without any weights. Raises ModelError where there is no usable tokenizer."""
        return cls(config, load_config(config.model.source), load_tokenizer(config.model.source))

    @property
    def has_template(self) -> bool:
        return self._encoder.renderer.available

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template writes a system message."""
        if not self.has_template:
            return False
        with contextlib.suppress(DataError):
            return _PROBE in self._written([{"role": "system", "content": _PROBE}, {"role": "user", "content": "a"}])
        return False

    def prompt(self, messages: list[Message]) -> list[int]:
        """Token ids of a conversation up to where the next answer is due. Without a chat template, all that was written so
        far is one text, which goes on. Raises DataError where the template refuses the messages, and where they are longer
        than the model's rows."""
        if self.has_template:
            text = self._written(messages)
            ids = (self._control.encode(text)[0] if self._control.stands_in(text)
                   else self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        else:
            ids = self._encoder.question("".join(message["content"] for message in messages if message["role"] != "system"))
        if self.longest is not None and len(ids) >= self.longest:
            raise DataError(f"The conversation has {len(ids):,} tokens and this model takes {self.longest:,} at most; begin a "
                            "new chat or shorten the message.")
        return ids

    def _written(self, messages: list[Message]) -> str:
        try:
            stood_in = [self._control.stand_in(message, message["role"] == "assistant") for message in messages]
            return self.tokenizer.apply_chat_template(stood_in, tokenize=False, add_generation_prompt=True,
                                                      **fixed_date(self.tokenizer))
        except ReservedText:
            raise DataError("The message holds private-use characters that stand for special tokens here; leave them "
                            "out.") from None
        except Exception as error:  # templates raise what they like
            raise DataError(f"The model's chat template refuses this conversation ({str(error).rstrip('.')}); begin a new chat "
                            "or change the system message.") from error

    def text(self, ids: list[int]) -> str:
        """An answer so far; a character that is not whole yet is left out."""
        return self.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")


# ---------------------------------------------------------------------- talkers


@dataclass
class Talker:
    """Weights in memory that answer, one conversation at a time. `call` runs every piece of work on the model."""

    label: str
    voice: Voice
    call: Callable[[Callable[[], Any]], Any]
    engine: Callable[[], StreamingEngine]
    held_bytes: int = 0
    """Of RAM, by the weights that it has loaded."""
    _owned: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def answer(self, messages: list[Message], sampling: Sampling) -> Iterator[int]:
        """Token ids of the next answer as they are drawn; closing the iterator ends it and frees its cache. Raises DataError
        for a conversation that cannot be asked, FitError where memory runs out, and RunError once a paused run goes on."""
        ids = self.voice.prompt(messages)
        tokens = stream(self.engine(), ids, sampling.max_new_tokens, self.voice.ends, sampling.temperature,
                        sampling.top_p, sampling.seed, self.voice.longest)
        try:
            while True:
                token = self.call(lambda: next(tokens, None))
                if token is None:
                    return
                yield token
        except GpuMemoryError as error:
            raise FitError(f"The GPU ran out of memory{f' ({error.in_use})' if error.in_use else ''} while {self.label} "
                           "answered; begin a new chat, or unload and close other programs.") from error
        finally:
            tokens.close()

    def close(self) -> None:
        """Give the memory back; nothing may be answering."""
        self._owned.close()


def load(source: Source, progress: Progress | None = None) -> Talker:
    """Bring weights into memory, from the hub where they are not in its cache yet. What `progress` raises gives up. Raises
    RamstreamError for what cannot be loaded."""
    with contextlib.ExitStack() as owned:
        if source.kind == "checkpoint":
            saved = owned.enter_context(open_saved(source.runs_dir, source.run_id, source.step, progress))
        else:
            saved = owned.enter_context(_opened(source, progress))
        try:
            engine = saved.engine()
        except torch.OutOfMemoryError:
            raise FitError(f"The GPU has too little free memory for {source.label}; {_ADVICE}.") from None
        owned.callback(engine.close)
        voice = Voice(source.config, saved.model.config, saved.tokenizer)
        return Talker(source.label, voice, lambda work: work(), lambda: engine, saved.store.allocated_bytes,
                      owned.pop_all())


@contextlib.contextmanager
def _opened(source: Source, progress: Progress | None) -> Iterator[Saved]:
    """A model as a run would begin with it."""
    config = source.config
    if config.model.init == "pretrained":
        progress = _downloaded(source, progress)
    with open_model(config) as opened:
        if config.model.init == "random":
            initialise(opened.model, opened.store, config.train.seed, opened.backend.device, progress)
        else:
            load_pretrained(opened.model, config.model.source, opened.store, progress)
        yield opened


def _downloaded(source: Source, progress: Progress | None) -> Progress | None:
    """Bring weights into the hub's cache; how the loading that follows is told. What is there when it begins is not counted, so
    that the time left is that of what comes."""
    if progress is None:
        progress = _untold
    first: list[float] = []

    def downloading(done: float, total: float, _: str) -> None:
        first.extend([] if first else [done])
        progress(done - first[0], total - first[0], f"Downloading {source.config.model.source}")

    fetch(source.config.model.source, True, downloading, lambda: progress(0, 0))
    return (lambda done, total: progress(done, total, f"Loading the weights: {source.label}")) if first else progress


def _untold(*_: Any) -> None:
    """Progress that nobody follows."""


def borrow(paused: PausedCalls, config: TrainConfig, label: str) -> Talker:
    """The weights of a run that is paused in this process, as they are: each token is computed by the run's own thread.
    Raises RunError where it is not paused."""
    voice = Voice(config, *paused.do(lambda p: (p.model.config, p.tokenizer)))
    # The engine is asked for anew each time: whoever held it would hold the planes of a run that is over.
    return Talker(label, voice, lambda work: paused.do(lambda _: work()), lambda: paused.do(lambda p: p.engine))


def take_turns(answers: dict[str, Iterator[int]], on_token: Callable[[str, int], None], stopped: Callable[[], bool]) -> None:
    """A token of each of the answers in turn, `on_token(name, token)`, until all have ended or `stopped()`. Closes them."""
    going = dict(answers)
    try:
        while going:
            for name, tokens in list(going.items()):
                if stopped():
                    return
                token = next(tokens, None)
                if token is None:
                    del going[name]
                else:
                    on_token(name, token)
    finally:
        for tokens in answers.values():
            tokens.close()
