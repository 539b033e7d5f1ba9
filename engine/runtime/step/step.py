"""A step has inputs, intermediate values passed between its ops, and a result."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from engine.data.batches.rows import MicroBatch, PairTargets, sum_of_weights
from engine.model.build.attention_documents import Documents
from engine.planning.schedule.shards import Shards
from engine.runtime.device.block_graphs import StepGraphs
from engine.runtime.step.micro_batch_state import MicroBatchState
from engine.runtime.step.neftune import RowNoise, StepNoise
from engine.runtime.step.preference import Comparison


@dataclass(frozen=True)
class DevicePairs:
    """Micro-batch of B lines, the answers of pairs, on the device."""

    compared: Comparison
    """What the answers are compared with, and their part of the step."""
    answer: torch.Tensor
    """Whether a position in `DeviceBatch.loss_index` belongs to an answer, bool [n]."""
    labels_of_rows: tuple[int, ...]
    """Number of positions of each pair, or of each answer with a mark, in `DeviceBatch.loss_index`,
    in their order.
    """


@dataclass
class DeviceBatch:
    """One micro-batch on the device."""

    input_ids: torch.Tensor
    """Token ids, int64 [rows, tokens]."""
    position_ids: torch.Tensor | None
    """Positions, int64 [rows, tokens]; None where every row counts from 0."""
    loss_index: torch.Tensor
    """Flat positions that contribute to the loss, int64 [n]."""
    labels: torch.Tensor
    """The target tokens at the positions in `loss_index` are int64 [n]."""
    documents: Documents | None = None
    """Where each document lies in the rows. The host computes it, so that no op must read
    `position_ids` back from the device.
    """
    noise: RowNoise | None = None
    """Noise that is added to what the model looks up; None in a pass without noise."""
    lengths: torch.Tensor | None = None
    """Tokens of each row without padding, int64 [rows]; None if nobody has counted them."""
    pairs: DevicePairs | None = None
    """Answers of pairs, where the rows are those; None for other rows."""
    weights: torch.Tensor | None = None
    """Factors of the losses at the positions in `loss_index`, float32 [n]; None for 1."""
    loss_weight: float = 0.0
    """Sum of these factors, which is n without them."""


Upload = Callable[[np.ndarray], torch.Tensor]
"""Returns a small host array as a tensor of the same shape on the device. The copy is ordered
before later ops.
"""


def upload_batches(
    upload: Upload, batches: Sequence[Any], noise: StepNoise | None = None
) -> list[DeviceBatch]:
    """Copies micro-batches to the device in one copy, with the noise of their rows, if any.
    Separate copies might each have to wait for other copies on the bus, and the first op would wait
    for all of them.
    """
    arrays: list[np.ndarray] = []
    for batch in batches:
        labels = np.ascontiguousarray(batch.labels).reshape(-1)
        index = np.flatnonzero(labels >= 0)
        arrays += [batch.input_ids, index, labels[index]]
        targets = _pairs_of(batch)
        if targets is not None:
            arrays += [targets.answer.reshape(-1)[index], _bits(targets.reference)]
            arrays += [] if targets.desirable is None else [targets.desirable]
        weights = _weights_of(batch)
        if weights is not None:
            arrays.append(_bits(weights.reshape(-1)[index]))
        if batch.position_ids is not None:
            arrays.append(batch.position_ids)
        if noise is not None:
            arrays.append(noise.of_rows(batch))
        if batch.lengths is not None:
            arrays.append(batch.lengths)
    flat = [np.ascontiguousarray(array, dtype=np.int64).reshape(-1) for array in arrays]
    uploaded = upload(np.concatenate(flat))
    parts = iter(uploaded.split([array.size for array in flat]))
    return [_device_batch(batch, parts, upload, noise is not None) for batch in batches]


def _bits(values: np.ndarray) -> np.ndarray:
    """Returns the bits of float32 values [n], which travel among whole numbers: int64 [n]."""
    return values.astype(np.float64).view(np.int64)


def _floats(bits: torch.Tensor) -> torch.Tensor:
    """Returns the float32 values [n] of which `_bits` made int64 [n]."""
    return bits.view(torch.float64).float()


def _pairs_of(batch: Any) -> PairTargets | None:
    """Returns what a micro-batch of pairs has beside its tokens; None for any other."""
    return getattr(batch, "pairs", None)


def _weights_of(batch: Any) -> np.ndarray | None:
    """Returns the weights of a micro-batch's labels, float32 [rows, tokens]; None if all are 1."""
    return getattr(batch, "weights", None)


