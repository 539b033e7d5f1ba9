"""All changes, by area."""

from __future__ import annotations

from tests.support.changes.of_adapters import ADAPTER_CHANGES
from tests.support.changes.of_checkpoints import CHECKPOINT
from tests.support.changes.of_data import DATA
from tests.support.changes.of_disk_offload import DISK_OFFLOAD_CHANGES
from tests.support.changes.of_learning import LEARNED
from tests.support.changes.of_moments import MOMENT_CHANGES
from tests.support.changes.of_optimizer import OPTIMIZER
from tests.support.changes.of_pairs import PAIRS
from tests.support.changes.of_parts import PART_CHANGES
from tests.support.changes.of_plans import PLANS
from tests.support.changes.of_ranks import RANK_CHANGES
from tests.support.changes.of_regularization import REGULARIZED
from tests.support.changes.of_run_models import RUN_MODELS
from tests.support.changes.of_sequence_tiling import SEQUENCE_TILING
from tests.support.changes.of_steps import STEPS
from tests.support.changes.record import Change

AREAS: dict[str, tuple[Change, ...]] = {
    "Steps, sums and loss": STEPS,
    "AdamW and planes": OPTIMIZER,
    "Smaller moments and kept gradients": MOMENT_CHANGES,
    "Moments on the disk": DISK_OFFLOAD_CHANGES,
    "Several ranks": RANK_CHANGES,
    "Parts of a model": PART_CHANGES,
    "Label smoothing, noise and balanced experts": REGULARIZED,
    "Adapters": ADAPTER_CHANGES,
    "Planner": PLANS,
    "Data": DATA,
    "Checkpoints": CHECKPOINT,
    "The best weights": LEARNED,
    "Pairs of answers": PAIRS,
    "Added tokens and longer rows": RUN_MODELS,
    "Sequence tiling of long rows": SEQUENCE_TILING,
}
CHANGES: tuple[Change, ...] = tuple(change for area in AREAS.values() for change in area)

REVIEWED = (
    "main-grads-rounded-each-time",
    "norm-of-rounded-gradients",
    "loss-of-bf16-logits",
    "evaluation-averages-means",
    "buffers-not-read-from-the-weights",
    "first-token-of-a-text-trained",
    "label-of-the-next-document",
    "clipping-without-its-1e-6",
)
"""A review made these eight changes when no test noticed any of them."""
