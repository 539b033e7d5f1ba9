"""How the kind of AdamW's moments changes what a model learns: a model is trained from random
weights on text, once for each kind, and its loss on held-out text is compared.

    python -m tests.gpu.token_file TOKENIZER.json tokens.npz FOLDER_OF_TEXTS
    python -m tests.gpu.moment_quality tokens.npz results.json --runs adamw-0 adamw_8bit-0
    python -m tests.gpu.moment_quality --table results.json

- All runs begin from the same weights, drawn on the host. The seed of a run, which is the number in
  its name, decides the order of the rows (and the random bits that round moments in bf16).
- `adamw_8bit_all` also keeps the moments of the embedding in 8 bits, which the engine does not.
- The rows are cut from the tokens one after another, so attention crosses documents. With fewer
  tokens than the steps need, rows are seen again in another order.
- Held-out text is the mean over whole rows of documents that no run is trained on.
- Results are added to the file after each evaluation, so that a call may do some of the runs. Those
  that the file has are not done again.
- A trial of some steps tells the time of a step first. A run that would not end within
  `--most-seconds` is not begun. With `--may-shorten`, all runs have fewer steps instead, in 250s;
  give the next call the same number by `--steps`.

On a GPU everything is compiled and captured (`tests.gpu.in_memory`). A CPU needs a tiny `--shape`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from engine.config.settings import OptimConfig
from engine.paths import PROGRAM_ROOT
from engine.runtime.device.compiled import uncompiled_functions
from tests.gpu.in_memory import InMemoryTraining, Moments, TrainingSettings
from tests.gpu.token_file import Tokens, read_tokens

KINDS = {
    "adamw": Moments("adamw"),
    "adamw_bf16": Moments("adamw_bf16"),
    "adamw_8bit": Moments("adamw_8bit"),
    "adamw_8bit_all": Moments("adamw_8bit", exact_embed=False),
}
RUNS = ("adamw-0", "adamw_8bit-0", "adamw_bf16-0", "adamw-1", "adamw-2", "adamw_8bit_all-0")
SHAPE = PROGRAM_ROOT / "assets" / "shapes" / "qwen2.5-0.5b.json"
TRIAL = (10, 50)
"""A trial has so many steps before those that are timed, and so many that are."""
EVALUATIONS = 1.05
"""With its evaluations, a run takes this many times as long as its steps."""
MEANS = 50
"""A figure of the loss in training is the mean over this many steps."""


@dataclass
class Result:
    """What a run found."""

    name: str
    finished: bool = False
    validation: list[tuple[int, float]] = field(default_factory=list)
    """Pairs of a step and the mean held-out loss after it."""
    training: list[float] = field(default_factory=list)
    """The mean loss of each MEANS steps."""
    norms: list[float] = field(default_factory=list)
    """The largest norm of the gradient in each MEANS steps."""
    not_applied: int = 0
    """So many steps were not applied, because loss or norm was not finite."""
    milliseconds: float = 0.0
    """A step took so long."""
    moment_bytes: int = 0
    settings: dict[str, Any] = field(default_factory=dict)


def row_order(rows: int, needed: int, seed: int) -> np.ndarray:
    """Returns which rows are trained on, int64 [needed]: each epoch has all rows in a new order."""
    epochs = -(-needed // rows)
    orders = [np.random.default_rng([seed, epoch]).permutation(rows) for epoch in range(epochs)]
    return np.concatenate(orders)[:needed]


def in_rows(tokens: np.ndarray, length: int) -> np.ndarray:
    """Returns rows of `tokens` [n], int32 [rows, length + 1]. The last token of a row is the first
    of the next one.
    """
    count = (len(tokens) - 1) // length
    return np.lib.stride_tricks.sliding_window_view(tokens, length + 1)[: count * length : length]


class Comparison:
    """A `Comparison` trains the same model in several ways."""

    def __init__(
        self, training: InMemoryTraining, tokens: Tokens, optim: OptimConfig, given: Any
    ) -> None:
        self.training = training
        self.optim = optim
        self.steps, self.every = given.steps, given.every
        length, rows = given.length, given.rows
        device = training.device
        self._rows = torch.from_numpy(in_rows(tokens.training, length).copy()).to(device)
        validation = torch.from_numpy(in_rows(tokens.validation, length).copy())
        self._validation = validation[: len(validation) // rows * rows].to(device)
        self.settings = asdict(optim) | {
            "shape": given.shape.stem,
            "rows": rows,
            "tokens_a_row": length,
            "training_tokens": len(self._rows) * length,
            "validation_tokens": self._validation[:, 1:].numel(),
            "device": device_name(device),
            "torch": torch.__version__,
        }

    def _begin(self, name: str, steps: int) -> torch.Tensor:
        """Begins a run, and returns which rows each of its steps has, int64 [steps, rows]."""
        kind, _, seed = name.rpartition("-")
        rows = self.training.settings.rows
        self.training.begin(KINDS[kind], self.optim, steps, int(seed))
        order = row_order(len(self._rows), steps * rows, int(seed))
        return torch.from_numpy(order).to(self.training.device).view(steps, rows)

    def trial(self, name: str) -> float:
        """Tells how long a step of a run takes, and returns it in seconds."""
        before, timed = TRIAL
        training, last = self.training, before + timed + 1
        began = time.perf_counter()
        chosen = self._begin(name, last)
        for number in range(1, last):
            if number == before + 1:
                synchronize(training.device)
                mark = time.perf_counter()
            training.step(number, self._rows[chosen[number - 1]])
        launched = time.perf_counter() - mark
        synchronize(training.device)
        each = (time.perf_counter() - mark) / timed
        mark = time.perf_counter()
        training.gradients(self._rows[chosen[last - 1]])
        synchronize(training.device)
        computed, mark = time.perf_counter() - mark, time.perf_counter()
        training.apply(last)
        synchronize(training.device)
        updated = time.perf_counter() - mark
        print(
            f"{name}: a step takes {1e3 * each:.1f} ms (launching {1e3 * launched / timed:.1f}; "
            f"alone, gradients {1e3 * computed:.1f} and update {1e3 * updated:.1f}); this trial "
            f"took {time.perf_counter() - began:.0f} s",
            flush=True,
        )
        return each

    def run(self, result: Result, save: Callable[[Result], None]) -> None:
        """Trains one run, and calls `save` after each evaluation."""
        training, steps = self.training, self.steps
        chosen = self._begin(result.name, steps)
        result.moment_bytes = training.moment_bytes
        result.settings = self.settings | {"steps": steps}
        kept = torch.zeros(steps, 3, device=training.device)
        result.validation.append((0, training.evaluate(self._validation)))
        seconds = 0.0
        mark = time.perf_counter()
        for number in range(1, steps + 1):
            training.step(number, self._rows[chosen[number - 1]])
            kept[number - 1, 0] = training.norms[-1]
            kept[number - 1, 1] = training.norms[:-1].sum().sqrt()
            kept[number - 1, 2] = training.clip[1]
            if number % self.every and number != steps:
                continue
            synchronize(training.device)
            seconds += time.perf_counter() - mark
            result.milliseconds = 1e3 * seconds / number
            result.validation.append((number, training.evaluate(self._validation)))
            _add_up(result, kept[:number].cpu())
            result.finished = number == steps
            save(result)
            print(
                f"{result.name}: step {number}, validation loss {result.validation[-1][1]:.4f}, "
                f"in training {result.training[-1]:.4f}, {result.milliseconds:.1f} ms a step",
                flush=True,
            )
            mark = time.perf_counter()


def _add_up(result: Result, kept: torch.Tensor) -> None:
    """Fills in the figures of training from the loss, norm and flag of each step [steps, 3]."""
    chunks = kept.split(MEANS)
    result.training = [float(chunk[:, 0].mean()) for chunk in chunks]
    result.norms = [float(chunk[:, 1].max()) for chunk in chunks]
    result.not_applied = int((kept[:, 2] == 0).sum())


def first_of_kind(name: str) -> str:
    """Returns the run of the same kind with seed 0."""
    return name.rpartition("-")[0] + "-0"


def device_name(device: torch.device) -> str:
    """Returns the name of a device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


