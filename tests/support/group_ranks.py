"""Ranks as processes that exchange tensors by gloo, as ranks on CPUs do."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from engine.runtime.collectives.process_groups import ProcessGroupCollectives
from engine.runtime.collectives.rank import RankInfo

PATIENCE = 120
"""Seconds after which the processes are given up."""


def in_processes(
    ranks: int, work: Callable[[ProcessGroupCollectives], object], folder: Path, nodes: int = 1
) -> list:
    """Does `work`, a function of a module, in a process for each rank. Returns what each returned,
    which must be something that `torch.save` writes and `torch.load` reads.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # one process imports torch, and all are its forks
    processes = [
        context.Process(
            target=_serve, args=(RankInfo(rank, ranks // nodes, nodes), work, folder), daemon=True
        )
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in processes] == [0] * ranks
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]


def _serve(
    place: RankInfo, work: Callable[[ProcessGroupCollectives], object], folder: Path
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=(folder / "rendezvous").as_uri(),
        world_size=place.world_size,
        rank=place.rank,
        timeout=timedelta(seconds=PATIENCE),
    )
    torch.save(work(ProcessGroupCollectives(place)), folder / f"{place.rank}.pt")
    distributed.destroy_process_group()
