"""`launch.py bench`: ceilings of this machine, then the engine on a preset's shape against them,
and against training of the same shape with all states on the device.
"""

from __future__ import annotations

import gc
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.bench.bench_table import as_text, streamed_as_text
from engine.bench.resident import (
    ResidentFigures,
    ResidentSettings,
    resident_bytes,
    train_resident,
)
from engine.bench.steps import (
    Planes,
    RunFigures,
    RunSettings,
    StepFigures,
    random_rows,
    run_steps,
)
from engine.config.settings import TrainConfig
from engine.data.rows import micro_batch_bounds
from engine.errors import ConfigError, FitError
from engine.fit.choose import Chosen, choose
from engine.fit.cost import MicroBatch, step_flops
from engine.fit.job import Job, Target
from engine.fit.needs import Verdict
from engine.fit.predict import predicted_seconds
from engine.fit.report import estimate
from engine.fit.sizes import CUDA_CONTEXT_BYTES
from engine.machine.cgroups import sample_host_memory
from engine.machine.rates import ONE_THREAD, store_rates
from engine.machine.read_machine import read_machine
from engine.model.library import errors_only
from engine.model.measure_shape import shape_of
from engine.model.pretrained_files import load_config
from engine.model.shape import ModelShape
from engine.runtime.backend import Backend
from engine.runtime.ceilings import Ceilings, measure, one_thread_rates
from engine.runtime.open_backend import open_backend
from engine.words import GIB

CEILING_SECONDS = {"cuda": 0.5, "cpu": 0.3}
"""For each figure."""
_RANDOM = ("data.source=random tokens", "model.init=random")
LEAST_STEPS = 4
HIDDEN = 0.05
"""Exposed share of a step up to which compute is what bounds it."""
RESIDENT_TOKENS = 65_536
"""Of a micro-batch at most: more gains nothing."""
RESIDENT_SHARE = 0.95
"""Of the free device memory, that states and the activations that are kept may take."""
BOUNDS = {
    "h2d": "the bus to the device",
    "d2h": "the bus from the device",
    "optimizer": "the optimizer",
    "other": "Python, which launches the work",
}


def bench(
    preset: str | Path | None,
    overrides: Sequence[str],
    then: Sequence[str],
    seconds: float,
    compare: bool,
    as_json: bool,
    say: Callable[[str], None],
) -> str:
    """What the command line asks for, as text or JSON: without preset and overrides the ceilings
    alone. then: further overrides, several in one string, each trained as well on the planes of the
    same model. seconds: that each training runs, its first half to warm up. compare: also train
    with all states on the device. `say` is told what is measured meanwhile. Raises RamstreamError
    for bad input and for what does not fit.
    """
    configs = []
    if preset is not None:
        configs = [TrainConfig.load(preset, overrides)]
    elif overrides:
        configs = [TrainConfig().with_overrides([*_RANDOM, *overrides])]
    for more in then:
        if not configs:
            raise ConfigError(
                "--then", "there is no first training that it could change; give a preset or --set."
            )
        configs.append(configs[0].with_overrides(more.split()))
        if (
            configs[-1].model != configs[0].model
            or configs[-1].engine.device != configs[0].engine.device
        ):
            raise ConfigError(
                "--then", f"{more!r} changes the model or the device; measure that by itself."
            )
    for config in configs:
        _refuse_what_does_not_fit(config)
    backend = open_backend(configs[0].engine.device if configs else "auto")
    try:
        result = measured(configs, backend, seconds, say, compare)
    finally:
        backend.close()
    return json.dumps(result, indent=2) if as_json else as_text(result)


def measured(
    configs: Sequence[TrainConfig],
    backend: Backend,
    seconds: float,
    say: Callable[[str], None],
    compare: bool = True,
) -> dict[str, Any]:
    """All figures as plain data: of the machine, and of one training for each configuration, all of
    the same model.
    """
    machine = read_machine()
    ceilings = measure(
        backend, CEILING_SECONDS[backend.device.type], lambda what: say(f"Measuring {what}")
    )
    store_rates(backend.device_name, ceilings.rates())
    if backend.device.type == "cpu":
        say("Measuring one thread")
        store_rates(ONE_THREAD, one_thread_rates(backend, CEILING_SECONDS["cpu"]))
    result: dict[str, Any] = {
        "machine": machine.to_dict() | {"device": backend.device_name},
        "ceilings": ceilings.to_dict(),
        "trainings": [],
    }
    if not configs:
        return result
    free = sample_host_memory()[1]
    with errors_only():
        say("Filling the planes with random weights")
        model = configs[0].model
        planes = Planes.open(
            load_config(model.source), backend, model.dtype, attention=model.attention
        )
        try:
            # Before the first training, which moves parts of the model to the device.
            shape = replace(shape_of(planes.model, model.source), packs=False)
            for config in configs:
                result["trainings"].append(
                    _training(config, planes, shape, ceilings, free, seconds, say, compare)
                )
        finally:
            planes.close()
    return result


