"""The command `launch.py bench` measures this machine and the engine's speed on it.

- The ceilings of the machine are measured and stored, since plans are made with them.
- A preset's model is trained with random weights on random tokens, streamed as in a run: whole, in
  parts or with adapters, and on pairs of random answers where the preset learns from preferences.
- If all states of a model that is trained whole fit on the device, it is then trained again with
  its states there.
- With --sampling, answers are drawn from the random weights instead.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from engine.config.optimizers import OPTIMIZERS
from engine.config.settings import TrainConfig
from engine.errors import ConfigError, FitError
from engine.machine.cgroups import sample_host_memory
from engine.machine.disk_rates import with_disk
from engine.machine.offload_folder import check_offload_folder
from engine.machine.rates import ONE_THREAD, store_rates
from engine.machine.read_machine import read_machine
from engine.model.build.library import errors_only
from engine.model.build.measure_shape import shape_of
from engine.model.build.read_model import configured
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.chosen import Chosen
from engine.planning.fit.cost_model import ONE_OF_TWO_PASSES
from engine.planning.fit.device_memory import CUDA_CONTEXT_BYTES
from engine.planning.fit.disk_offload import disk_offload_room
from engine.planning.fit.job import Job, Target
from engine.planning.fit.report import estimate
from engine.planning.fit.requirements import FitStatus
from engine.planning.shape.model_shape import ModelShape
from engine.runtime.device.backend import Backend
from engine.runtime.device.open_backend import open_backend, open_run_backend
from engine.runtime.measure.machine_rates import PeakRates, measure, one_thread_rates
from engine.text import GIB
from engine.tools.bench.bench_table import as_text, streamed_as_text
from engine.tools.bench.credible import share_of, without_doubtful
from engine.tools.bench.plan_training import (
    plan_training,
    planned_rows,
    planned_seconds,
    predicted_host_bytes,
    reported_seconds,
    rows_of_step,
)
from engine.tools.bench.resident import (
    ResidentFigures,
    ResidentSettings,
    resident_bytes,
    train_resident,
)
from engine.tools.bench.resident_sizes import resident_sizes
from engine.tools.bench.steady import steady
from engine.tools.bench.step_flops import step_flops
from engine.tools.bench.steps import (
    Planes,
    RunFigures,
    RunSettings,
    Trained,
    mean_of,
    mean_rate,
    random_rows,
    run_steps,
)
from engine.tools.bench.time_evaluation import time_evaluation
from engine.tools.bench.time_sampling import SamplingJob, time_sampling
from engine.training.loop.memory_watch import PeakMemory, resident_files

CEILING_SECONDS = {"cuda": 0.5, "cpu": 0.3}
"""Seconds for which each ceiling is measured, by device."""
_RANDOM = ("data.source=random tokens", "model.init=random")
"""Settings of a training without a preset."""
LEAST_STEPS = 4
LONG_STEP_SECONDS = 60
"""Predicted seconds of a step above which half as many steps are run."""
SHARES = {
    "utilization": "",
    "exposed_share": "",
    "adamw_of_alone": "adamw_parameters_per_second",
    "device_adamw_of_memory": "device_adamw_parameters_per_second",
}
"""Figures that are fractions of what a machine reaches, or of the step, each with its own rate."""
HIDDEN = 0.05
"""Fraction of a step's time up to which its waits are ignored when compute is named as its
bound.
"""
RESIDENT_SHARE = 0.95
"""Fraction of the free device memory that states and saved activations may take."""
ONLY_STREAMED = "adapters, parts of a model and preferences are measured streamed alone"
BEFORE_STEPS = "the pass over other answers before each step"
BOUNDS = {
    "h2d": "the bus to the device",
    "d2h": "the bus from the device",
    "optimizer": "the optimizer",
    "disk": "the disk of moments",
    "exchange": "the exchange between GPUs",
    "other": "Python, which launches the work",
}

ON_CPU = {"h2d": "copies of weights within RAM", "d2h": "copies of gradients within RAM"}
"""Causes under their names on the CPU, which has no bus."""


@dataclass(frozen=True)
class Trainings:
    """Trainings to measure, as the command line names them; none without a preset and overrides.

    Each text in `then` holds further overrides, with which the first training is measured once more
    on the planes of the same model.
    """

    preset: str | Path | None = None
    overrides: Sequence[str] = ()
    then: Sequence[str] = ()

    def configs(self) -> list[TrainConfig]:
        """Returns one configuration for each training. Raises ConfigError for bad input."""
        configs = []
        if self.preset is not None:
            configs = [TrainConfig.load(self.preset, tuple(self.overrides))]
        elif self.overrides:
            configs = [TrainConfig().with_overrides([*_RANDOM, *self.overrides])]
        for more in self.then:
            if not configs:
                raise ConfigError(
                    "--then",
                    "there is no first training that it could change; give a preset or --set.",
                )
            first = configs[0]
            changed = first.with_overrides(more.split())
            if _of_planes(changed) != _of_planes(first):
                raise ConfigError(
                    "--then",
                    f"{more!r} changes the model, what of it is trained, or the device; measure "
                    "that by itself.",
                )
            configs.append(changed)
        return configs


def _of_planes(config: TrainConfig) -> tuple[Any, ...]:
    """Returns the settings that the planes of a model depend on."""
    return config.model, config.train.parts, config.engine.device


def _print_line(what: str) -> None:
    """Prints to the error stream which measurement begins."""
    print(f"{what} ...", file=sys.stderr)


@dataclass(frozen=True)
class Measuring:
    """How trainings are measured. Each runs for `seconds`, or for twice as many where no two steps
    in a row have agreed, which ends the warm-up. The last step does not count, since no forward
    follows it.

    A training has at least `steps` steps; where this is None, LEAST_STEPS or half as many. `report`
    is called with a text for each measurement that begins. compare: the model is also trained with
    all states on the device. evaluation: rows of an evaluation that is timed after each training.
    sampling: answers that are drawn instead of training; None to train.
    """

    seconds: float
    compare: bool = True
    evaluation: int = 0
    report: Callable[[str], None] = _print_line
    steps: int | None = None
    sampling: SamplingJob | None = None


@dataclass(frozen=True)
class _Bench:
    """What the trainings of one model share.

    `free` and `resident` are the bytes of RAM that were free, and that this process had, before the
    planes were filled.
    """

    how: Measuring
    planes: Planes
    shape: ModelShape
    peak_rates: PeakRates
    free: int
    resident: int

    @property
    def backend(self) -> Backend:
        return self.planes.backend

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        return cast(Literal["cpu", "cuda"], self.backend.device.type)


def bench(trainings: Trainings, how: Measuring, as_json: bool) -> str:
    """Returns the figures as text or JSON; without trainings, only those of the machine.

    Raises RamstreamError for bad input and for a training that does not fit.
    """
    configs = trainings.configs()
    if how.sampling is not None and not configs:
        raise ConfigError(
            "--sampling", "no model is named; give a preset or --set model.source=..."
        )
    for config in configs if how.sampling is None else ():
        _refuse_what_does_not_fit(config)
    backend = open_run_backend(configs[0]) if configs else open_backend("auto")
    try:
        result = measured(configs, backend, how)
    finally:
        backend.close()
    return json.dumps(result, indent=2) if as_json else as_text(result)


def measured(configs: Sequence[TrainConfig], backend: Backend, how: Measuring) -> dict[str, Any]:
    """Measures the machine and the trainings; returns all figures as plain data.

    There is one training for each configuration. All configurations must have the same model.
    """
    report = how.report
    # A model that cannot be read is refused before the measurements, which take a minute.
    model_configs = [configured(config.model) for config in configs[:1]]
    machine = read_machine()
    peak_rates = measure(
        backend, CEILING_SECONDS[backend.device.type], lambda what: report(f"Measuring {what}")
    )
    store_rates(backend.device_name, peak_rates.rates())
    if backend.device.type == "cpu":
        report("Measuring one thread")
        store_rates(ONE_THREAD, one_thread_rates(backend, CEILING_SECONDS["cpu"]))
    result: dict[str, Any] = {
        "machine": machine.to_dict() | {"device": backend.device_name},
        "ceilings": peak_rates.to_dict(),
        "trainings": [],
        "samplings": [],
    }
    if not configs:
        return result
    resident, free = sample_host_memory()
    with errors_only():
        report("Filling the planes with random weights")
        model = configs[0].model
        is_shared = any(config.engine.gpus != 1 for config in configs)
        trained = Trained(configs[0].train.parts, is_shared)
        planes = Planes.open(model_configs[0], backend, model, False, trained)
        try:
            if how.sampling is not None:
                result["samplings"] = [_sampled(configs[0], planes, how.sampling, report)]
                return result
            # The shape is read before the first training, which moves parts of the model to the
            # device.
            shape = replace(shape_of(planes.model, model.source), packs=False)
            shared = _Bench(how, planes, shape, peak_rates, free, resident)
            for config in configs:
                is_last = config is configs[-1]
                result["trainings"].append(_training(config, shared, is_last))
        finally:
            planes.close()
    return result


def _sampled(
    config: TrainConfig, planes: Planes, job: SamplingJob, report: Callable[[str], None]
) -> dict[str, Any]:
    """Returns the figures of drawing answers, within the GPU memory that may be used."""
    if config.engine.gpu_memory_gib is not None and planes.backend.device.type == "cuda":
        limit = config.engine.within_cap(planes.backend.memory()["free"] + CUDA_CONTEXT_BYTES)
        planes.backend.limit_memory(limit - CUDA_CONTEXT_BYTES)
    report(f"Sampling: {job.text}")
    return time_sampling(planes, job)


def _training(config: TrainConfig, bench: _Bench, is_last: bool) -> dict[str, Any]:
    """Returns the figures of one training, streamed and with all states on the device."""
    bench = replace(bench, shape=bench.shape.with_optimizer(config.train.optimizer))
    is_plain = config.train.parts is None and not config.objective.is_preference
    streamed, chosen = _streamed(config, bench)
    if not is_last or (bench.how.compare and is_plain):
        # What is trained next, with other settings or in memory, needs the device's memory.
        bench.planes.leave_device()
    bench.how.report(streamed_as_text(streamed))
    why_not = "not asked for" if is_plain or not bench.how.compare else ONLY_STREAMED
    resident: dict[str, Any] = {"ways": [], "why_not": why_not}
    if bench.how.compare and is_plain:
        resident = _resident(config, bench, chosen)
    ways = [way["seconds"] for way in resident["ways"]]
    resident["ratio"] = min(ways) / streamed["seconds"] if ways else None
    return {"streamed": streamed, "resident": resident}


def _refuse_what_does_not_fit(config: TrainConfig) -> None:
    # The disk is not considered, since a bench writes nothing to it.
    report = estimate(config, replace(read_machine(), disk_path=""), shape_of_run(config))
    if report.status == FitStatus.DOES_NOT_FIT:
        raise FitError(" ".join([report.headline, *report.reasons[:2]]))


# ---------------------------------------------------------------------- streamed


def _streamed(config: TrainConfig, bench: _Bench) -> tuple[dict[str, Any], Chosen]:
    """Trains as in a run; returns the figures and the choices of the plan."""
    limit, backend, shape = None, bench.backend, bench.shape
    gc.collect()
    backend.reset_peak()  # frees what earlier measurements and trainings left cached
    if bench.device == "cuda":
        limit = config.engine.within_cap(backend.memory()["free"] + CUDA_CONTEXT_BYTES)
    rows, sequences = config.train.batch_size, config.objective.sequences
    length = config.data.max_seq_len
    rates = with_disk(bench.peak_rates.rates(), config)
    if config.engine.disk is not None:
        bench.planes.host_states.placement.offload_to_disk(check_offload_folder(config.engine.disk))
    machine = read_machine()
    target = Target(bench.device, limit, bench.free, rates, disk_offload_room(config, machine))
    job = Job(shape, config, config.row_tokens)
    chosen = plan_training(job, target, machine)
    bench.planes.use(shape.optimizer, chosen.choices)
    try:
        if limit is not None and config.engine.gpu_memory_gib is not None:
            backend.limit_memory(limit - CUDA_CONTEXT_BYTES)
        answers, batches = rows_of_step(config, chosen, shape)
        of_pairs = ", two of each pair," if sequences == 2 else ""
        bench.how.report(
            f"Training, streamed: {sequences * rows} rows of {length:,} tokens{of_pairs} a step, "
            "in "
            f"micro-batches of {sequences * chosen.micro_batch_size}"
        )
        planned, seconds = planned_seconds(chosen, job, target), bench.how.seconds
        steps = bench.how.steps or LEAST_STEPS // (2 if planned > LONG_STEP_SECONDS else 1)
        settings = RunSettings(
            chosen.choices, steps, 1e-6, chosen.loss_chunk, seconds=seconds, answers=answers
        )
        peak = PeakMemory()
        run = run_steps(bench.planes, batches, settings)
        rss = bench.planes.host_memory()
        of_host = {
            "host_rss_bytes": rss,
            "host_peak_bytes": peak.read() + rss - sample_host_memory()[0],
            "host_file_bytes": resident_files(),
            "predicted_host_bytes": predicted_host_bytes(chosen, job, machine, bench.resident),
        }
        evaluated = _evaluated(config, bench, chosen)
    finally:
        if limit is not None:
            backend.limit_memory(backend.memory()["total"])
    figures = _as_figures(config, bench, chosen, run) | of_host
    predicted = reported_seconds(chosen, job, target)
    return figures | {"predicted_seconds": predicted, "evaluation": evaluated}, chosen


def _evaluated(config: TrainConfig, bench: _Bench, chosen: Chosen) -> dict[str, Any] | None:
    """Returns the figures of an evaluation with the buffers of the training, if it is asked for."""
    rows, size = bench.how.evaluation, chosen.micro_batch_size
    if not rows:
        return None
    bench.how.report(f"Evaluating {rows} rows, in micro-batches of {size}")
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    batches = random_rows(sizes, config.data.max_seq_len, bench.shape.vocab_size)
    figures = time_evaluation(bench.planes, batches, chosen)
    return asdict(figures) | {
        "of_floor": figures.of_floor,
        "of_apart": figures.seconds / figures.apart_seconds,
        "host_rss_bytes": sample_host_memory()[0],
    }


def _as_figures(
    config: TrainConfig, bench: _Bench, chosen: Chosen, run: RunFigures
) -> dict[str, Any]:
    """Returns the figures of a run, from the steps after the warm-up."""
    # No forward follows the last step, so its updates are sooner done. It counts if it is alone.
    counted = steady(run.seconds[:-1] or run.seconds)
    taken, launches = run.steps[:-1] or run.steps, run.launches[:-1] or run.launches
    shape, peak_rates = bench.shape, bench.peak_rates
    length, rows = config.data.max_seq_len, config.objective.sequences * config.train.batch_size
    kept = taken[-len(counted.seconds) :]
    took = counted.mean
    choices = chosen.choices
    recomputed = (
        len(shape.blocks) - shape.forward_blocks - choices.activations.blocks_without_recompute
    )
    learned = planned_rows(chosen, Job(shape, config, config.row_tokens))
    flops = step_flops(shape, rows, length, max(0, recomputed), learned)
    flops["hardware"] -= choices.activations.attention_blocks * shape.attention.flops(rows, length)
    exposed = mean_of(kept, "exposed")
    share = sum(exposed.values()) / took
    longest_wait = max(exposed, key=lambda cause: exposed[cause])
    bounds = BOUNDS | ({"other": BEFORE_STEPS} if config.objective.has_pass else {})
    if bench.device == "cpu":
        bounds |= ON_CPU
    assert peak_rates.sweep is not None  # only a measurement for plans omits it
    # With moments in fp32, a sweep over the same memory is compared.
    alone = peak_rates.other_optimizers.get(shape.optimizer, peak_rates.sweep)
    passes = 2 * ONE_OF_TWO_PASSES[shape.dtype] if choices.updates.moments_after_weights else 1.0
    adamw, there = (mean_rate(kept, name) for name in ("adamw_g_s", "device_adamw_g_s"))
    # Products are measured in float32 on the CPU, and are faster there in bf16.
    has_peak = bench.device == "cuda" or shape.dtype == "float32"
    peak = choices.sharding.ranks * peak_rates.matmul
    on_gpu = bench.device == "cuda"
    # Where matrices are multiplied, a rate depends on their sides and is not bound by memory.
    is_swept = not OPTIMIZERS[shape.optimizer].orthogonalizes
    figures = {
        "parameters": shape.parameter_count,
        "trained_parameters": shape.trained_count,
        "method": config.train.method,
        "objective": config.objective.name,
        "reference_seconds": run.reference_seconds,
        "tokens_per_step": rows * length,
        **counted.to_dict(),
        "seconds_by_step": run.seconds,
        "tokens_per_second": rows * length / took,
        "tflops": {name: value / took / 1e12 for name, value in flops.items()},
        "utilization": share_of(flops["hardware"] / took, peak) if has_peak else None,
        "exposed": exposed,
        "exposed_share": share,
        "updated_parameters": run.updated,
        "bound": "compute" if share <= HIDDEN else bounds[longest_wait],
        "busy": mean_of(kept, "busy"),
        "by_kind": mean_of(kept, "by_kind"),
        "overlap": mean_of(kept, "overlap"),
        "adamw_parameters_per_second": None if adamw is None else 1e9 * adamw,
        "adamw_of_alone": share_of(
            1e9 * adamw * passes if adamw is not None and is_swept else None, alone
        ),
        "device_adamw_parameters_per_second": None if there is None else 1e9 * there,
        "device_adamw_of_memory": share_of(
            1e9 * there * OPTIMIZERS[shape.optimizer].update_bytes
            if there is not None and is_swept
            else None,
            choices.sharding.ranks * peak_rates.device_memory,
        ),
        "optimizer": shape.optimizer,
        # On the CPU, the thread that launches the work also does it.
        "launch_seconds": statistics.fmean(launches[counted.warm_up :]) if on_gpu else None,
        "choices": choices.to_dict()
        | {"micro_batch_size": chosen.micro_batch_size, "loss_chunk": chosen.loss_chunk},
        "gaps": kept[-1].gaps,
        "allocator_retries": [step.retries for step in run.steps],
        "peak_device_bytes": run.peak if on_gpu else None,
        "peak_reserved_bytes": run.reserved if on_gpu else None,
        "planned_device_bytes": chosen.gpu_bytes if on_gpu else None,
        "offloaded_input_bytes": run.offloaded_block_inputs,
        "losses": [step.loss for step in run.steps],
        "timeline": run.timeline,
    }
    return without_doubtful(figures, SHARES)


# ---------------------------------------------------------------------- all states on the device


def _resident(config: TrainConfig, bench: _Bench, chosen: Chosen) -> dict[str, Any]:
    """Trains with all states on the device, with and without recompute, if they fit.

    Both use the largest micro-batch that fits.
    """
    backend, shape, report = bench.backend, bench.shape, bench.how.report
    rows, length = config.train.batch_size, config.data.max_seq_len
    on_device = bench.device == "cuda"
    gc.collect()
    backend.reset_peak()  # frees what the streamed training left cached
    free = backend.memory()["free"] if on_device else sample_host_memory()[1]
    needed = resident_bytes(shape.parameter_count, shape.dtype)
    if needed > RESIDENT_SHARE * free:
        why_not = (
            f"its states alone take {needed / GIB:,.1f} GiB of the {free / GIB:,.1f} GiB "
            "that are free there"
        )
        return {"ways": [], "why_not": why_not}
    batches = random_rows([rows], length, shape.vocab_size)
    compiled = chosen.choices.kernels.compiled
    found: list[ResidentFigures] = []
    why_not = ""
    for recompute in (True, False):
        # On the CPU, a size that is too large does not raise an error but ends the process. The
        # planner's size is known to fit.
        sizes = [chosen.micro_batch_size]
        if on_device:
            left = RESIDENT_SHARE * free - needed
            sizes = resident_sizes(config, shape, left, recompute, compiled)
        report(
            f"Training, all states on the device, {'with' if recompute else 'without'} recompute"
        )
        try:
            found.append(
                train_resident(
                    configured(config.model),
                    config.model,
                    backend,
                    batches,
                    ResidentSettings(
                        recompute, sizes, chosen.loss_chunk, bench.how.seconds, compiled
                    ),
                )
            )
        except FitError as error:
            why_not = str(error)
            continue
        report(
            f"{found[-1].seconds:,.2f} s a step, in micro-batches of {found[-1].micro_batch_size}"
        )
    flops = step_flops(shape, rows, length, 0)
    ways = []
    for way in found:
        rates = {name: flops[name] / way.seconds / 1e12 for name in ("parameters", "model")}
        ways.append(way.to_dict() | {"tflops": rates})
    return {"ways": ways, "why_not": why_not}
