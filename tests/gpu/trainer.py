"""The Trainer of transformers on the same work: `python -m tests.gpu.trainer SHAPE ROWS TOKENS`,
where SHAPE is a folder with a config.json.

It trains random weights on random tokens, with Liger's kernels and torch's fused AdamW: weights and
moments in fp32, products in bf16 under autocast. Micro-batches are tried from all rows down, first
without and then with activation checkpointing, until one fits. Prints the seconds of a step, the
mean of the second half of the steps. It needs `accelerate` and `liger-kernel`.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

STEPS = 8


class RandomRows(Dataset):
    """Full rows of random tokens."""

    def __init__(self, count: int, tokens: int, vocabulary: int):
        generator = torch.Generator().manual_seed(0)
        self._ids = torch.randint(vocabulary, (count, tokens), generator=generator)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._ids[index], "labels": self._ids[index]}


class Clock(TrainerCallback):
    """Takes the time at the end of each step, once the device has finished it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        torch.cuda.synchronize()
        self.times.append(time.perf_counter())


def seconds(shape: str, rows: int, size: int, tokens: int, recompute: bool) -> float:
    """Returns the seconds of a step of `rows` rows in micro-batches of `size`."""
    config = AutoConfig.from_pretrained(shape)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=rows // size,
            max_steps=STEPS,
            bf16=True,
            optim="adamw_torch_fused",
            use_liger_kernel=True,
            gradient_checkpointing=recompute,
            max_grad_norm=1.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=STEPS,
        )
        data = RandomRows(rows * STEPS, tokens, config.vocab_size)
        Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
    later = clock.times[STEPS // 2 - 1 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def main(shape: str, rows: int, tokens: int) -> None:
    """Prints the best of all ways that fit."""
    found: dict[str, float] = {}
    for recompute in (False, True):
        size = rows
        while size:
            way = f"micro-batches of {size}{', with recompute' if recompute else ''}"
            try:
                found[way] = seconds(shape, rows, size, tokens, recompute)
                print(f"{way}: {found[way]:.3f} s a step", flush=True)
                break
            except torch.OutOfMemoryError:
                size //= 2
            finally:
                gc.collect()
                torch.cuda.empty_cache()
    best = min(found, key=lambda way: found[way])
    print(f"best: {found[best]:.4f} s a step ({best})")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