def _training(
    config: TrainConfig,
    planes: Planes,
    shape: ModelShape,
    ceilings: Ceilings,
    free: int,
    seconds: float,
    say: Callable[[str], None],
    compare: bool,
) -> dict[str, Any]:
    streamed, chosen = _streamed(config, planes, shape, ceilings, free, seconds, say)
    say(streamed_as_text(streamed))
    resident = {"ways": [], "why_not": "not asked for"}
    if compare:
        resident = _resident(config, planes.backend, shape, chosen, seconds, say)
    ways = [way["seconds"] for way in resident["ways"]]
    return {
        "streamed": streamed,
        "resident": resident | {"ratio": min(ways) / streamed["seconds"] if ways else None},
    }


def _refuse_what_does_not_fit(config: TrainConfig) -> None:
    report = estimate(config, replace(read_machine(), disk_path=""))  # nothing is written
    if report.verdict == Verdict.DOES_NOT_FIT:
        raise FitError(" ".join([report.headline, *report.reasons[:2]]))


# ---------------------------------------------------------------------- streamed


def _streamed(
    config: TrainConfig,
    planes: Planes,
    shape: ModelShape,
    ceilings: Ceilings,
    free: int,
    seconds: float,
    say: Callable[[str], None],
) -> tuple[dict[str, Any], Chosen]:
    """free: bytes of RAM that there were before the planes."""
    limit, backend = None, planes.backend
    gc.collect()
    backend.reset_peak()  # what was measured or trained before has left memory behind
    if backend.device.type == "cuda":
        limit = config.engine.within_cap(backend.memory()["free"] + CUDA_CONTEXT_BYTES)
    length, rows = config.data.max_seq_len, config.train.batch_size
    target = Target(backend.device.type, limit, free, ceilings.rates())
    chosen = choose(Job(shape, config, length), target)
    try:
        if limit is not None and config.engine.gpu_memory_gib is not None:
            backend.limit_memory(limit - CUDA_CONTEXT_BYTES)
        sizes = [stop - start for start, stop in micro_batch_bounds(rows, chosen.micro_batch_size)]
        batches = random_rows(sizes, length, shape.vocab_size)
        say(
            f"Training, streamed: {rows} rows of {length:,} tokens a step, in micro-batches of "
            f"{chosen.micro_batch_size}"
        )
        settings = RunSettings(
            chosen.choices, LEAST_STEPS, 1e-6, chosen.loss_chunk, seconds=seconds
        )
        run = run_steps(planes, batches, settings)
        rss = sample_host_memory()[0]
    finally:
        if limit is not None:
            backend.limit_memory(backend.memory()["total"])
    return _as_figures(run, shape, chosen, ceilings, backend, rows, length, rss), chosen


