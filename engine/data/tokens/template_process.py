"""Another process runs chat templates, with limits of time and memory.

A template comes with a model from strangers. The library runs it in a sandbox, which keeps it from
files and from the network, but a template can still loop without end or build a text that fills the
memory. So it runs where it can be ended.

- A request is a pickled `Asked`, preceded by its length.
- The first line of the answer, in JSON, confirms that the request was taken. Lines with the texts
  of some chats each follow.
- The process ends when a template exceeds a limit, when its input ends, and when nothing has been
  asked of it for a while.
"""

from __future__ import annotations

import functools
import pickle
import resource
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import msgspec
import psutil

from engine.data.formats.example import Message
from engine.errors import DataError
from engine.helper_process import HelperProcess, take_output
from engine.machine.cgroups import sample_host_memory


@dataclass(frozen=True)
class Chat:
    """Messages, and the tools that the template receives."""

    messages: list[Message]
    tools: list[Any] | None = None

    def until(self, end: int) -> Chat:
        """Returns the chat of the messages before place `end`."""
        return Chat(self.messages[:end], self.tools)


@dataclass(frozen=True)
class Refusal:
    """The refusal of a chat by a template, with its message."""

    message: str


MOST_SECONDS = 5.0
"""Seconds for which a template may compute on one chat."""
MOST_BYTES = 1 << 30
"""Bytes of memory that a template may take."""
_SILENT_SECONDS = 20.0
"""Seconds of silence after which the process is ended: some work of a template cannot be
interrupted.
"""
_START_SECONDS = 120.0
_IDLE_SECONDS = 30.0
_SHORT_OF_MEMORY = 4 << 30
"""Free bytes below which the process, which takes some 70 MiB, matters."""
_A_MOMENT = 0.2
_CHARACTERS = 1 << 20
"""Approximate number of characters of texts that are sent at once."""
Written = tuple[str, str | None]
"""Text of a chat, and its refusal, with which there is no text."""
_PROGRAM = "from engine.data.tokens.template_process import serve; serve()"
_LENGTH = struct.Struct("<Q")
_VARIABLES = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
_TOO_LONG = (
    f"The chat template of this model computes for more than {MOST_SECONDS:g} s on one "
    "conversation; use a model with another template."
)
_TOO_LARGE = (
    f"The chat template of this model takes more than {MOST_BYTES >> 30} GiB of memory for one "
    "conversation; remove that row if it is very long, or use a model with another template."
)
_ENDED = (
    "The chat template of this model ended the process that ran it; use a model with another "
    "template."
)
_LIMITS = {"time": _TOO_LONG, "memory": _TOO_LARGE}


@dataclass(frozen=True)
class Asked:
    """Chats that a request asks for, written by a template."""

    template: str
    variables: dict[str, Any]
    """The template sees these names, such as those of special tokens."""
    chats: list[Chat]
    generation: bool
    """Whether the beginning of an answer follows each chat."""