def loss_weight_of(batches: Sequence[Any]) -> float:
    """Returns the sum of the weights of all labels, which is their number without weights."""
    return math.fsum(map(_loss_weight, batches))


def _loss_weight(batch: Any) -> float:
    weights = _weights_of(batch)
    return int(batch.loss_tokens) if weights is None else sum_of_weights(weights)


def _device_batch(
    batch: Any, parts: Iterator[torch.Tensor], upload: Upload, is_noisy: bool
) -> DeviceBatch:
    """Takes the tensors of one micro-batch from `parts`, in the order of `upload_batches`."""
    shape = batch.input_ids.shape
    rows, tokens = shape
    ids = next(parts).view(shape)
    index = next(parts)
    labels = next(parts)
    pairs, targets = None, _pairs_of(batch)
    if targets is not None:
        answer, reference = next(parts).bool(), _floats(next(parts))
        desirable = None if targets.desirable is None else next(parts).bool()
        compared = Comparison(
            objective=targets.objective,
            reference=reference,
            pairs=targets.pairs,
            chosen_tokens=targets.chosen_tokens,
            desirable=desirable,
            divergence=targets.divergence,
        )
        labeled = (batch.labels >= 0).reshape(-1, targets.objective.sequences * tokens).sum(axis=1)
        pairs = DevicePairs(compared, answer, tuple(labeled.tolist()))
    weights = None if _weights_of(batch) is None else _floats(next(parts))
    if batch.position_ids is None:
        positions = None
        documents = Documents.whole_rows(rows, tokens, upload)
    else:
        positions = next(parts).view(shape)
        documents = Documents.of(batch.position_ids, upload)
    noise = RowNoise(next(parts).view(2, rows)) if is_noisy else None
    lengths = next(parts) if batch.lengths is not None else None
    return DeviceBatch(
        ids,
        positions,
        index,
        labels,
        documents=documents,
        noise=noise,
        lengths=lengths,
        pairs=pairs,
        weights=weights,
        loss_weight=loss_weight_of([batch]),
    )


def _answer_sequences(batch: Any) -> int:
    """Returns how many lines of answers a micro-batch has; none, where it has no pairs."""
    return 0 if _pairs_of(batch) is None else len(batch.input_ids)


@dataclass(frozen=True)
class StepShard:
    """One rank's shard of a training step."""

    batches: Sequence[MicroBatch]
    """Micro-batches, as for `StreamingEngine.train_step`."""
    loss_weight: float
    """In the whole step, the weights of all tokens that contribute to the loss have this sum: their
    number, where none has a weight.
    """
    first: int = 0
    """Number of micro-batches of the whole step before these."""
    first_line: int = 0
    """Number of lines of answers of the whole step before those of these micro-batches."""
    sequences: int = 0
    """Number of lines of answers of the whole step; none where rows are no answers of pairs."""

    @classmethod
    def of(cls, batches: Sequence[Any], part: Shards) -> StepShard:
        """Returns the shard of a rank, one of all ranks on all nodes. Ranks take equally many
        micro-batches, in order, so that row i of a step is the same row for any number of them.
        """
        count = len(batches) // part.ranks
        first = part.rank * count
        sequences = [_answer_sequences(batch) for batch in batches]
        own, weight = batches[first : first + count], loss_weight_of(batches)
        return cls(own, weight, first, sum(sequences[:first]), sum(sequences))


