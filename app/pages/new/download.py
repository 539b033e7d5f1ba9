"""The weights that a run first downloads, and the disk that is left beside them."""

from __future__ import annotations

from dataclasses import replace

from engine.config.settings import TrainConfig
from engine.files import on_one_disk
from engine.machine.read_machine import Machine
from engine.model.hub.hub_cache import cache_folder
from engine.planning.fit.model_table import own_parameters
from engine.planning.shape.model_shape import ModelShape

PARAMETER_BYTES = 2
"""Bytes of a parameter as models are published."""


def download_bytes(shape: ModelShape, config: TrainConfig) -> int:
    """Returns about how large the weights of a model are on the hub."""
    return PARAMETER_BYTES * own_parameters(shape, config)


def size_text(size: int) -> str:
    """Returns the bytes of a download as a browser says them, such as 2.5 GB or 269 MB."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"


def on_disk_of_runs(machine: Machine, size: int) -> int:
    """Returns the bytes of a download that the disk of the runs takes: none where the cache of the
    hub is on another one.
    """
    is_elsewhere = machine.here and not on_one_disk(cache_folder(), machine.disk_path)
    return 0 if is_elsewhere or not machine.disk_path else size


def beside_download(machine: Machine, size: int) -> Machine:
    """Returns the machine after a download of so many bytes, with the disk that runs then have."""
    taken = on_disk_of_runs(machine, size)
    return replace(machine, disk_free=max(0, machine.disk_free - taken)) if taken else machine
