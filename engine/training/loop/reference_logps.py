"""Reference log-probabilities of the answers of pairs, from the weights with which a run begins.

DPO compares with these numbers in every step. They are computed in one pass over all pairs before
the first step, unless the data have them, and kept in the run's folder: a resumed run, whose
weights are others, reads them from there.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine import safe_files
from engine.data.batches.pair_rows import MarkedRows, PairRows
from engine.data.batches.rows import MicroBatch, PairTargets, RowSet, one_pass
from engine.data.batches.rows import batches as batches_of
from engine.errors import CheckpointError
from engine.machine.cgroups import give_back_free_memory
from engine.runtime.step.inference_passes import sweeps
from engine.runtime.step.preference_metrics import PairSums, sequence_sums
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.loop.oom_recovery import Moment, OomRecovery
from engine.training.loop.prepare import Prepared
from engine.training.loop.session import Session

Poll = Callable[[], None]
FILE = "reference.npz"
"""File of the reference log-probabilities in a run's folder."""
_SHARE, _NATS = 0.01, 0.1
"""References of the same weights that were computed elsewhere differ by no more than this fraction
of a log-probability, and these nats, since bf16 rounds otherwise with other kernels.
"""

_SOME_LACK = (
    "Some rows lack ref_chosen_logps and ref_rejected_logps, so the reference of all rows is "
    "computed before the first step."
)


def compute_reference_logps(
    session: Session, prepared: Prepared, oom_recovery: OomRecovery, poll: Poll
) -> None:
    """Fills in the reference log-probabilities of a run's pairs, if its objective needs them.

    `poll` is called often and may end the work with an exception. Raises CheckpointError where a
    run that has begun has lost its file, and DiskFullError where it cannot be written.
    """
    sides = [side for side in (prepared.data.train, prepared.data.eval) if len(side)]
    pairs = [
        side
        for side in sides
        if isinstance(side, PairRows | MarkedRows) and side.lacks_reference_logps
    ]
    if not session.config.objective.needs_reference or not pairs:
        return
    path = session.folder.path / FILE
    fingerprint = prepared.data.fingerprint
    if _read(path, fingerprint, pairs):
        return
    if prepared.step:
        raise CheckpointError(
            f"{path} is missing or damaged: it has what the answers are compared with, and only "
            "the weights before the first step can tell; put it back, or start a new run."
        )
    if any(isinstance(side, PairRows) and side.given_references for side in pairs):
        session.log("info", _SOME_LACK)
    found: list[np.ndarray] = []

    def work() -> None:
        found[:] = _computed(session, prepared, pairs, poll)

    oom_recovery.repeated(Moment(0, "reference"), work)
    for side, values in zip(pairs, found):
        side.set_reference_logps(values)
    arrays = {f"side{place}": values for place, values in enumerate(found)}
    content = io.BytesIO()
    np.savez(content, fingerprint=np.array(fingerprint), **arrays)  # type: ignore[arg-type]
    safe_files.write_whole(path, content.getvalue(), session.folder.root)
    # Kernels of this pass were compiled, and the rest of that is not needed in any step.
    gc.collect()
    give_back_free_memory()


def _read(path: Path, fingerprint: str, pairs: list[PairRows | MarkedRows]) -> bool:
    """Fills the pairs from the file at `path`. Returns False if it is not of these pairs."""
    unreadable = (OSError, ValueError, KeyError, EOFError, MemoryError, zipfile.BadZipFile)
    with (
        contextlib.suppress(*unreadable),
        safe_files.open_to_read(path, path.parent.parent) as file,
    ):
        # `np.savez` compresses nothing, so arrays that are larger than the file are not its.
        size = os.fstat(file.fileno()).st_size
        with zipfile.ZipFile(file) as members:
            if sum(member.file_size for member in members.infolist()) > size:
                return False
        file.seek(0)
        with np.load(file, allow_pickle=False) as kept:
            arrays = [kept[f"side{place}"] for place in range(len(pairs))]
            is_same = str(kept["fingerprint"]) == fingerprint
        if is_same and all(_are_of(a, side) for a, side in zip(arrays, pairs)):
            for side, values in zip(pairs, arrays):
                side.set_reference_logps(values)
            return True
    return False


def _are_of(found: np.ndarray, pairs: PairRows | MarkedRows) -> bool:
    """Returns whether these can be the references of this number of pairs."""
    is_right = found.shape == (len(pairs), 2) and found.dtype == np.float32
    return is_right and bool(np.isfinite(found).all())