@dataclass(frozen=True)
class StepInputs:
    """The inputs of a step are not changed by its ops, except for `caches`."""

    number: int
    """Optimizer steps count from 1; a pass without gradients has the number 0."""
    batches: list[DeviceBatch]
    loss_scale: float
    """1 / `StepShard.loss_weight`."""
    learning_rate: float = 0.0
    max_grad_norm: float | None = None
    label_smoothing: float = 0.0
    """Label smoothing in training (`engine.config.regularization`)."""
    seed: int = 0
    first: int = 0
    """Number of micro-batches of the whole step before these: those of other ranks."""
    first_line: int = 0
    """As in `StepShard`, like `sequences`."""
    sequences: int = 0
    training: bool = True
    logits_at: list[torch.Tensor] | None = None
    """For sampling, the logits are computed at these flat positions, int64 [n] for each
    micro-batch, and no loss is computed. It is None in all other passes.
    """
    scored: bool = False
    """Whether each label is scored instead of adding up its loss: see
    `MicroBatchState.likeliest`.
    """
    caches: list[Any] | None = None
    """For sampling, the list has the key-value cache of each micro-batch. An entry that is None is
    replaced by the cache that the model creates.
    """
    scalars: torch.Tensor | None = None
    """If any optimizer runs on the device, the tensor holds `HostOptimizer.scalars`, float32, on
    the device.
    """
    keys: Mapping[str, int] = field(default_factory=dict)
    """For each unit whose optimizer runs on the device, this is `HostOptimizer.key`."""


@dataclass(frozen=True)
class StepResult:
    """The result of a training step is known before its updates begin."""

    loss: float
    grad_norm: float
    unit_norms: list[float]
    """Gradient norm of each unit, in the order of the model's units."""
    clip_factor: float
    sequence_sums: list[list[float]] = field(default_factory=list)
    """`MicroBatchState.sequence_sums` line by line, of a step of pairs."""


@dataclass
class StepUnderWay:
    """The intermediate values of a step while its ops run, stored by one op and read by another."""

    inputs: StepInputs
    graphs: StepGraphs | None = None
    """Blocks are replayed from these recordings, or recorded; None where they run as they are."""
    micro_batches: list[MicroBatchState] = field(init=False)
    """Values of each micro-batch, in the order of `StepInputs.batches`."""
    state_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    """Data type of the inputs of each block whose inputs wait in ring buffers."""
    sequence_sums_of_ranks: torch.Tensor | None = None
    """`MicroBatchState.sequence_sums` of the micro-batches of the whole step, in order, which all
    ranks know: float32 [lines of the step, 2]; None with one rank.
    """
    failure: str | None = None
    """Why a pass with caches failed; None while it has not."""
    result: StepResult | None = None
    """The result is set by the op `clip`, and is None before."""

    def __post_init__(self) -> None:
        self.micro_batches = [MicroBatchState() for _ in self.inputs.batches]

    def sequence_sums_in_order(self) -> torch.Tensor | None:
        """Returns the sums of all micro-batches of all ranks, as far as they are known, float32
        [lines, 2]; None without pairs.
        """
        if self.sequence_sums_of_ranks is not None:
            return self.sequence_sums_of_ranks
        known = [each.sequence_sums for each in self.micro_batches]
        sums = [each for each in known if each is not None]
        return torch.cat(sums) if sums else None

    def own_sequence_sums_among_all(self) -> torch.Tensor | None:
        """Returns the sums of this rank at their places among those of the whole step, with 0 at
        all others, float32 [lines of the step, 2]; None without pairs.
        """
        own = self.sequence_sums_in_order()
        if own is None:
            return None
        found = own.new_zeros(self.inputs.sequences, 2)
        found[self.inputs.first_line : self.inputs.first_line + len(own)] = own
        return found