def synchronize(device: torch.device) -> None:
    """Waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def load(paths: Sequence[Path]) -> dict[str, Result]:
    """Returns the results in some files by name. A finished run stays rather than another one."""
    found: dict[str, Result] = {}
    for path in paths:
        for values in json.loads(path.read_text()) if path.exists() else []:
            result = Result(**values)
            if result.name not in found or not found[result.name].finished:
                found[result.name] = result
    return found


def table(results: dict[str, Result]) -> str:
    """Returns the held-out losses as a table of Markdown, with differences from the mean of the
    runs with fp32 moments.
    """
    runs = sorted(results.values(), key=lambda run: run.name)
    exact = [run for run in runs if run.name.startswith("adamw-") and run.finished]
    steps = sorted({step for run in runs for step, _ in run.validation})
    lines = [
        "| moments | " + " | ".join(f"step {step}" for step in steps) + " | to the mean of fp32 |",
        "|" + "---|" * (len(steps) + 2),
    ]
    last = [run.validation[-1][1] for run in exact]
    mean = sum(last) / len(last) if last else float("nan")
    for run in runs:
        losses = dict(run.validation)
        cells = [f"{losses[step]:.4f}" if step in losses else "" for step in steps]
        off = f"{run.validation[-1][1] - mean:+.4f}" if run.finished else "not finished"
        lines.append(f"| {run.name} | " + " | ".join(cells) + f" | {off} |")
    if len(last) > 1:
        lines.append(f"\nfp32: mean {mean:.4f}, from {min(last):.4f} to {max(last):.4f}")
    for run in runs:
        lines.append(
            f"{run.name}: {run.milliseconds:.1f} ms a step, moments {run.moment_bytes / 1e6:.0f} "
            f"MB, {run.not_applied} steps not applied, on {run.settings['device']}"
        )
    return "\n".join(lines)


def arguments() -> Any:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tokens", type=Path, nargs="?", help="made by tests.gpu.token_file")
    parser.add_argument("results", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, nargs="+", help="print these results, and end")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="as in " + ", ".join(RUNS))
    parser.add_argument("--shape", type=Path, default=SHAPE, help="a Qwen2 config.json")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=512, help="tokens of a row")
    parser.add_argument("--every", type=int, default=250, help="steps between evaluations")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--most-seconds", type=float, default=1e9, help="for the whole call")
    parser.add_argument("--may-shorten", action="store_true", help="rather than leave runs out")
    parser.add_argument("--no-graph", action="store_true", help="launch kernels one by one")
    parser.add_argument("--no-compile", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Runs the comparison from the command line."""
    given = arguments()
    if given.table:
        print(table(load(given.table)))
        return
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.type == "cuda"
    if on_gpu:
        # FlashAttention can be captured, and its kernel does not depend on what was tried.
        torch.backends.cuda.enable_cudnn_sdp(False)
    settings = TrainingSettings(
        given.rows,
        given.length,
        given.dtype,
        compiled=on_gpu and not given.no_compile,
        graph=on_gpu and not given.no_graph,
    )
    training = InMemoryTraining(AutoConfig.from_pretrained(given.shape), settings, device)
    optim = OptimConfig(
        learning_rate=given.rate, schedule="cosine", warmup_steps=given.warmup, weight_decay=0.01
    )
    comparison = Comparison(training, read_tokens(given.tokens), optim, given)
    print(f"ready after {time.perf_counter() - began:.0f} s", comparison.settings, flush=True)
    results = load([given.results])

    def save(result: Result) -> None:
        results[result.name] = result
        given.results.write_text(json.dumps([asdict(each) for each in results.values()]))

    names = [name for name in given.runs if name not in results or not results[name].finished]
    seconds = {kind: comparison.trial(kind) for kind in dict.fromkeys(map(first_of_kind, names))}
    rates = [seconds[first_of_kind(name)] for name in names]
    left = given.most_seconds - (time.perf_counter() - began)
    if given.may_shorten and sum(rates) * given.steps * EVALUATIONS > left:
        most = left / (sum(rates) * EVALUATIONS)
        comparison.steps = max(250, int(most // 250) * 250)
        print(f"shortened: all runs have {comparison.steps} steps", flush=True)
    for name, rate in zip(names, rates):
        start = time.perf_counter()
        if start - began + rate * comparison.steps * EVALUATIONS > given.most_seconds:
            print(f"{name} is left for another call", flush=True)
            continue
        comparison.run(Result(name), save)
        print(f"{name} took {time.perf_counter() - start:.0f} s", flush=True)
    for what, why in uncompiled_functions():
        print(f"not compiled: {what}: {why}")
    if on_gpu:
        print(f"device memory: {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")
    print(table(results))
    training.close()


if __name__ == "__main__":
    main()
