"""What the engine does on this machine, in numbers: `python -m tests.gpu.report [--json FILE]
[--only large,flat]`.

Sections: `checks` (all of tests/gpu: CUDA against CPU, streamed against resident, laws 2 and 3),
`overlap` (a small model whose transfers take as long as its compute), `flat` (peak device memory
against depth), `syncs` (calls that made the host wait for the device within a step) and `large`
(Qwen2.5 7B from random weights). A section that fails says so in one line and the others still run.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from engine.machine.cgroups import sample_host_memory
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.backend import Backend
from engine.runtime.device.open_backend import open_backend
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.tools.bench.steps import Planes, RunFigures, RunSettings, random_rows, run_steps
from tests.gpu.measure import llama, peak_at_depth, qwen_7b, synchronizations

GIB = 2**30
DEPTHS = (8, 32, 96)
HOST_BYTES_A_PARAMETER = 14.2
HOST_SLACK = 4 * GIB
LOSS_POSITIONS = 4096


def say(text: str = "") -> None:
    print(text, flush=True)


def joined(figures: dict[str, float] | dict[str, float | None], digits: int = 2) -> str:
    """Returns the figures that were measured."""
    known = {name: value for name, value in figures.items() if value is not None}
    return ", ".join(f"{name} {value:.{digits}f}" for name, value in known.items())


def checks(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, because deterministic kernels are a setting of the whole process."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(Path(__file__).parent), "-p", "no:cacheprovider"],
        capture_output=True,
        text=True,
    )
    say(
        "\n".join(
            f"  {line}"
            for line in done.stdout.splitlines()
            if line.startswith(("FAILED", "ERROR")) or "passed" in line
        )
    )
    return {"ok": done.returncode == 0, "output": done.stdout[-20_000:]}


def overlap(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    planes = Planes.open(llama(8, args.width), backend)
    try:
        run = run_steps(
            planes,
            random_rows([4, 4], 512, 512),
            RunSettings(PlanChoices(micro_batches=2, offloaded_block_inputs=True), 4, 1e-4),
        )
    finally:
        planes.close()
    last = run.steps[-1]
    say(f"  busy: {joined(last.busy, 4)}")
    say(f"  at once: {joined(last.overlap, 4)}")
    ok = all(last.overlap[name] > 0 for name in ("H2D+COMPUTE", "D2H+COMPUTE", "H2D+COMPUTE+D2H"))
    return {"ok": ok, "step": dataclasses.asdict(last)}


def memory_at_depths(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    peak_at_depth(backend, 2, args.width)  # libraries allocate their workspaces in the first run
    peaks = {}
    for depth in DEPTHS:
        began = time.perf_counter()
        peaks[depth], parameters = peak_at_depth(backend, depth, args.width)
        say(
            f"  {depth:3d} layers, {parameters / 1e6:7.1f} M parameters: peak "
            f"{peaks[depth] / 2**20:9.2f} MiB ({time.perf_counter() - began:.0f} s)"
        )
    spread = (max(peaks.values()) - min(peaks.values())) / max(1, min(peaks.values()))
    say(f"  spread {spread:.3%}, at most 2 % allowed")
    return {"ok": spread <= 0.02, "peak_bytes": peaks, "spread": spread}


def syncs(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    """Calls of one step that made the host wait for the device, and whether telemetry adds any (law
    8).
    """
    if backend.device.type != "cuda":
        say("  skipped: there is no GPU")
        return {"ok": True}
    planes = Planes.open(llama(4, args.width), backend)
    batches = random_rows([4, 4], 512, 512)
    engine = StreamingEngine(
        planes.model,
        planes.host_states,
        backend,
        EngineSettings(PlanChoices(micro_batches=2), 2048, 512),
        planes.adamw,
    )
    try:
        engine.train_step(1, batches, 1e-4)
        engine.drain()
        bare = synchronizations(engine, 2, batches, 1e-4)
        watched = synchronizations(engine, 3, batches, 1e-4, lambda home: backend.memory())
    finally:
        engine.close()
        planes.close()
    say(f"  a step: {dict(bare)}; with telemetry: {dict(watched)}")
    return {"ok": not watched - bare, "step": dict(bare), "with_telemetry": dict(watched)}


def large(backend: Backend, args: argparse.Namespace) -> dict[str, Any]:
    config = llama(2, args.width) if args.small else qwen_7b()
    available = sample_host_memory()[1]
    say(
        f"  host memory available: {available / GIB:.1f} GiB of "
        f"{psutil.virtual_memory().total / GIB:.1f}"
    )
    began = time.perf_counter()
    planes = Planes.open(config, backend)
    count = planes.model.parameter_count
    say(
        f"  {count / 1e9:.3f} B parameters in {planes.host_states.allocated_bytes / GIB:.2f} GiB "
        f"planes, {planes.host_states.pinned_bytes / GIB:.2f} pinned, filled in "
        f"{time.perf_counter() - began:.0f} s"
    )
    try:
        main = train(planes, config, args, 1, args.steps, args.micro_batch, args.loss_chunk)
        rss, left = sample_host_memory()
        limit = HOST_BYTES_A_PARAMETER * count + HOST_SLACK
        say(
            f"  host: RSS {rss / GIB:.2f} GiB ({rss / count:.2f} bytes a parameter), allowed "
            f"{limit / GIB:.2f}; available memory fell by {(available - left) / GIB:.2f} GiB"
        )
        memory = backend.memory()
        say(
            f"  device: peak {main.peak / GIB:.2f} GiB, reserved {main.reserved / GIB:.2f}, plan's "
            f"buffers {main.fixed / GIB:.2f}, driver beyond the allocator "
            f"{(memory['total'] - memory['free'] - memory['reserved']) / GIB:.2f}"
        )
        losses = [s.loss for s in main.steps]
        variants, first = {}, args.steps + 1
        for text in args.variants:
            say(f"  variant {text}")
            sizes = [int(number) for number in text.split(":")]
            variants[text] = dataclasses.asdict(train(planes, config, args, first, 2, *sizes))
            first += 2
    finally:
        planes.close()
    ok = rss <= limit and losses[-1] < losses[0]
    return {
        "ok": ok,
        "parameters": count,
        "rss": rss,
        "rss_allowed": limit,
        "available_before": available,
        "available_after": left,
        "run": dataclasses.asdict(main),
        "variants": variants,
    }


def train(
    planes: Planes,
    config,
    args: argparse.Namespace,
    first: int,
    steps: int,
    micro_batch: int,
    loss_chunk: int,
    resident: int = 0,
    kept: int = 0,
) -> RunFigures:
    choices = PlanChoices(
        micro_batches=args.rows // micro_batch,
        blocks_kept_in_slots=resident,
        blocks_without_recompute=kept,
    )
    batches = random_rows([micro_batch] * choices.micro_batches, args.length, config.vocab_size)

    run = run_steps(planes, batches, RunSettings(choices, steps, args.rate, loss_chunk, first))
    for s in run.steps:
        say(
            f"  step {s.step}: loss {s.loss:.4f}, grad norm {s.grad_norm:.3f}, {s.seconds:.3f} s, "
            f"{s.tflops:.0f} TFLOPS; exposed {joined(s.exposed, 3)}"
        )
    last = run.steps[-1]
    say(f"    busy: {joined(last.busy)}; by kind: {joined(last.by_kind)}")
    say(
        f"    at once: {joined(last.overlap)}; {joined(last.rates, 1)}; peak {run.peak / GIB:.2f} "
        "GiB"
    )
    return run


SECTIONS: dict[str, Callable[[Backend, argparse.Namespace], dict[str, Any]]] = {
    "checks": checks,
    "overlap": overlap,
    "flat": memory_at_depths,
    "syncs": syncs,
    "large": large,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--device", default="auto", help="auto, cuda or cpu")
    parser.add_argument(
        "--small", action="store_true", help="a tiny model in place of the 7.6B one"
    )
    parser.add_argument("--width", type=int, default=1024, help="width of the small models")
    parser.add_argument("--rows", type=int, default=148)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--micro-batch", type=int, default=37, help="rows; divides --rows")
    parser.add_argument(
        "--loss-chunk",
        type=int,
        default=LOSS_POSITIONS,
        help="positions whose logits exist at once",
    )
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rate", type=float, default=2e-5)
    parser.add_argument(
        "--variants",
        nargs="*",
        default=[],
        metavar="ROWS:CHUNK[:RESIDENT[:KEPT]]",
        help="two more steps each with another micro-batch, loss chunk, resident and kept blocks",
    )
    args = parser.parse_args()
    backend = open_backend(args.device)
    say(f"{backend.device_name}, torch {torch.__version__}, {psutil.cpu_count()} cores")
    results: dict[str, Any] = {}
    for name in args.only.split(","):
        say(f"{name}:")
        began = time.perf_counter()
        try:
            results[name] = SECTIONS[name](backend, args)
        except Exception as error:
            traceback.print_exc()
            results[name] = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        results[name]["seconds"] = time.perf_counter() - began
        gc.collect()
        if args.json:
            with open(args.json, "w", encoding="utf-8") as file:
                json.dump(results, file, indent=1)
    backend.close()
    say()
    for name, result in results.items():
        say(
            f"{'ok  ' if result['ok'] else 'FAIL'} {name:8s} {result['seconds']:6.1f} s  "
            f"{result.get('error', '')}"
        )
    return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
