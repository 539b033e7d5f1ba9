"""`bench --disk` measures how fast the disk of a folder reads and writes: both at once, as steps do
it with moments on the disk (`engine.disk`), and each alone, as they do it with block inputs there.

The first gigabytes go to a cache of the drive, at a rate that it does not keep. So as much is
written as no cache holds, and only the last quarter counts. Then it writes alone, and reads alone.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from engine.errors import RunError
from engine.files import disk_free
from engine.machine.disk_rates import DRAINED_BYTES, RATED_BYTES, DiskRates, store_disk_rates
from engine.machine.offload_folder import check_offload_folder
from engine.runtime.host.disk_file import DiskFile
from engine.runtime.host.mapped_memory import map_memory
from engine.text import GIB, in_gib

FILE_BYTES = 8 * GIB
"""Bytes of the file to which chunks are written again and again, at most."""
LEAST_BYTES = GIB
"""Bytes of the file, at least."""
CHUNK_BYTES = 32 << 20
_COUNTED = 0.75
"""Fraction of the writing after which it counts."""
_ALONE = 0.125
"""Fraction of what is written at once that is then written alone, and read alone."""


@dataclass
class _Progress:
    """Bytes moved at each time, in order."""

    moved: list[tuple[float, int]] = field(default_factory=list)

    def add(self, nbytes: int) -> None:
        """Adds a chunk that was moved now."""
        before = self.moved[-1][1] if self.moved else 0
        self.moved.append((time.perf_counter(), before + nbytes))

    def rate_since(self, begin: float) -> float:
        """Returns the bytes per second from a moment on."""
        there = [(at, total) for at, total in self.moved if at >= begin]
        if len(there) < 2:
            raise RunError("The disk moved too little to be measured; try again.")
        (first, start), (last, stop) = there[0], there[-1]
        return (stop - start) / (last - first)


def bench_disk(folder: str, as_json: bool, report: Callable[[str], None]) -> str:
    """Measures the disk of a folder, keeps its rates, and returns them as text or JSON. Raises
    ConfigError for a folder that takes no moments, and RamstreamError where the disk fails.
    """
    place = check_offload_folder(folder)
    nbytes = DRAINED_BYTES * (1 + _ALONE)
    percent = 100 * nbytes / RATED_BYTES
    report(
        f"Writing {nbytes / 1e9:.0f} GB to {place} while reading, {percent:.2g} % of what a "
        f"drive rated for {RATED_BYTES / 1e12:.0f} TB lasts"
    )
    rates = measured_disk(place, DRAINED_BYTES)
    store_disk_rates(place, rates)
    if as_json:
        return json.dumps({"folder": str(place), **rates.to_dict()}, indent=2)
    return (
        f"{place} reads {rates.read / 1e9:.2f} GB/s and writes {rates.write / 1e9:.2f} GB/s at "
        f"once, with the drive's cache full. Alone, it reads {rates.read_alone / 1e9:.2f} GB/s and "
        f"writes {rates.write_alone / 1e9:.2f} GB/s. Plans with engine.disk use these rates from "
        "now on."
    )


def measured_disk(folder: Path, nbytes: int) -> DiskRates:
    """Returns the rates of a folder's disk after `nbytes` bytes were written to it."""
    size = min(FILE_BYTES, disk_free(folder) // 2) // CHUNK_BYTES * CHUNK_BYTES
    if size < LEAST_BYTES:
        raise RunError(
            f"{folder} has {in_gib(disk_free(folder))} free; to measure its disk, free some space."
        )
    file = DiskFile(folder, size)
    try:
        both = _moved(file, nbytes)
        count = max(2, int(_ALONE * nbytes) // CHUNK_BYTES)
        write, read = (_alone(file, move, count) for move in (DiskFile.write, DiskFile.read))
        written = both.written + count * CHUNK_BYTES
        return replace(both, written=written, read_alone=read, write_alone=write)
    finally:
        file.close()


def _alone(file: DiskFile, move: Callable[[DiskFile, memoryview, int], None], count: int) -> float:
    """Returns the bytes per second at which chunks are moved while nothing else is."""
    memory, progress = _chunk(), _Progress()
    for number in range(count):
        move(file, memory, number * CHUNK_BYTES % file.nbytes)
        progress.add(CHUNK_BYTES)
    return progress.rate_since(0.0)


def _chunk() -> memoryview:
    """Returns a chunk of random bytes, since a drive might compress zeros."""
    memory = memoryview(map_memory(CHUNK_BYTES))
    content = np.frombuffer(memory, np.uint8)
    content[:] = np.random.default_rng(0).integers(0, 256, CHUNK_BYTES, np.uint8)
    return memory


def _moved(file: DiskFile, nbytes: int) -> DiskRates:
    """Writes `nbytes` bytes to a file while another thread reads it."""
    reading, writing = _Progress(), _Progress()
    ended = threading.Event()
    errors: list[BaseException] = []

    def read() -> None:
        memory = memoryview(map_memory(CHUNK_BYTES))
        offset = file.nbytes // 2 // CHUNK_BYTES * CHUNK_BYTES
        try:
            while not ended.is_set():
                file.read(memory, offset)
                reading.add(CHUNK_BYTES)
                offset = (offset + CHUNK_BYTES) % file.nbytes
        except BaseException as error:  # noqa: BLE001  raised by the thread that waits
            errors.append(error)

    reader = threading.Thread(target=read, name="disk-reads")
    reader.start()
    try:
        memory = _chunk()
        for written in range(0, nbytes, CHUNK_BYTES):
            file.write(memory, written % file.nbytes)
            writing.add(CHUNK_BYTES)
    finally:
        ended.set()
        reader.join()
    if errors:
        raise errors[0]
    begin = writing.moved[int(_COUNTED * len(writing.moved))][0]
    return DiskRates(reading.rate_since(begin), writing.rate_since(begin), writing.moved[-1][1])