class TemplateProcess:
    """An instance starts the process when it is needed, and again after it has ended. Several
    threads may use it; their requests are answered one after another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: HelperProcess | None = None

    def write(self, asked: Asked) -> list[str | Refusal]:
        """Returns the template's text for each chat, or its refusal. Raises DataError when the
        template exceeds a limit.
        """
        with self._lock:
            try:
                return self._written(asked)
            except BaseException:
                self._end()  # answers that nobody has read would be taken for those of the next
                raise

    def end_if_memory_is_short(self) -> None:
        """Ends the process where its memory may decide whether a run fits. Elsewhere it ends after
        a while. The next request starts another, which takes a second.
        """
        if sample_host_memory()[1] < _SHORT_OF_MEMORY:
            with self._lock:
                self._end()

    def _written(self, asked: Asked) -> list[str | Refusal]:
        process = self._asked(pickle.dumps(asked, protocol=5))
        found: list[str | Refusal] = []
        while len(found) < len(asked.chats):
            answer = process.next_line(_SILENT_SECONDS)
            if answer is None:
                raise DataError(_TOO_LONG)
            if not answer:
                raise DataError(_ENDED)
            if "limit" in answer:
                raise DataError(_LIMITS[answer["limit"]])
            for text, refused in answer["texts"]:
                found.append(text if refused is None else Refusal(refused))
        return found

    def _asked(self, content: bytes) -> HelperProcess:
        """Sends a request, and returns the process that has taken it."""
        if self._process is not None:
            if _takes(self._process, content):
                return self._process
            self._end()  # it had been idle, and a new one takes the request
        self._process = HelperProcess(_PROGRAM, _VARIABLES)
        if not _takes(self._process, content):
            raise DataError(
                "The process that runs chat templates did not start; free some memory, then try "
                "again."
            )
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close()
            self._process = None


def _takes(process: HelperProcess, content: bytes) -> bool:
    try:
        process.send(_LENGTH.pack(len(content)), content)
    except OSError:
        return False
    return bool(process.next_line(_START_SECONDS))


@functools.cache
def template_process() -> TemplateProcess:
    """Returns the one instance of this program."""
    return TemplateProcess()


# ---------------------------------------------------------------------- the other process


class _TimeIsUp(BaseException):
    """Raised when the template has computed for too long. No template can catch it."""


def serve() -> None:
    """Answers the requests on standard input until nothing is asked for a while."""
    answers = take_output()
    # The import takes a second, so it comes before memory is limited and time is counted.
    from transformers.utils import chat_template_utils

    _limit_memory()
    signal.signal(signal.SIGPROF, _time_is_up)
    while (asked := _request(sys.stdin.buffer)) is not None:
        _send(answers, b'{"taken":true}')
        try:
            for texts in _written(chat_template_utils.render_jinja_template, asked):
                _send(answers, msgspec.json.encode({"texts": texts}))
        except _TimeIsUp:
            _send(answers, b'{"limit":"time"}')
            return
        except MemoryError:
            _send(answers, b'{"limit":"memory"}')
            return


def _limit_memory() -> None:
    most = psutil.Process().memory_info().vms + MOST_BYTES
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or most < hard:
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _time_is_up(*_: Any) -> None:
    raise _TimeIsUp


def _request(stream: BinaryIO) -> Asked | None:
    """Returns the next request, or None when there is none."""
    ready, _, _ = select.select([stream], [], [], _IDLE_SECONDS)
    header = stream.read(_LENGTH.size) if ready else b""
    if len(header) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(header)
    return pickle.loads(stream.read(length))


def _written(render: Any, asked: Asked) -> Iterator[list[Written]]:
    """Yields the texts of all chats, in lists of those that take a moment to write: each list wakes
    the other process.
    """
    found: list[Written] = []
    size, until = 0, time.monotonic() + _A_MOMENT
    for chat in asked.chats:
        text, refused = _text(render, asked, chat)
        found.append((text, refused))
        size += len(text)
        if size > _CHARACTERS or time.monotonic() > until:
            yield found
            found = []
            size, until = 0, time.monotonic() + _A_MOMENT
    if found:
        yield found


def _text(render: Any, asked: Asked, chat: Chat) -> Written:
    """Returns the text of a chat, or the message of its refusal."""
    # Computing time is counted, not time: a busy machine must not refuse a harmless template.
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        texts, _ = render(
            conversations=[chat.messages],
            tools=chat.tools,
            chat_template=asked.template,
            add_generation_prompt=asked.generation,
            **asked.variables,
        )
        texts[0].encode()  # raises for half of a surrogate pair
        return texts[0], None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  a template may raise anything
        return "", str(error)[:500].encode(errors="replace").decode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _send(answers: BinaryIO, answer: bytes) -> None:
    answers.write(answer + b"\n")
    answers.flush()
