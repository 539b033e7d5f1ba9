"""Trainings that are compared with each other, one after the other on the same machine:
`python -m tests.gpu.side_by_side TOPIC [--seconds 560] [--small]`.

Each is a process of `launch.py bench` with random weights. Its line is printed as soon as it is
done, so the lines of a topic stand even if the last of its trainings is broken off. A training that
would begin with too little of `--seconds` left is named and not begun. `--small` rehearses a topic
with tiny models, also without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.paths import PROGRAM_ROOT
from engine.text import in_gib
from tests.gpu.forecasts import folder_of

LEAST_SECONDS = 60
"""A training is not begun with less time than this: imports and ceilings alone take half of it."""
NO_COPIES = ("output.checkpoint=none", "output.keep_best=none")
LONG = ("data.packing=false", "train.optimizer=adamw_8bit", *NO_COPIES)
LORA = ("train.method=lora",)
SMALL = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_window_layers": 2,
}
SMALL_TOKENS = 64


@dataclass(frozen=True)
class Training:
    """A training of one topic: so many rows of so many tokens a step, on so many GPUs."""

    model: str
    """It is the id of a model of the catalog."""
    rows: int
    tokens: int = 1024
    gpus: int = 1
    steps: int = 4
    settings: tuple[str, ...] = ()
    """These are further settings, as `--set` takes them."""

    @property
    def name(self) -> str:
        words = [self.model, f"{self.rows} x {self.tokens:,}"]
        words += [f"{self.gpus} GPUs"] if self.gpus > 1 else []
        return ", ".join([*words, *self.settings])


SMALLEST, SEVEN, FOURTEEN = "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-14B"
THIRTY, SEVENTY = "Qwen/Qwen2.5-32B", "meta-llama/Llama-3.1-70B"
CAPPED = ("engine.gpu_memory_gib=23",)
TOPICS = {
    "two-gpus": (
        Training(FOURTEEN, 128),
        Training(FOURTEEN, 256, gpus=2),
        Training(SMALLEST, 192, gpus=2, steps=5),
    ),
    "four-gpus": (
        Training(SEVEN, 148),
        Training(SEVEN, 592, gpus=4),
        Training(THIRTY, 256, gpus=4),
    ),
    "eight-gpus": (
        Training(SEVEN, 148),
        Training(SEVEN, 1184, gpus=8),
    ),
    "large": (
        Training(THIRTY, 64, settings=NO_COPIES),
        Training(SEVENTY, 32, settings=("train.optimizer=adamw_8bit", *NO_COPIES)),
    ),
    "adapters": (
        Training(SEVENTY, 32, steps=10, settings=LORA),
        Training(THIRTY, 64, settings=LORA),
        Training(THIRTY, 64, settings=(*LORA, *CAPPED)),
    ),
    "pairs": (
        Training(SEVEN, 64, steps=5),
        Training(SEVEN, 32, steps=5, settings=("train.objective=dpo",)),
    ),
    "long-rows": (
        Training(SEVEN, 1, 131_072, steps=1, settings=(*LONG, *CAPPED)),
        Training(SEVEN, 1, 262_144, steps=1, settings=LONG),
    ),
}
Figures = dict[str, Any]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.side_by_side", description=__doc__)
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--seconds", type=float, default=3600, help="for all of them together")
    parser.add_argument("--small", action="store_true", help="rehearse it with tiny models")
    asked = parser.parse_args(arguments)
    if asked.small:
        print(f"A rehearsal: tiny models, few rows, {SMALL_TOKENS} tokens a row", flush=True)
    end = time.monotonic() + asked.seconds
    first: dict[str, Figures] = {}
    for training in TOPICS[asked.topic]:
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            print(f"{training.name}: not begun, {left:.0f} s were left", flush=True)
            continue
        found, why_not = measured(training, left, asked.small)
        if found is None:
            print(f"{training.name}: {why_not}", flush=True)
            continue
        before = first.setdefault(training.model, found)
        print(f"{training.name}: {told(found, before)}", flush=True)


def measured(training: Training, seconds: float, small: bool) -> tuple[Figures | None, str]:
    """Returns the figures of a training, or None and why there are none within so many seconds."""
    with tempfile.TemporaryDirectory() as place:
        folder = folder_of(training.model, Path(place) / "model")
        if small:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            (folder / "config.json").write_text(json.dumps(config | SMALL), encoding="utf-8")
        try:
            done = subprocess.run(
                command(training, folder, small),
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as expired:
            shown = (expired.stderr or b"").decode(errors="replace").strip().splitlines()
            return (
                None,
                f"broken off after {seconds:.0f} s, at: {shown[-1] if shown else 'its start'}",
            )
    if done.returncode:
        return None, f"ended with {done.returncode}: {done.stderr.strip()[-400:]}"
    return json.loads(done.stdout)["trainings"][0]["streamed"], ""


def command(training: Training, folder: Path, small: bool) -> list[str]:
    """Returns the command line that measures a training of the model in `folder`."""
    few = training.gpus * max(1, training.rows // 32 // training.gpus)  # as many for each
    rows = few if small else training.rows
    settings = [
        f"model.source={folder}",
        "model.init=random",
        f"data.max_seq_len={SMALL_TOKENS if small else training.tokens}",
        f"train.batch_size={rows}",
        f"engine.gpus={training.gpus}",
        *training.settings,
    ]
    how = ["--streamed-only", "--json", "--seconds", "1", "--steps", str(training.steps)]
    preset = PROGRAM_ROOT / "presets" / "qwen2.5-7b.yaml"
    sets = [part for setting in settings for part in ("--set", setting)]
    return [sys.executable, str(PROGRAM_ROOT / "launch.py"), "bench", str(preset), *how, *sets]


def told(found: Figures, first: Figures) -> str:
    """Returns the figures in words, and their rate beside that of the `first` training of the same
    model.
    """
    words = [
        f"{found['seconds']:.2f} s (predicted {found['predicted_seconds']:.2f})",
        f"{found['tokens_per_second']:,.0f} tokens/s",
        f"{found['tflops']['hardware']:,.3g} TFLOPS of work",
        f"exposed {found['exposed_share']:.1%}",
        f"GPU {in_gib(found['peak_device_bytes'])} of {in_gib(found['planned_device_bytes'])}",
        f"RAM {in_gib(found['host_peak_bytes'])}, predicted "
        f"{in_gib(found['predicted_host_bytes'])}, files {in_gib(found['host_file_bytes'])}",
    ]
    if found is not first:
        ratio = found["tokens_per_second"] / first["tokens_per_second"]
        words.append(f"{ratio:.3f} times the first one's tokens/s")
    return ", ".join(words)


if __name__ == "__main__":
    main()
