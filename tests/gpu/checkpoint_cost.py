"""What checkpoints cost a run: `python -m tests.gpu.checkpoint_cost --every 0 40 20`.

A model with random weights is trained once for each number of steps between two checkpoints, each
time in a process of its own, and the record is read. The table says how long a step took from
checkpoint to checkpoint, how long training waited, what the disk took, and how much RAM was
predicted and measured. `--copies` limits the RAM for copies, `--evaluate` evaluates as often as it
saves.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.planning.fit import checkpoint_sizes
from engine.runs.record.events import (
    CheckpointWritten,
    EvalFinished,
    ForecastChecked,
    MemorySampled,
    Record,
    StepFinished,
)
from engine.runs.record.following import EVENTS_FILE, replay
from engine.text import GIB
from engine.training.loop.run import start_run
from tests.support.folders import make_data, make_tokenizer
from tests.support.soak import only_record

WIDTHS = {"0.5b": (896, 4864, 24, 14), "1.5b": (1536, 8960, 28, 12), "3b": (2048, 11008, 36, 16)}
"""Width, width of the MLP, blocks and heads of Qwen2.5's smaller models, which tie embeddings."""
VOCABULARY = 151936
WARM_UP = 8
"""At least so many steps are left out at first: caches fill."""


@dataclass(frozen=True)
class Job:
    """One run: a checkpoint after each `every` steps, and none for 0."""

    folder: Path
    size: str
    every: int
    steps: int
    rows: int
    length: int
    device: str
    is_evaluated: bool

    def config(self) -> TrainConfig:
        model = self.folder / "model"
        width, mlp, depth, heads = WIDTHS[self.size]
        CONFIG_MAPPING["qwen2"](
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=mlp,
            num_hidden_layers=depth,
            num_attention_heads=heads,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            architectures=["Qwen2ForCausalLM"],
        ).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        make_data(self.folder / "data.jsonl", 40_000)
        values = {
            "model.source": str(model),
            "model.init": "random",
            "model.dtype": "bfloat16",
            "data.source": str(self.folder / "data.jsonl"),
            "data.format": "messages",
            "data.max_seq_len": self.length,
            "data.eval_fraction": 0.1,
            "train.steps": self.steps,
            "train.batch_size": self.rows,
            "engine.device": self.device,
            "output.checkpoint_every": self.every,
            "output.keep_checkpoints": 1,
            "output.eval_every": self.every if self.is_evaluated else 0,
            "output.exact_match_samples": 0,
            "output.export": False,
        }
        return TrainConfig().with_values(values)


def measure(job: Job) -> Path:
    """Trains a job in this process; returns the path of its record."""
    run = start_run(job.config(), job.folder / "runs")
    ended = run.execute()
    if ended.state != "finished":
        raise SystemExit(ended.reason)
    return job.folder / "runs" / run.id / EVENTS_FILE


def report(record: Path, every: int) -> str:
    """Returns what the record of one run says, in lines."""
    records = list(replay(record))
    steps = [item for item in records if isinstance(item.event, StepFinished)]
    last_period = len(steps) - len(steps) % every if every else len(steps)
    counted = steps[(every or WARM_UP) - 1 : last_period]
    inside = [item for item in records if counted[0].seq <= item.seq <= counted[-1].seq]
    evaluating = sum(item.event.seconds for item in inside if isinstance(item.event, EvalFinished))
    seconds = counted[-1].time - counted[0].time - evaluating
    a_step = seconds / (len(counted) - 1)
    lines = [f"every {every}: {a_step:.4f} s a step, evaluations left out"]
    if every > WARM_UP:
        # Plans differ a little from process to process, as measured rates of the host do.
        before = statistics.mean(step.event.seconds for step in steps[WARM_UP:every])
        lines.append(
            f"    {a_step / before - 1:+.2%} beside {before:.4f} s before the first of them"
        )
    lines.append(f"    {_by_writing(records, counted)}")
    lines += [_checkpoint(item) for item in records if isinstance(item.event, CheckpointWritten)]
    peak = max(item.event.host_rss for item in records if isinstance(item.event, MemorySampled))
    found = [item.event for item in records if isinstance(item.event, ForecastChecked)][-1]
    predicted, measured = (
        found.quantities["host_bytes"][name] for name in ("predicted", "measured")
    )
    lines.append(
        f"    RAM: {predicted / GIB:.2f} GiB predicted, {measured / GIB:.2f} GiB measured "
        f"({measured / predicted - 1:+.1%}), {peak / GIB:.2f} GiB at most after a step"
    )
    return "\n".join(lines)


def _by_writing(records: list[Record], steps: list[Record]) -> str:
    """Says what a step took just after a checkpoint began, while it was written, and otherwise."""
    written = [item for item in records if isinstance(item.event, CheckpointWritten)]
    groups: dict[str, list[float]] = {"first": [], "second": [], "later": [], "otherwise": []}
    for step in steps[1:]:
        number = step.event.step
        began = [one for one in written if one.event.step < number and step.time <= one.time]
        name = "otherwise"
        if began:
            name = {1: "first", 2: "second"}.get(number - began[0].event.step, "later")
        groups[name].append(step.event.seconds)
    parts = [f"{name} {statistics.mean(times):.4f} s" for name, times in groups.items() if times]
    return f"steps while a checkpoint is written, and otherwise: {', '.join(parts)}"


def _checkpoint(item: Record) -> str:
    event = item.event
    assert isinstance(event, CheckpointWritten)
    return (
        f"    step {event.step}: {event.bytes / GIB:.1f} GiB in {event.seconds:.1f} s "
        f"({event.bytes / event.seconds / 1e9:.2f} GB/s), training waited "
        f"{event.waited_seconds:.2f} s, {event.copied_bytes / GIB:.1f} GiB copied"
        + (f", due after step {event.due_step}" if event.due_step else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=WIDTHS, default="1.5b")
    parser.add_argument("--every", type=int, nargs="+", default=[0, 40, 20])
    parser.add_argument("--steps", type=int, nargs="+", default=[60, 128, 108])
    parser.add_argument("--rows", type=int, default=32, help="rows in a step")
    parser.add_argument("--length", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--copies", type=float, help="at most so many GiB of RAM for copies")
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--folder", type=Path, help="used by the processes it starts")
    chosen = parser.parse_args()
    if chosen.folder is not None:
        if chosen.copies is not None:
            whole = checkpoint_sizes._in_chunks
            most = int(chosen.copies * GIB)
            checkpoint_sizes._in_chunks = lambda *job: min(most, whole(*job))
        measure(
            Job(
                chosen.folder,
                chosen.size,
                chosen.every[0],
                chosen.steps[0],
                chosen.rows,
                chosen.length,
                chosen.device,
                chosen.evaluate,
            )
        )
        return
    same = ["--size", chosen.size, "--rows", str(chosen.rows), "--length", str(chosen.length)]
    same += ["--device", chosen.device]
    same += ["--copies", str(chosen.copies)] if chosen.copies is not None else []
    same += ["--evaluate"] if chosen.evaluate else []
    for every, steps in zip(chosen.every, chosen.steps):
        with tempfile.TemporaryDirectory() as folder:
            own = ["--folder", folder, "--every", str(every), "--steps", str(steps)]
            command = [sys.executable, "-m", "tests.gpu.checkpoint_cost", *same, *own]
            subprocess.run(command, cwd=PROGRAM_ROOT, check=True, stdout=subprocess.DEVNULL)
            print(report(only_record(Path(folder) / "runs"), every), flush=True)


if __name__ == "__main__":
    main()
