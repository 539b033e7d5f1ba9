"""From a configuration and the memory there is to the choices of a plan, with every device byte named.

`choose` keeps what the user set and fills in `auto`. Pure arithmetic, no torch: the fit report, the trainer and the
app's form all ask the same function.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import add
from typing import Any, Literal

from engine.config import AUTO, TrainConfig
from engine.errors import ConfigError
from engine.planner import PlanChoices
from engine.shape import ModelShape

GIB = 1 << 30

COMFORTABLE = 0.88
"""Share of a limit that automatic choices fill; a report calls more than 0.9 tight."""

CUDA_CONTEXT_BYTES = round(0.6 * GIB)
ALLOCATOR_SLACK = 0.03

SATURATING_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of a micro-batch that keep the device busy; more only takes memory."""

LOGITS_BYTES = {"cuda": round(1.5 * GIB), "small": 512 << 20, "cpu": 256 << 20}
SMALL_GPU_BYTES = 20 * GIB
"""Two sizes of logits chunk, not a share of what is free: another chunk rounds differently, and a resumed run must not."""
LOSS_CHUNKS = (128, 8192)
CPU_SHARE = 0.25
"""On the CPU, blocks stay resident and keep their activations while all device memory is below this share of the free
RAM."""
CPU_RUNTIME_BYTES = round(0.8 * GIB)

STEP_TOKEN_BYTES = 32
"""Token id, position, loss index and label of a token, int64 each."""