def _as_figures(
    run: RunFigures,
    shape: ModelShape,
    chosen: Chosen,
    ceilings: Ceilings,
    backend: Backend,
    rows: int,
    length: int,
    rss: int,
) -> dict[str, Any]:
    steady = run.steps[len(run.steps) // 2 :]
    took = statistics.fmean(step.seconds for step in steady)
    choices = chosen.choices
    flops = step_flops(shape, rows, length, len(shape.blocks) - choices.kept_blocks)
    exposed = _mean(steady, "exposed")
    share = sum(exposed.values()) / took
    predicted = predicted_seconds(
        shape,
        choices,
        ceilings.rates(),
        MicroBatch(chosen.micro_batch_size, length),
        backend.device.type,
    )
    adamw = statistics.fmean(step.rates["adamw_g_s"] for step in steady) * 1e9
    return {
        "parameters": shape.parameter_count,
        "tokens_per_step": rows * length,
        "steps": len(steady),
        "seconds": took,
        "seconds_by_step": [step.seconds for step in run.steps],
        "predicted_seconds": predicted,
        "tokens_per_second": rows * length / took,
        "tflops": {name: value / took / 1e12 for name, value in flops.items()},
        "utilisation": flops["hardware"] / took / ceilings.matmul,
        "exposed": exposed,
        "exposed_share": share,
        "bound": "compute" if share <= HIDDEN else BOUNDS[max(exposed, key=exposed.get)],
        "busy": _mean(steady, "busy"),
        "by_kind": _mean(steady, "by_kind"),
        "overlap": _mean(steady, "overlap"),
        "adamw_parameters_per_second": adamw,
        "adamw_of_sweep": adamw / ceilings.sweep,
        "launch_seconds": statistics.fmean(run.launches[len(run.launches) // 2 :]),
        "choices": choices.to_dict()
        | {"micro_batch_size": chosen.micro_batch_size, "loss_chunk": chosen.loss_chunk},
        "gaps": steady[-1].gaps,
        "allocator_retries": [step.retries for step in run.steps],
        "peak_device_bytes": run.peak,
        "peak_reserved_bytes": run.reserved,
        "planned_device_bytes": chosen.gpu_bytes,
        "host_rss_bytes": rss,
        "host_boundaries_bytes": run.host_boundaries,
        "losses": [step.loss for step in run.steps],
        "timeline": run.timeline,
    }


def _mean(steps: Sequence[StepFigures], name: str) -> dict[str, float]:
    first = getattr(steps[0], name)
    return {
        key: statistics.fmean(getattr(step, name).get(key, 0.0) for step in steps) for key in first
    }


# ---------------------------------------------------------------------- all states on the device


def _resident(
    config: TrainConfig,
    backend: Backend,
    shape: ModelShape,
    chosen: Chosen,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Both ways of training with all states on the device, where they fit, each with its largest
    micro-batch.
    """
    rows, length = config.train.batch_size, config.data.max_seq_len
    on_device = backend.device.type == "cuda"
    gc.collect()
    backend.reset_peak()  # what was streamed before has left memory behind
    free = backend.memory()["free"] if on_device else sample_host_memory()[1]
    needed = resident_bytes(shape.parameter_count, shape.dtype)
    if needed > RESIDENT_SHARE * free:
        return {
            "ways": [],
            "why_not": f"its states alone take {needed / GIB:,.1f} GiB of the {free / GIB:,.1f} GiB "
            "that are free there",
        }
    batches = random_rows([rows], length, shape.vocab_size)
    compiled = chosen.choices.compiled
    found: list[ResidentFigures] = []
    why_not = ""
    for recompute in (True, False):
        # On the CPU what is too large is not refused but ends the process: the planner's size fits.
        sizes = (
            _resident_sizes(
                shape, rows, length, RESIDENT_SHARE * free - needed, recompute, compiled
            )
            if on_device
            else [chosen.micro_batch_size]
        )
        say(f"Training, all states on the device, {'with' if recompute else 'without'} recompute")
        try:
            found.append(
                train_resident(
                    load_config(config.model.source),
                    config.model,
                    backend,
                    batches,
                    ResidentSettings(recompute, sizes, chosen.loss_chunk, seconds, compiled),
                )
            )
        except FitError as error:
            why_not = str(error)
            continue
        say(f"{found[-1].seconds:,.2f} s a step, in micro-batches of {found[-1].micro_batch_size}")
    flops = step_flops(shape, rows, length, 0)
    return {
        "ways": [
            asdict(way)
            | {
                "tflops": {
                    name: flops[name] / way.seconds / 1e12 for name in ("parameters", "model")
                }
            }
            for way in found
        ],
        "why_not": why_not,
    }


def _resident_sizes(
    shape: ModelShape, rows: int, length: int, free_bytes: float, recompute: bool, compiled: bool
) -> list[int]:
    """Rows of a micro-batch, largest first: those whose activations alone are not too much for the
    bytes that states leave.
    """

    def kept(size: int) -> float:
        block = max(
            (unit.compiled_activations if compiled else unit.activations).of(size, length)
            for unit in shape.blocks
        )
        return block + (len(shape.blocks) - 1) * (
            size * length * shape.hidden_size * shape.item_bytes if recompute else block
        )

    sizes = sorted({-(-rows // count) for count in range(1, rows + 1)}, reverse=True)
    return [
        size for size in sizes if size * length <= RESIDENT_TOKENS and kept(size) <= free_bytes
    ] or [1]
