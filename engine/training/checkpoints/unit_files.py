"""Each unit of a model has a file in a checkpoint, with its planes one after another.

Several threads write the files chunk by chunk, in the order that a `Snapshot` gives. Each chunk has
a checksum of its own (XXH3, 128 bits), so chunks can be hashed at the same time and in any order.
XXH3 finds damage, as the checksum of a disk does; it is no protection against a forger. It hashes
some 20 GB/s on one core, so a checkpoint costs what its disk costs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import xxhash

from engine.planning.layout.layout import UnitLayout
from engine.training.checkpoints import staging
from engine.training.checkpoints.chunk_files import PAGE, THREADS, ChunkFile, Meter, in_threads
from engine.training.checkpoints.manifest import run_of
from engine.training.checkpoints.plane_snapshot import Snapshot

CHECKSUM = "xxh3_128"
"""The manifest says under this name how chunks are hashed."""
ALIGNED_BYTES = 1 << 20
"""A plane of at least this many bytes begins at a whole page of its file, so that it can be written
directly. Smaller planes follow each other without a gap.
"""


def chunk_checksum(content: memoryview) -> str:
    """Returns the checksum of a chunk, without the interpreter's lock."""
    return xxhash.xxh3_128_hexdigest(content)


def description(layout: UnitLayout) -> dict[str, Any]:
    """Describes a layout. Two layouts with the same description have interchangeable planes."""
    parameters = []
    for spec, offset in zip(layout.parameters, layout.offsets):
        fields = asdict(spec)
        # The planes are the same, whatever the device computes with, and whatever the weights mean.
        del fields["keep_in_fp32"], fields["adapter"], fields["experts"]
        if not spec.frozen:  # nearly all parameters are not, and a manifest stays short
            del fields["frozen"]
        parameters.append({**fields, "offset": offset})
    return {
        "unit": layout.unit,
        "numel": layout.numel,
        "decay_numel": layout.decay_numel,
        "parameters": parameters,
    }


def file_name(index: int, unit: str, kind: str) -> str:
    """Returns the name of a file of the unit with this index."""
    plain = re.sub("[^A-Za-z0-9]+", "-", unit)
    return f"{index:04d}-{plain}.{kind}"


class UnitFiles:
    """`UnitFiles` writes the files of all units of one snapshot into `folder`.

    `planes` gives the bytes of the planes of each layout that are written, in file order.
    """

    def __init__(self, folder: Path, layouts: Sequence[UnitLayout], planes: list[dict[str, int]]):
        self._files: dict[str, ChunkFile] = {}
        self._entries: dict[str, dict[str, Any]] = {}
        self._chunk_bytes = staging.CHUNK_BYTES
        try:
            for index, (layout, sizes) in enumerate(zip(layouts, planes)):
                name = file_name(index, layout.unit, "planes")
                self._entries[layout.unit] = _entry(layout, name, sizes, self._chunk_bytes)
                self._files[layout.unit] = ChunkFile(folder / name, run_of(folder))
        except BaseException:
            self._abandon()
            raise

    def write(self, snapshot: Snapshot, meter: Meter) -> list[dict[str, Any]]:
        """Writes and syncs all files, and returns their entries in the manifest.

        Raises OSError, Ended, and what the callback of `meter` raises. All threads have ended then.
        """

        def write_chunks() -> None:
            while (chunk := snapshot.next_to_write()) is not None:
                plane = self._entries[chunk.unit]["planes"][chunk.plane]
                number = chunk.begin // self._chunk_bytes
                try:
                    content = chunk.read().data
                    plane["checksums"][number] = chunk_checksum(content)
                    self._files[chunk.unit].write(content, plane["offset"] + chunk.begin)
                except BaseException:
                    snapshot.drop(chunk)
                    raise
                size = len(content)
                snapshot.written(chunk)
                meter.add(size)

        try:
            in_threads([write_chunks] * THREADS, meter)
            # The manifest is written later and must not reach the disk before these files.
            in_threads([file.close for file in self._files.values()], meter)
        finally:
            self._abandon()
        return list(self._entries.values())

    def _abandon(self) -> None:
        for file in self._files.values():
            file.abandon()


def _entry(
    layout: UnitLayout, name: str, sizes: dict[str, int], chunk_bytes: int
) -> dict[str, Any]:
    """Returns the entry of a unit in the manifest, whose checksums are still to be filled in."""
    planes = {}
    position = 0
    for plane, size in sizes.items():
        if size >= ALIGNED_BYTES:
            position = -(-position // PAGE) * PAGE
        chunks = -(-size // chunk_bytes)
        planes[plane] = {"offset": position, "bytes": size, "checksums": [""] * chunks}
        position += size
    return {**description(layout), "file": name, "bytes": position, "planes": planes}
