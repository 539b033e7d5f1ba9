"""What the fit report says of answers: how many are drawn at once, how large their cache is, and
where the weights are meanwhile. The sampler plans with the same arithmetic. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.config.settings import TrainConfig
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.requirements import FitStatus, Requirements
from engine.planning.fit.sampling_memory import (
    CacheCost,
    CacheRoom,
    cache_room,
    host_cache_room,
    pass_bytes,
    shared_bytes,
)
from engine.text import counted

SPARE_TOKENS = 4
"""Number of tokens by which an answer to a validation prompt may be longer than the longest
expected one.
"""


@dataclass(frozen=True)
class Answers:
    """Answers that a run draws: how many are asked for, and the tokens of the longest row."""

    name: str
    asked: int
    tokens: int
    at_once: int
    bytes: int
    """Bytes of their cache."""


@dataclass(frozen=True)
class AnswersMemory:
    """What answers of a run take in addition, of what its training leaves free."""

    where: PartName
    kinds: tuple[Answers, ...]
    blocks: int
    resident: int
    """Number of blocks that stay on the device."""

    def rows(self, in_size: Callable[[int], str]) -> list[tuple[str, str, str]]:
        """Returns a name, a text and a note for each kind of answers, and for the weights where
        these may have to be fetched. `in_size` writes bytes.
        """
        words = "GPU memory" if self.where == PartName.GPU else "RAM"
        found = []
        for kind in self.kinds:
            text, note = f"{in_size(kind.bytes)} of free {words}", f"up to {kind.tokens:,} tokens"
            if kind.asked > 1:
                note = f"{kind.at_once:,} at once, each {note}"
            if not kind.at_once:
                text, note = "slow", f"no room in {words} for a cache of {kind.tokens:,} tokens"
            found.append((kind.name, text, note))
        if self.where == PartName.GPU:
            streamed = self.blocks - self.resident
            where = f"{streamed} of {counted(self.blocks, 'block')} come from RAM"
            text = f"{where} for every token" if streamed else "all stay on the GPU"
            found.append(("Weights for answers", text, ""))
        return found


def answers_memory(requirements: Requirements) -> AnswersMemory | None:
    """Returns what the answers of a job take; None for a job that does not fit, and for a model
    without a cache that all rows share.
    """
    config, shape = requirements.config, requirements.shape
    where = PartName.GPU if requirements.device == "cuda" else PartName.HOST
    part = requirements.parts[where]
    is_judged = part.limit is not None and part.status != FitStatus.DOES_NOT_FIT
    if not shape.cache_numel or not is_judged:
        return None
    # Buffers of training stay; what a step allocates is free between two steps.
    kept = sum(
        item.bytes
        for item in part.items
        if item.kind.is_there_in_training and not item.kind.is_activation
    )
    cost = CacheCost(0, shape.cache_numel * shape.item_bytes)
    room = _room(requirements, max(0, part.known_limit - kept), cost)
    kinds = tuple(_planned(room, cost, *each) for each in _asked(config, _longest(requirements)))
    placement, blocks = requirements.chosen.choices.placement, len(shape.blocks)
    resident = placement.blocks_kept_in_slots + placement.gpu_resident_blocks(blocks)
    return AnswersMemory(where, kinds, blocks, min(blocks, resident))


def _longest(requirements: Requirements) -> int:
    """Returns the tokens of a row that is as long as those of training."""
    tokens = requirements.config.data.max_seq_len + SPARE_TOKENS
    return min(tokens, requirements.shape.max_position_embeddings or tokens)


def _asked(config: TrainConfig, longest: int) -> list[tuple[str, int, int]]:
    """Returns the kinds of answers that a run draws: names, how many, and tokens of a row."""
    output = config.output
    found = []
    if output.exact_match_samples:
        found.append(("Validation answers", output.exact_match_samples, longest))
    if output.sample_prompts:
        # No tokenizer makes more tokens of a text than it has bytes.
        text = max(len(prompt.encode()) for prompt in output.sample_prompts)
        tokens = min(longest, text + output.sample_tokens)
        found.append(("Sample answers", len(output.sample_prompts), tokens))
    return [*found, ("Chat while paused", 1, longest)]


def _room(requirements: Requirements, free: int, cost: CacheCost) -> CacheRoom:
    """Returns the memory for caches out of `free` bytes. The widest product of a block is that of
    the shape, which counts all experts of a token.
    """
    if requirements.device == "cpu":
        return host_cache_room(free)
    shape = requirements.shape
    widest = max(unit.widest for unit in shape.blocks)
    of_pass = pass_bytes(shape.hidden_size, widest, shape.vocab_size, shape.item_bytes)
    return cache_room(free, cost.per_token, of_pass)


def _planned(room: CacheRoom, cost: CacheCost, name: str, asked: int, tokens: int) -> Answers:
    rows = room.at_once(cost, asked, tokens)
    size = shared_bytes(cost, room.allocated(cost, rows, tokens), tokens) if rows else 0
    return Answers(name, asked, tokens, rows, size)
