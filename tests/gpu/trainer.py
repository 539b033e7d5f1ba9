"""The Trainer of transformers on the same work: `python -m tests.gpu.trainer SHAPE ROWS TOKENS`,
where SHAPE is a folder with a config.json.

It trains random weights on random tokens, with Liger's kernels and torch's fused AdamW: weights and
moments in fp32, products in bf16 under autocast. Micro-batches are tried from all rows down, first
without and then with activation checkpointing, until one fits. Prints the seconds of a step, the
mean of the second half of the steps. It needs `accelerate` and `liger-kernel`.

With `lora` behind it, PEFT's adapters of rank 16 on all linear layers are trained, on a base in
bf16. Every micro-batch from the largest that fits down to one of two rows is timed then, since a
smaller one may need no recompute.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Work:
    """Steps of `rows` rows of `tokens` tokens each, of the model in the folder `shape`."""

    shape: str
    rows: int
    tokens: int
    with_lora: bool = False

    def model(self) -> Any:
        """Returns the model on the device, with random weights."""
        config = AutoConfig.from_pretrained(self.shape)
        dtype = torch.bfloat16 if self.with_lora else torch.float32
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not self.with_lora:
            return model
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
        return get_peft_model(model, adapters)


def seconds(work: Work, size: int, recompute: bool) -> float:
    """Returns the seconds of a step in micro-batches of `size` rows."""
    model = work.model()
    if recompute:
        # Otherwise a frozen embedding gives blocks an input without a gradient.
        model.enable_input_require_grads()
    clock = Clock()
    with tempfile.TemporaryDirectory() as place:
        arguments = TrainingArguments(
            place,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=work.rows // size,
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
        data = RandomRows(work.rows * STEPS, work.tokens, model.config.vocab_size)
        Trainer(model, arguments, train_dataset=data, callbacks=[clock]).train()
    later = clock.times[STEPS // 2 - 1 :]
    return (later[-1] - later[0]) / (len(later) - 1)


def main(work: Work) -> None:
    """Prints the best of all ways that fit."""
    found: dict[str, float] = {}
    for recompute in (False, True):
        size = work.rows
        while size >= 1:
            way = f"micro-batches of {size}{', with recompute' if recompute else ''}"
            try:
                found[way] = seconds(work, size, recompute)
                print(f"{way}: {found[way]:.3f} s a step", flush=True)
                if not work.with_lora or size <= 2:
                    break
            except torch.OutOfMemoryError:
                print(f"{way}: does not fit", flush=True)
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            size //= 2
    best = min(found, key=lambda way: found[way])
    print(f"best: {found[best]:.4f} s a step ({best})")


if __name__ == "__main__":
    main(Work(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "lora" in sys.argv[4:]))
