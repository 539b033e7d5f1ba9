"""A recorder turns the kernels of some work into a recording, which launches all of them at once.

`CudaRecorder` records CUDA graphs (https://docs.nvidia.com/cuda/cuda-c-programming-guide, "CUDA
Graphs"). A graph reads and writes the addresses that its kernels were recorded with, so whatever
changes from step to step must be in buffers that stay where they are.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

Work = Callable[[], None]


class Recording(Protocol):
    """Recorded work, which can be launched."""

    def replay(self) -> None:
        """Runs the recorded kernels on the current stream, and does not wait for them."""


class Recorder(Protocol):
    """Records work of COMPUTE, in the thread that launches that lane."""

    def rehearse(self, work: Work) -> None:
        """Runs `work` as it will be recorded, so that everything that it needs is compiled, chosen
        and allocated.
        """

    def record(self, work: Work) -> Recording:
        """Records the kernels that `work` launches, and runs none of them. The memory that the work
        allocates is kept for the recording. Recordings share it, so they must be replayed in the
        order in which they were made. Raises an error where the work cannot be recorded.
        """

    def has_drawn(self) -> bool:
        """Returns whether random numbers were drawn since the generator was seeded. Work that draws
        them would draw the same ones in each replay.
        """

    def tidy(self) -> None:
        """Releases the memory that rehearsals have left."""

    def wait(self) -> None:
        """Waits until no recording is running."""

    def clear(self) -> None:
        """Releases the memory of recordings, which nobody may hold any more."""


class CudaRecorder:
    """Recorder with a stream of its own, since the default stream cannot be recorded. Its
    recordings are replayed on the stream of COMPUTE.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def rehearse(self, work: Work) -> None:
        with self._own_stream():
            work()

    def record(self, work: Work) -> Recording:
        graph = torch.cuda.CUDAGraph()
        with self._own_stream(), _no_collection():
            # Other threads go on with their own streams, so only calls of this one are watched.
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                work()
            except BaseException:
                # This ends the recording. It raises what the failed call has left.
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def has_drawn(self) -> bool:
        # The state is a seed and an offset, of 8 bytes each; a seeded generator begins at 0.
        state = torch.cuda.default_generators[self._device.index].get_state()
        return bool(state[8:16].any())

    def tidy(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def clear(self) -> None:
        # A pool without recordings may be gone, or still be held by tensors of a step that failed.
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()

    @contextlib.contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Runs a block of code on the recorder's stream, after what the current stream has been
        given and before what it is given next.
        """
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            yield
        here.wait_stream(self._stream)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Keeps Python from freeing cycles meanwhile: freeing what belongs to the device could end a
    recording.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
