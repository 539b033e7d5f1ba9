"""Sampling through the same streamed blocks that train: greedy, temperature, top-p.

There is no key-value cache: each token is one streamed pass over all tokens so far, so the answer is exactly the
model's, at the cost of a full forward a token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.engine import StreamingEngine
from engine.errors import RunError
from engine.library import transformers

_TOKENS_AT_ONCE = 16384


def generate(engine: StreamingEngine, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_tokens: set[int],
             temperature: float = 0.0, top_p: float = 1.0, seed: int = 0, max_length: int | None = None,
             on_token: Callable[[int, int], None] | None = None) -> list[list[int]]:
    """Continue each prompt (token ids) until an end token, `max_new_tokens` or `max_length`; the new ids, end token
    left out. Temperature 0 is greedy. `on_token(row, token)` is called for each new token; what it raises stops.
    """
    rows = [list(prompt) for prompt in prompts]
    answers: list[list[int]] = [[] for _ in rows]
    generator = torch.Generator().manual_seed(seed)
    going = [k for k, row in enumerate(rows) if max_new_tokens > 0 and (max_length is None or len(row) < max_length)]
    while going:
        still = []
        for group in _groups(going, rows):
            logits = engine.last_logits([rows[k] for k in group])
            for k, token in zip(group, pick(logits, temperature, top_p, generator)):
                if token in end_tokens:
                    continue
                rows[k].append(token)
                answers[k].append(token)
                if on_token is not None:
                    on_token(k, token)
                if len(answers[k]) < max_new_tokens and (max_length is None or len(rows[k]) < max_length):
                    still.append(k)
        going = still
    return answers


def pick(logits: torch.Tensor, temperature: float, top_p: float, generator: torch.Generator) -> list[int]:
    """One token for each row of `logits` [rows, vocabulary] (float32): the likeliest, or one drawn from the smallest
    set of likeliest tokens whose probabilities reach `top_p` (nucleus sampling, arXiv 1904.09751)."""
    if temperature <= 0:
        return logits.argmax(-1).tolist()
    probabilities = torch.softmax(logits / temperature, -1)
    ordered, tokens = probabilities.sort(dim=-1, descending=True, stable=True)
    beyond = ordered.cumsum(-1) - ordered >= top_p
    ordered = ordered.masked_fill(beyond, 0.0)
    drawn = torch.multinomial(ordered, 1, generator=generator)
    return tokens.gather(-1, drawn).squeeze(-1).tolist()


def _groups(going: list[int], rows: list[list[int]]) -> list[list[int]]:
    """Rows of like length together, so many at once that a pass stays within a fixed number of tokens."""
    groups: list[list[int]] = []
    for k in sorted(going, key=lambda k: len(rows[k])):
        if groups and (len(groups[-1]) + 1) * len(rows[k]) <= _TOKENS_AT_ONCE:
            groups[-1].append(k)
        else:
            groups.append([k])
    return groups


def longest_row(config: Any) -> int | None:
    """Tokens that a row may have at most, prompt and answer together, where the model says so."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_tokens(config: Any, tokenizer: Any, source: str) -> set[int]:
    """Token ids that end an answer: of the generation config, the model's config and the tokenizer."""
    from engine.paths import resolve_source

    found: set[int] = set()
    path = resolve_source(source)
    try:
        candidates = [transformers().GenerationConfig.from_pretrained(str(path or source)).eos_token_id]
    except OSError:  # the file is optional
        candidates = []
    for value in [*candidates, getattr(config.get_text_config(), "eos_token_id", None), tokenizer.eos_token_id]:
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    return found


def ask_run(runs_dir: str | os.PathLike[str], run_id: str, prompt: str, max_new_tokens: int = 64,
            temperature: float = 0.0, top_p: float = 1.0, on_text: Callable[[str], None] | None = None) -> str:
    """Answer `prompt` with the newest checkpoint of a run, through the streamed blocks. `on_text` gets the answer so
    far, token by token. The tokenizer's chat template is used where there is one. Raises RunError without a checkpoint.
    """
    from engine.saved import open_saved

    if not prompt.strip():
        raise RunError("The prompt is empty; type something to ask.")
    with open_saved(runs_dir, run_id) as saved:
        if saved.tokenizer.chat_template:
            ids = saved.tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True,
                                                      tokenize=True, return_dict=False)
        else:
            ids = saved.tokenizer(prompt)["input_ids"]
        most = longest_row(saved.model.config)
        if most is not None and len(ids) >= most:
            raise RunError(f"The prompt has {len(ids):,} tokens and this model takes {most:,} at most; shorten it.")
        new: list[int] = []

        def on_token(_: int, token: int) -> None:
            new.append(token)
            if on_text is not None:
                on_text(saved.tokenizer.decode(new, skip_special_tokens=True))

        generate(saved.engine(), [ids], max_new_tokens, end_tokens(saved.model.config, saved.tokenizer,
                                                                   saved.config.model.source),
                 temperature, top_p, on_token=on_token, max_length=most)
        return saved.tokenizer.decode(new, skip_special_tokens=True).strip()
