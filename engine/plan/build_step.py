"""From units and choices to the plan of one step. Policy lives in `engine.fit.choose`; nothing here
runs. No torch.

Three passes make a plan:

1. `assign_slots` gives every use of a block its slot, and says when the slot must be filled.
2. `write_ops` (and, for optimizers on the device, `device_updates`) puts the ops into program
   order, each with what it reads and writes.
3. `derive_waits` finds from those what each op must wait for.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.plan.buffers import EMBED, HEAD
from engine.plan.choices import PlanChoices
from engine.plan.derive_waits import with_waits
from engine.plan.ops import GradientSum, StepPlan
from engine.plan.write_ops import StepWriter


def build_step_plan(
    blocks: list[str],
    tied: bool,
    choices: PlanChoices,
    numel: Mapping[str, int] | None = None,
    state_bytes: int = 14,
    updates: bool = True,
) -> StepPlan:
    """The plan of one training step over `blocks` (unit names in forward order) between the embed
    and head units.

    `tied`: the head also uses the embed unit's weights, so its slot is held and its gradient is
    summed all step. `numel`: elements of each unit's planes, and `state_bytes`: bytes of all planes
    for an element, both needed where an optimizer runs on the device. updates: False for a dry run,
    the same step up to its summary: no op of it writes weights or moments. Raises ValueError for
    choices that contradict each other.
    """
    _refuse_contradictions(blocks, choices)
    writer = StepWriter(blocks, tied, choices, numel or {}, state_bytes, updates=updates)
    device = writer.device
    return StepPlan(
        ops=with_waits(writer.write()),
        slots=writer.slot_units(),
        grads=writer.grad_units(),
        stagings=writer.staging_units(),
        rings=writer.rings(),
        kept_units=writer.kept,
        compiled=choices.compiled,
        device_homes=choices.device_homes,
        placed=tuple(
            (unit, slot)
            for unit in choices.device_homes
            if (slot := device.placed(unit)) is not None
        ),
        update_buffers=tuple(device.buffers),
        spare_buffers=tuple(device.spare),
        piece_numel=device.piece_numel,
        arena=tuple(device.arena),
    )


def build_forward_plan(
    blocks: list[str],
    tied: bool,
    micro_batches: int,
    slots: int,
    prefetch_depth: int = 1,
    resident_blocks: int = 0,
) -> StepPlan:
    """A pass without gradients, for evaluation and sampling; `loss` ops end it."""
    choices = PlanChoices(
        micro_batches=micro_batches,
        slots=slots,
        prefetch_depth=prefetch_depth,
        resident_blocks=resident_blocks,
    )
    writer = StepWriter(blocks, tied, choices, {}, 0, training=False)
    return StepPlan(ops=with_waits(writer.write()), slots=writer.slot_units())


def _refuse_contradictions(blocks: list[str], choices: PlanChoices) -> None:
    c = choices
    if c.micro_batches % c.rounds:
        raise ValueError(f"{c.rounds} rounds do not divide {c.micro_batches} micro-batches")
    if (c.gradient_sum == GradientSum.VERTICAL) != (c.rounds == 1):
        raise ValueError("gradient_sum is 'vertical' exactly when there is one round")
    if c.kept_blocks > len(blocks):
        raise ValueError(f"{c.kept_blocks} of {len(blocks)} blocks cannot keep their activations")
    if not set(c.device_homes) <= {EMBED, *blocks, HEAD} or (
        c.device_homes and c.update_buffers < 1
    ):
        raise ValueError(f"{c.update_buffers} buffers for the optimizers of {c.device_homes}")
    if (c.spare_buffers or c.spare_blocks) and not (
        c.device_homes
        and 0 < c.spare_buffers < c.update_buffers
        and 0 < c.spare_blocks <= c.kept_blocks
    ):
        raise ValueError(
            f"{c.spare_buffers} of {c.update_buffers} buffers in the place of {c.spare_blocks} "
            f"blocks of {c.kept_blocks}"
        )
