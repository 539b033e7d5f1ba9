"""The host states of a run, with each plane in the place that the plan gives it. What is unusual
about these places is logged.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

from engine.config.settings import TrainConfig
from engine.machine.findings import no_direct_access, refused_lock
from engine.machine.readings import is_wsl, lock_limit
from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.distributed.build_engine import sharing_with
from engine.runtime.distributed.worker_group import WorkerGroup, WorkerGroupPlan
from engine.runtime.host.host_states import HostStates
from engine.runtime.host.mapped_memory import shared_memory_has_huge_pages
from engine.runtime.host.shared_memory import OwnedMemory
from engine.runtime.optimizer.host_threads import default_threads
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.text import GIB, in_gib
from engine.training.loop.planning import TrainingJob
from engine.training.loop.session import Session

SMALL_PAGES = (
    "Memory that several processes share is in pages of 4 KiB on this machine, so its planes take "
    "about five times as long to be filled as in huge pages. As root, "
    "`echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled` gives it huge ones."
)


def start_workers(
    session: Session, job: TrainingJob, ranks: int, allocated: contextlib.ExitStack
) -> WorkerGroup | None:
    """Starts the processes of this node that compute a run together with this one, or takes those
    of torchrun, on all nodes; None where it computes alone. The worker group is registered in
    `allocated`. Raises RankError where one of them cannot be started.
    """
    if ranks * session.nodes == 1:
        return None
    # The settings have as many ranks as torchrun has started.
    assert session.launched_group is None or session.launched_group.place.local_world_size == ranks
    device, cap = job.backend.device.type, session.config.engine.gpu_memory_gib
    limit = None if cap is None else max(0, round(cap * GIB) - CUDA_CONTEXT_BYTES)
    threads = max(1, default_threads() // ranks)
    plan = WorkerGroupPlan(ranks, device, threads, limit, session.nodes)
    if device == "cuda" and not shared_memory_has_huge_pages():
        session.log("info", SMALL_PAGES)
    memory, launched_group = OwnedMemory(), session.launched_group
    workers = WorkerGroup(plan, memory, lambda trace: session.log("error", trace), launched_group)
    allocated.callback(workers.close)
    return workers


def join_nodes(
    session: Session, job: TrainingJob, allocated: contextlib.ExitStack
) -> tuple[WorkerGroup | None, TrainingJob]:
    """Returns the worker group of a run on several nodes, as `start_workers` does, with the job and
    what was measured of the network between them: plans are made with that. There is no group where
    one node computes. Raises RankError where they cannot reach each other.
    """
    if session.launched_group is None or session.nodes == 1:
        return None, job
    free = job.backend.memory()["free"]
    workers = start_workers(session, job, session.launched_group.place.local_world_size, allocated)
    assert workers is not None  # there are several ranks
    rate = workers.network_rate(job.backend.device)
    session.log(
        "info",
        f"Each of the {session.nodes} nodes receives {rate / 1e9:.2f} GB/s from the others "
        f"({8 * rate / 1e9:.1f} Gbit/s), as was measured now.",
    )
    taken = max(0, free - job.backend.memory()["free"])
    return workers, replace(job, network=rate, collective_bytes=taken)


def open_host_states(
    config: TrainConfig, job: TrainingJob, choices: PlanChoices, workers: WorkerGroup | None = None
) -> HostStates:
    """Returns host states in which nothing is allocated yet. The processes of `workers` share its
    planes.
    """
    model, backend = job.model, job.backend
    on_device = backend.device.type != "cpu"
    sharing = None
    if workers is not None:
        units = [unit.name for unit in model.units]
        sharing = sharing_with(workers, units, choices.sharding.nodes_per_replica)
    states = HostStates(
        model.layouts,
        model.dtype,
        backend.register if on_device else None,
        backend.unregister if on_device else None,
        None if workers is None else workers.plan.threads,
        disk=None if config.engine.disk is None else Path(config.engine.disk).expanduser(),
        sharing=sharing,
    )
    blocks = [unit.name for unit in model.blocks]
    states.placement.arrange(
        choices.placement.gpu_resident(blocks), backend, choices.placement.disk_offloaded(blocks)
    )
    return states


def report_placement(session: Session, engine: StreamingEngine, states: HostStates) -> None:
    """Logs what is on the disk, and what it costs that the system refused to register memory for
    transfers.
    """
    if states.placement.disk_offloaded or engine.saved_block_inputs.file_bytes:
        _report_disk_offload(session, engine, states)
    refused = engine.refused_bytes
    if refused:
        rate = engine.backend.unregistered_rate() / 1e9
        found = refused_lock(
            is_wsl(),
            lock_limit(),
            f"The system refused to lock {in_gib(refused)} of RAM for transfers",
        )
        session.log(
            "warning",
            f"{found.sentence} Results are the same. The driver copies at {rate:.1f} GB/s.",
        )


def _report_disk_offload(session: Session, engine: StreamingEngine, states: HostStates) -> None:
    disk, saved_block_inputs = states.placement.disk, engine.saved_block_inputs
    kinds = []
    if states.placement.disk_offloaded:
        moments = f"of {len(states.placement.disk_offloaded)} of {len(states.layouts)} units"
        kinds.append(f"moments {moments}, {in_gib(disk.nbytes)}")
    if saved_block_inputs.file_bytes:
        some = engine.choices.activations.disk_offloaded_block_inputs
        kinds.append(f"{some:,} block inputs of a step, {in_gib(saved_block_inputs.file_bytes)}")
    on_disk = ", and ".join(kinds)
    session.log(
        "info",
        f"{on_disk[0].upper()}{on_disk[1:]}, are on the disk, in {disk.folder}. Their files have "
        "no names, and the system frees them when this process ends. They are no checkpoint.",
    )
    if not (disk.is_direct and saved_block_inputs.is_direct):
        session.log("warning", no_direct_access(disk.folder))
