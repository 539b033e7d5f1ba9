"""Answers that transformers writes by itself, to compare sampled ones with."""

from __future__ import annotations

import torch

PROMPTS = [
    [5, 9, 11],
    [7, 3, 8, 20, 33, 4, 50],
    [12, 60, 4, 90, 41, 6, 77],
    [6, 7, 8, 9, 10, 21, 22, 23, 24, 25, 26],
]


def plain_answer(plain, prompt: list[int], new_tokens: int, use_cache: bool = True) -> list[int]:
    out = plain.generate(
        torch.tensor([prompt]),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=use_cache,
    )
    answer = out[0, len(prompt) :].tolist()
    return answer[: answer.index(2)] if 2 in answer else answer