def _computed(
    session: Session, prepared: Prepared, pairs: list[PairRows | MarkedRows], poll: Poll
) -> list[np.ndarray]:
    """Returns the references of each split, float32[pairs, 2], from one pass over all pairs."""
    progress = session.progress("reference")
    total, done = sum(len(rows) for side in pairs for rows in side.compared), 0
    longest = session.config.data.max_seq_len
    chosen = prepared.chosen
    text = "Finding how likely the answers are before training"
    progress(0, total, text)

    def reported(batches: Iterator[list[Any]]) -> Iterator[list[Any]]:
        nonlocal done
        for sweep in batches:
            yield sweep
            done += sum(batch.pairs.pairs for batch in sweep)
            progress(done, total, text)

    found = []
    sizes = chosen.micro_batch_size, chosen.pad_up_to(longest)
    for side in pairs:
        columns = [
            sequence_logps(prepared.engine, rows, sizes, poll, reported) for rows in side.compared
        ]
        found.append(np.concatenate(columns, axis=1))
    progress(total, total, "Done")
    return found


def sequence_logps(
    engine: StreamingEngine,
    rows: RowSet,
    sizes: tuple[int, int],
    poll: Poll,
    reported: Callable[[Iterator[list[Any]]], Iterable[list[Any]]] = iter,
) -> np.ndarray:
    """Returns the log-probabilities of the answers of all rows, float32[rows, sequences of a row],
    in the order of the rows. sizes: the rows of a micro-batch, and what it is padded up to.
    `reported` yields the sweeps again and may report their progress. `poll` is as for
    `evaluated_pairs`.
    """
    sums = evaluated_pairs(engine, reported(sweeps(one_pass(rows, *sizes))), poll)
    values = np.empty((len(rows), rows.sequences_per_row), dtype=np.float32)
    values[rows.order_of_evaluation()] = sums.answer.reshape(len(rows), -1)
    return values


def evaluated_pairs(
    engine: StreamingEngine, given: Iterable[list[Any]], poll: Callable[[], None]
) -> PairSums:
    """Returns the sums of the pairs in the micro-batches of all sweeps in `given`, in their order.
    `poll` is called often and may end the work with an exception. Every submitted step must be
    applied.
    """
    targets: list[PairTargets] = []
    sums: list[np.ndarray] = []
    with engine.on_same_weights():
        for sweep in given:
            of_sweep = [batch.pairs for batch in sweep]
            losses = [each.cpu().numpy() for _, each in engine.losses_of(sweep, poll)]
            sums.append(sequence_sums(of_sweep, losses))
            targets += of_sweep
    return PairSums.of(targets, np.concatenate(sums))


def with_kl_estimate(
    prepared: Prepared, batches: list[MicroBatch], step: int, poll: Callable[[], None]
) -> list[MicroBatch]:
    """Returns the micro-batches of a step of answers with marks, with the estimate of their KL
    divergence. For this, all earlier steps are applied first. Other steps are unchanged.
    """
    rows = prepared.data.train
    if not isinstance(rows, MarkedRows):
        return batches
    prepared.drain()
    train, chosen = prepared.config.train, prepared.chosen
    longest = prepared.config.data.max_seq_len
    sizes = train.batch_size, chosen.micro_batch_size
    kl_completions = batches_of(rows.kl_completions, *sizes, step, chosen.pad_up_to(longest))
    diverged = kl_estimate(prepared.engine, kl_completions, poll)
    return [diverged_by(batch, diverged) for batch in batches]


def kl_estimate(engine: StreamingEngine, kl_completions: list[MicroBatch], poll: Poll) -> float:
    """Returns the KL estimate of a step from its KL completions. Every submitted step must be
    applied. `poll` is as for `evaluated_pairs`.
    """
    return evaluated_pairs(engine, [kl_completions], poll).diverged()


def diverged_by(batch: MicroBatch, divergence: float) -> MicroBatch:
    """Returns a micro-batch of answers with marks that has the KL estimate of its step."""
    assert batch.pairs is not None
    return replace(batch, pairs=replace(batch.pairs, divergence=divergence))


def mismatched_reference_logps(
    rows: RowSet, figures: Mapping[str, float], beta: float
) -> str | None:
    """Returns a sentence if the references in the data are not of the weights with which a run
    begins. Before anything is learned, rewards are `beta` times the difference; `figures` are those
    of step 1, under TRL's names.
    """
    if (
        not isinstance(rows, PairRows)
        or not rows.objective.needs_reference
        or not rows.given_references
    ):
        return None
    for side in ("chosen", "rejected"):
        ours = figures[f"logps/{side}"]
        difference = figures[f"rewards/{side}"] / beta
        if abs(difference) > _SHARE * abs(ours) + _NATS:
            return (
                f"The data's references for the {side} answers are {ours - difference:.4g} on "
                f"average, and this model gives them {ours:.4g}, so rewards do not start at 0; "
                "remove the columns ref_chosen_logps and ref_rejected_logps unless another model "
                "is meant to be the reference."
            )
    return None
