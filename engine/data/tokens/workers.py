"""Helper processes that tokenize. They share no memory with this process.

- This process sends each batch of rows to an idle helper and yields the answers in order. One
  thread per helper waits for the answers.
- Messages are pickled values, each preceded by its length.
- When a run ends, however it ends, its helpers reach the end of their input and exit too.
"""

from __future__ import annotations

import contextlib
import pickle
import queue
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from engine.data.formats.formats import ColumnMap
from engine.data.tokens import cache_key
from engine.data.tokens.encode import Encoder
from engine.data.tokens.encoded import Encoded, Numbered, encode_batch, has_long_text
from engine.errors import DataError
from engine.helper_process import HelperProcess, ending, take_output

_PROGRAM = "from engine.data.tokens.workers import serve; serve()"
_LENGTH = struct.Struct("<Q")
_OTHER_VERSION = 77
"""Exit code of a helper that has loaded different code from the process that started it."""
_BATCHES_AHEAD = 2
"""Number of batches of each helper: one that it works on, and one in the queue."""
_ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
"""Settings of one thread for each process, because there is one process for each core."""


class EncodingProcesses:
    """An instance starts helper processes that encode batches with copies of `encoder`. Use it in a
    `with` block: leaving the block ends the processes. While they start, this process continues.

    `name` is the name of the source in errors.
    """

    def __init__(self, encoder: Encoder, count: int, name: str):
        self._encoder = encoder
        self._name = name
        self._count = count
        self._all: list[HelperProcess] = []
        self._idle: queue.SimpleQueue[HelperProcess] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="tokenize")
        try:
            for _ in range(count):
                process = HelperProcess(_PROGRAM, _ONE_THREAD)
                self._all.append(process)
                process.widen()
            program = pickle.dumps(cache_key.PROGRAM)
            start = pickle.dumps((encoder.tokenizer, encoder.settings))
            # A process reads this when it has imported what it needs.
            self._started = [
                self._threads.submit(self._send, process, program, start) for process in self._all
            ]
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> EncodingProcesses:
        return self

    def __exit__(self, *_: Any) -> None:
        # The processes are killed first, because a thread that waits for a process ends only when
        # the process does.
        for process in self._all:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._all:
            process.close()

    def encode(
        self, columns: ColumnMap, batches: Iterator[list[Numbered]], pause: Callable[[], None]
    ) -> Iterator[tuple[list[Numbered], Encoded]]:
        """Encodes each batch and yields it with its tokens, in order. Raises what `encode_batch`
        raises, and DataError when a process ends. An error from `batches` is raised after all
        batches read before it have been yielded, as in a single process.

        A batch with a long text is encoded in this process, where the library has a thread for each
        core; `pause` is that of `Encoder.encode`.
        """
        for process, started in zip(self._all, self._started):
            started.result()
            self._send(process, pickle.dumps(columns))
            self._idle.put(process)
        under_way: deque[tuple[list[Numbered], Future[Encoded] | None]] = deque()

        def first() -> tuple[list[Numbered], Encoded]:
            batch, future = under_way.popleft()
            if future is not None:
                return batch, future.result()
            return batch, encode_batch(self._encoder, columns, batch, pause)

        failed: Exception | None = None
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:  # noqa: BLE001  it is re-raised below
                failed = error
                break
            if batch is None:
                break
            is_here = has_long_text(columns, batch)
            under_way.append(
                (batch, None if is_here else self._threads.submit(self._encode, batch))
            )
            if len(under_way) >= self._count * _BATCHES_AHEAD:
                yield first()
        while under_way:
            yield first()
        if failed is not None:
            raise failed

    def _encode(self, batch: list[Numbered]) -> Encoded:
        process = self._idle.get()
        try:
            self._send(process, pickle.dumps(batch))
            answer = _receive(process.output)
        except EOFError:
            raise self._ended(process) from None
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _send(self, process: HelperProcess, *messages: bytes) -> None:
        try:
            for content in messages:
                process.send(_LENGTH.pack(len(content)), content)
        except OSError:
            raise self._ended(process) from None

    def _ended(self, process: HelperProcess) -> DataError:
        code = process.wait()
        if code == _OTHER_VERSION:
            return DataError("The program was changed on the disk while it ran; start it again.")
        return DataError(
            f"A process that tokenizes {self._name} ended ({ending(code)}); free some memory if it "
            "ran out, then start again."
        )


def _receive(pipe: IO[bytes]) -> Any:
    """Reads one message. Raises EOFError when the other side has closed the pipe, even within a
    message.
    """
    header = pipe.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    content = pipe.read(length)
    if len(content) < length:
        raise EOFError
    return pickle.loads(content)


def serve() -> None:
    """Runs a helper process: it reads batches from standard input, and writes arrays to the
    original standard output.
    """
    answers = take_output()
    with contextlib.suppress(EOFError, BrokenPipeError):
        if _receive(sys.stdin.buffer) != cache_key.PROGRAM:
            sys.exit(_OTHER_VERSION)
        tokenizer, settings = _receive(sys.stdin.buffer)
        encoder = Encoder(tokenizer, *settings)
        columns = _receive(sys.stdin.buffer)
        while True:
            batch = _receive(sys.stdin.buffer)
            content = pickle.dumps(_answer(encoder, columns, batch))
            answers.write(_LENGTH.pack(len(content)) + content)
            answers.flush()


def _answer(encoder: Encoder, columns: ColumnMap, batch: list[Numbered]) -> Encoded | Exception:
    """Returns the encoded batch, or the error for the main process to raise."""
    try:
        return encode_batch(encoder, columns, batch)
    except DataError as error:
        return error
    except Exception as error:  # noqa: BLE001  a bug: the traceback is printed in this process
        traceback.print_exc()
        return RuntimeError(f"{type(error).__name__}: {error}")