@dataclass(frozen=True)
class Item:
    """One line of a report."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True)
class Chosen:
    """`choose`'s answer: the plan's choices, the two sizes that go with them, and what they take."""

    choices: PlanChoices
    micro_batch_size: int
    loss_chunk: int
    gpu_items: tuple[Item, ...]
    """Device memory by item; on the CPU the same buffers, in RAM."""
    host_boundary_bytes: int

    @property
    def rounding(self) -> dict[str, Any]:
        """The choices that results depend on, by rounding: a resumed run gives them to `choose` again."""
        return {"micro_batch_size": self.micro_batch_size, "loss_chunk": self.loss_chunk,
                "gradient_sum": self.choices.gradient_sum}

    @property
    def gpu_bytes(self) -> int:
        return sum(item.bytes for item in self.gpu_items)


def choose(shape: ModelShape, config: TrainConfig, device: Literal["cpu", "cuda"], gpu_limit: int | None,
           host_free: int, row_length: int, rounding: Mapping[str, Any] | None = None) -> Chosen:
    """Choices for one run.

    gpu_limit: bytes of GPU memory that this process may take in all, CUDA context included (`cuda` only;
    engine.gpu_memory_gib lowers it). host_free: bytes of RAM before the planes are allocated. row_length: tokens of the
    longest row. rounding: `Chosen.rounding` of the session that this one continues bit for bit. What does not fit is
    still answered, with the leanest choices; the report judges it. Raises ConfigError where settings contradict each
    other or the model.
    """
    if device == "cuda" and gpu_limit is None:
        raise ValueError("gpu_limit is needed for a GPU")
    _refuse_contradictions(shape, config, row_length)
    if device == "cpu":
        limit = host_free - shape.host_bytes - CPU_RUNTIME_BYTES
        keeping = min(COMFORTABLE * limit, CPU_SHARE * host_free)
    else:
        cap = config.engine.gpu_memory_gib
        limit = gpu_limit if cap is None else min(gpu_limit, round(cap * GIB))
        keeping = COMFORTABLE * limit
    sizer = _Sizer(shape, config, device, limit, keeping, row_length, rounding or {})
    candidates = [rounding["micro_batch_size"]] if rounding else _micro_batch_sizes(config, device, row_length)
    leanest = [sizer.leanest(size) for size in candidates]
    best = next((k for k, lean in enumerate(leanest) if sizer.fits(candidates[k], lean)), len(candidates) - 1)
    size = candidates[best]
    choices = sizer.fill(size, leanest[best])
    return Chosen(choices, size, sizer.loss_chunk, sizer.items(size, choices),
                  host_boundary_bytes(shape, choices, size * row_length))


# ---------------------------------------------------------------------- arithmetic of buffers

def fixed_items(shape: ModelShape, choices: PlanChoices, boundary_numel: int) -> tuple[Item, ...]:
    """Buffers that live all run long: what DeviceState allocates, to the byte.

    boundary_numel: elements of the largest micro-batch's hidden state.
    """
    c, item, blocks = choices, shape.item_bytes, shape.blocks
    streamed, resident = blocks[:len(blocks) - c.resident_blocks], blocks[len(blocks) - c.resident_blocks:]
    largest = max(unit.numel for unit in blocks)
    outer = (shape.embed.numel, shape.head.numel)
    slots = min(c.slots, len(streamed))
    streamed_slot = max((unit.numel for unit in streamed), default=0)
    if c.gradient_sum == "device":
        sums, sums_note = sum(outer) + sum(unit.numel for unit in blocks), "every unit, summed over the rounds"
    elif shape.tied:
        sums, sums_note = sum(outer) + largest, "embed, head and the largest block"
    else:
        sums, sums_note = max(outer) + largest, "embed or head, and the largest block"
    rings = 2 * c.boundary_rings if c.host_boundaries else 0
    return (
        Item("Block slots", slots * streamed_slot * item, f"{slots} for the blocks that are streamed"),
        Item("Embed and head slots", sum(outer) * item),
        Item("Resident blocks", sum(unit.numel for unit in resident) * item, f"the last {len(resident)} blocks"),
        Item("Gradient sums", 4 * (sums + len(shape.units) + 1), f"fp32: {sums_note}"),
        Item("Gradient staging", (2 * largest + max(outer)) * item, "rounded gradients on their way to the host"),
        Item("Boundary rings", rings * boundary_numel * item, f"{rings} buffers for boundaries on the host"),
    )


def host_boundary_bytes(shape: ModelShape, choices: PlanChoices, tokens: int) -> int:
    """Boundaries on the host: one for each micro-batch and block that does not keep its activations. tokens: of the
    largest micro-batch."""
    if not choices.host_boundaries:
        return 0
    stored = len(shape.blocks) - choices.kept_blocks
    return stored * choices.micro_batches * tokens * shape.hidden_size * shape.item_bytes


class _Sizer:
    """Device bytes of any choices for one model, configuration and limit."""

    def __init__(self, shape: ModelShape, config: TrainConfig, device: str, limit: int, keeping: float,
                 row_length: int, rounding: Mapping[str, Any]):
        self.shape, self.config, self.device, self.rounding = shape, config, device, rounding
        self.comfortable, self.keeping, self.row_length = COMFORTABLE * limit, keeping, row_length
        self._by_size: dict[int, tuple[list[int], list[int]]] = {}
        packed = config.data.packing and shape.packs
        self.dense_mask = shape.dense_mask(packed, row_length)
        self.masked_blocks = shape.masked_blocks(packed, row_length, device)
        self._position_bytes = shape.vocab_size * shape.logit_bytes
        low, high = LOSS_CHUNKS
        budget = LOGITS_BYTES["small" if device == "cuda" and limit < SMALL_GPU_BYTES else device]
        chunk = max(low, min(high, budget // self._position_bytes // low * low))
        self.loss_chunk = rounding.get("loss_chunk") or min(chunk, shape.max_position_embeddings or chunk)

    def items(self, size: int, choices: PlanChoices) -> tuple[Item, ...]:
        """`size`: rows of a micro-batch."""
        shape, c, item = self.shape, choices, self.shape.item_bytes
        tokens = size * self.row_length
        together = c.micro_batches // c.rounds
        hidden = tokens * shape.hidden_size * item
        bounded = 0 if c.host_boundaries else len(shape.blocks) - c.kept_blocks
        activations, _ = self._blocks(size)
        kept = together * sum(activations[len(activations) - c.kept_blocks:])
        working, what = self._working_set(size, hidden, kept, c)
        masks = together * size * self.row_length**2 * shape.mask_kinds * (item if shape.attention == "eager" else 1)
        items = [
            *fixed_items(shape, c, tokens * shape.hidden_size),
            Item("Boundaries", together * bounded * hidden, f"inputs of {bounded} blocks, {together * tokens:,} tokens"),
            Item("Hidden states", together * hidden,
                 f"{together} micro-batch{'es' if together > 1 else ''} of {tokens:,} tokens"),
            Item("Kept activations", kept, f"{c.kept_blocks} blocks that are not recomputed"),
            Item("Working set", working, what),
            Item("Tokens and masks", together * tokens * STEP_TOKEN_BYTES + (masks if self.dense_mask else 0),
                 "a dense attention mask for every row" if self.dense_mask else ""),
        ]
        if self.device == "cuda":
            items.append(Item("CUDA context", CUDA_CONTEXT_BYTES))
        items.append(Item("Allocator slack", round(ALLOCATOR_SLACK * sum(i.bytes for i in items)), "3 %"))
        return tuple(i for i in items if i.bytes)

    def _blocks(self, size: int) -> tuple[list[int], list[int]]:
        """For every block and one micro-batch: what autograd keeps, and what its backward needs besides."""
        if size not in self._by_size:
            tokens, item = size * self.row_length, self.shape.item_bytes
            self._by_size[size] = (
                [(u.masked_activations if self.masked_blocks else u.activations).of(size, self.row_length)
                 for u in self.shape.blocks],
                [(2 * u.widest * tokens + u.numel + 2 * tokens * self.shape.hidden_size) * item
                 for u in self.shape.blocks])
        return self._by_size[size]

    def _working_set(self, size: int, hidden: int, kept: int, c: PlanChoices) -> tuple[int, str]:
        """The most that any one op needs on top of what is kept. Blocks that are recomputed come after those that are
        kept have let go of theirs."""
        shape, item = self.shape, self.shape.item_bytes
        tokens = size * self.row_length
        activations, backward = self._blocks(size)
        recomputed = len(backward) - c.kept_blocks
        recompute = max(map(add, activations[:recomputed], backward), default=0)
        block = max(recompute - kept, max(backward[recomputed:], default=0))
        tail = shape.head.numel + (shape.embed.numel if shape.tied else 0)
        chunk = min(self.loss_chunk, tokens) * self._position_bytes
        loss = chunk + tail * item + 2 * hidden
        embed = shape.embed.numel * item + 2 * hidden
        if block >= max(loss, embed):
            return block, f"backward of one block on {tokens:,} tokens"
        return max(loss, embed), f"logits of {min(self.loss_chunk, tokens):,} positions and the head's gradient"

    def total(self, size: int, choices: PlanChoices) -> int:
        return sum(item.bytes for item in self.items(size, choices))

    def fits(self, size: int, choices: PlanChoices, limit: float | None = None) -> bool:
        return self.total(size, choices) <= (self.comfortable if limit is None else limit)

    # ------------------------------------------------------------------ policy

    def leanest(self, size: int) -> PlanChoices:
        """The choices that take least device memory among those that the settings allow."""
        e, micro_batches = self.config.engine, self.config.train.batch_size // size
        rounds = 1 if e.rounds == AUTO else e.rounds
        slots = 2 if e.slots == AUTO else e.slots
        resident = e.residency if e.residency != AUTO else 1 if e.save_level == "all" else 0
        return PlanChoices(
            micro_batches=micro_batches, rounds=rounds, slots=slots, prefetch_depth=max(1, slots - 1),
            resident_blocks=resident, kept_blocks=resident if e.save_level == "all" else 0,
            host_boundaries=e.save_level == "boundary_host" or (
                e.save_level in (AUTO, "all") and self.device == "cuda"),
            gradient_sum=self.rounding.get("gradient_sum") or ("vertical" if rounds == 1 else "host"))

    def fill(self, size: int, lean: PlanChoices) -> PlanChoices:
        """Use the memory that is left: fp32 sums, boundaries on the device, kept activations, resident blocks."""
        e, choices = self.config.engine, lean
        if not self.fits(size, lean):
            return lean

        def most(changes: Iterable[dict[str, Any]], limit: float) -> PlanChoices:
            """The first of `changes` that fits, most memory first; `choices` as they are where none does."""
            options = [replace(choices, **change) for change in changes]
            if self.fits(size, options[0], limit):
                return options[0]
            least = bisect_left(options, True, lo=1, key=lambda option: self.fits(size, option, limit))
            return options[least] if least < len(options) else choices

        if choices.rounds > 1 and not self.rounding:
            choices = most([{"gradient_sum": "device"}], self.comfortable)
        if e.save_level != "boundary_host":
            choices = most([{"host_boundaries": False}], self.comfortable)
        blocks = len(self.shape.blocks)
        counts = range(blocks, -1, -1) if self.device == "cuda" else (blocks, 0)
        if e.save_level == "all":
            if e.residency == AUTO:
                choices = most(({"resident_blocks": k, "kept_blocks": k} for k in counts if k), self.keeping)
            return choices
        if e.save_level == AUTO:
            if e.residency == AUTO:
                choices = most(({"resident_blocks": k, "kept_blocks": k} for k in counts), self.keeping)
            else:
                choices = most(({"kept_blocks": k} for k in range(e.residency, -1, -1)), self.keeping)
        if e.residency == AUTO:
            choices = most(({"resident_blocks": k} for k in counts if k >= choices.kept_blocks), self.keeping)
        return choices


# ---------------------------------------------------------------------- settings

def _micro_batch_sizes(config: TrainConfig, device: str, row_length: int) -> list[int]:
    """Rows of a micro-batch to try, most wanted first."""
    t, target = config.train, SATURATING_TOKENS[device]
    if t.micro_batch_size != AUTO:
        return [t.micro_batch_size]
    rows = t.batch_size // (1 if config.engine.rounds == AUTO else config.engine.rounds)
    divisors = [size for size in range(rows, 0, -1) if rows % size == 0]
    small = [size for size in divisors if size * row_length <= target] or [1]
    # Batch sizes such as 148 = 4 x 37 have nothing near the target below it.
    large = [size for size in divisors if target < size * row_length <= 3 * target and 2 * small[0] * row_length < target]
    return large[-1:] + small


def _refuse_contradictions(shape: ModelShape, config: TrainConfig, row_length: int) -> None:
    e, t, blocks = config.engine, config.train, len(shape.blocks)
    if shape.learned_positions and row_length > shape.max_position_embeddings:
        raise ConfigError("data.max_seq_len", f"{row_length} is beyond the {shape.max_position_embeddings} positions that "
                          f"this model has; lower it to {shape.max_position_embeddings} or less.")
    if e.residency != AUTO and e.residency > blocks:
        raise ConfigError("engine.residency", f"{e.residency} blocks cannot stay on the device, since this model has "
                          f"{blocks}; choose 0 to {blocks} or auto.")
    if e.save_level == "all" and e.residency == 0:
        raise ConfigError("engine.save_level", "all keeps the activations of resident blocks, but engine.residency is 0; "
                          "raise engine.residency or choose another save level.")
    if e.rounds == AUTO:
        return
    if t.micro_batch_size != AUTO:
        micro_batches = t.batch_size // t.micro_batch_size
        if micro_batches % e.rounds:
            raise ConfigError("engine.rounds", f"{e.rounds} does not divide the {micro_batches} micro-batches of a step "
                              "(train.batch_size / train.micro_batch_size); choose a divisor or auto.")
    elif t.batch_size % e.rounds:
        raise ConfigError("engine.rounds", f"{e.rounds} does not divide train.batch_size {t.batch_size}; choose a divisor "
                          "or auto.")
