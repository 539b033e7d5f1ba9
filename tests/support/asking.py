"""Asking a run's newest checkpoint one thing, the way Chat does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.runs.record.run_folder import open_run
from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import Sampling, checkpoint_of


def ask_run(
    runs_dir: Path,
    run_id: str,
    prompt: str,
    max_new_tokens: int = 64,
    on_text: Callable[[str], None] = lambda text: None,
) -> str:
    """The greedy answer; `on_text` gets what there is of it, token by token."""
    chat_engine = load(
        checkpoint_of(runs_dir, run_id, open_run(runs_dir, run_id).config, None, "newest")
    )
    try:
        ids: list[int] = []
        for token in chat_engine.answer(
            [{"role": "user", "content": prompt}], Sampling(max_new_tokens)
        ):
            ids.append(token)
            on_text(chat_engine.prompt_builder.text(ids))
        return chat_engine.prompt_builder.text(ids).strip()
    finally:
        chat_engine.close()
