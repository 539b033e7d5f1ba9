"""The optimizer on the device: equal to the host's but for rounding, and to itself to the bit,
however its work is spread over buffers and whichever lanes are late.
"""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from engine.errors import NonFiniteError
from engine.model.layout import PLANE_ITEM_BYTES, ParameterSpec, lay_out
from engine.plan.build_step import build_step_plan
from engine.plan.choices import PlanChoices
from engine.plan.ops import UPDATE_LANES, Lane
from engine.plan.text import grid
from engine.plan.validate import validate
from engine.runtime.block_ops import BlockOps
from engine.runtime.device_adamw import clip_of, update
from engine.runtime.host_adamw import HostAdamW
from engine.runtime.host_store import HostStore
from tests.engine.plan.test_laws import (
    BASE,
    DelayedBackend,
    assert_same_bits,
    find_dropped_waits,
    planes_after,
)
from tests.support.tiers import PLAN_SWEEP, in_tiers
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

SUMS = {
    "vertical": {},
    "device": dict(rounds=2, gradient_sum="device"),
    "host": dict(rounds=2, gradient_sum="host"),
}
HOMES = {
    "some": ("embed", "block 0"),
    "others": ("block 1", "head"),
    "all": ("embed", "block 0", "block 1", "block 2", "head"),
}
LATE = [
    UPDATE_LANES,
    (Lane.H2D,),
    (Lane.D2H, Lane.HOST),
    (Lane.COMPUTE,),
    (*UPDATE_LANES, Lane.H2D),
    *((lane,) for lane in UPDATE_LANES),
    (*UPDATE_LANES, Lane.HOST),
    Lane,
]


def at_home(
    homes: tuple[str, ...], buffers: int, gradient_sum: str = "vertical", **changes
) -> PlanChoices:
    return dataclasses.replace(
        BASE, device_homes=homes, update_buffers=buffers, **SUMS[gradient_sum], **changes
    )


def states(planes: list[torch.Tensor], dtype: str) -> list[dict[str, torch.Tensor]]:
    """For each unit its fp32 masters and both moments."""
    names, found = list(PLANE_ITEM_BYTES[dtype]), []
    for start in range(0, len(planes), len(names)):
        unit = dict(zip(names, planes[start : start + len(names)]))
        master = unit["weight_high"]
        if dtype == "bfloat16":
            bits = (master.view(torch.int16).to(torch.int32) << 16) + unit["weight_low"].to(
                torch.int32
            )
            master = bits.view(torch.float32)
        found.append(
            {"master": master, "exp_avg": unit["exp_avg"], "exp_avg_sq": unit["exp_avg_sq"]}
        )
    return found


# ---------------------------------------------------------------------- equal to the host's


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gradient_sum", SUMS)
def test_states_are_the_host_s_but_for_rounding(gradient_sum, dtype, tied):
    host = dataclasses.replace(BASE, **SUMS[gradient_sum])
    # Rounded weights that differ by one bit in a step give other gradients in the next one.
    steps = 3 if dtype == "float32" else 1
    expected = states(planes_after(host, dtype=dtype, tied=tied, steps=steps), dtype)
    before = states(planes_after(host, dtype=dtype, tied=tied, steps=0), dtype)
    for homes in HOMES.values():
        for resident in (0, 2):
            choices = at_home(homes, 2, gradient_sum, resident_blocks=resident)
            found = states(planes_after(choices, dtype=dtype, tied=tied, steps=steps), dtype)
            for ours, theirs, first in zip(found, expected, before):
                for name, values in ours.items():
                    error = (values - theirs[name]).abs().max() / theirs[name].abs().max()
                    assert error < 1e-5, (homes, resident, name, float(error))
                moved = (theirs["master"] - first["master"]).abs().max()
                assert (ours["master"] - theirs["master"]).abs().max() < 1e-3 * moved


# ---------------------------------------------------------------------- to the bit


@pytest.mark.parametrize("resident,tied", [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("gradient_sum", in_tiers(SUMS, ("vertical",), PLAN_SWEEP))
def test_neither_buffers_nor_delays_change_a_bit(gradient_sum, resident, tied):
    for name, homes in HOMES.items():

        def run(buffers: int, late: tuple[str, ...] = ()) -> list[torch.Tensor]:
            choices = at_home(homes, buffers, gradient_sum, resident_blocks=resident, kept_blocks=1)
            return planes_after(choices, DelayedBackend(late), dtype="bfloat16", tied=tied)

        expected = run(1)
        for buffers in (2, 3, 8):
            assert_same_bits(run(buffers), expected)
        for late in LATE if name == "all" else LATE[:1]:
            assert_same_bits(run(3, late), expected)


def test_buffers_over_sums_are_as_good_as_their_own():
    """Of eight blocks, the sums have space for two buffers and part of a third."""
    homes = tuple(f"block {k}" for k in (0, 1, 3, 4, 7))

    def run(
        buffers: int, late: tuple[str, ...] = (), gradient_sum: str = "device"
    ) -> list[torch.Tensor]:
        return planes_after(
            at_home(homes, buffers, gradient_sum), DelayedBackend(late), dtype="bfloat16", layers=8
        )

    expected = run(1)
    assert_same_bits(run(2, gradient_sum="vertical"), expected)
    for buffers in (2, 3):
        for late in (
            UPDATE_LANES,
            *((lane,) for lane in UPDATE_LANES),
            (Lane.COMPUTE,),
            (*UPDATE_LANES, Lane.H2D, Lane.D2H),
        ):
            assert_same_bits(run(buffers, late), expected)


@pytest.mark.parametrize("gradient_sum", in_tiers(SUMS, ("vertical",), PLAN_SWEEP))
def test_buffers_in_the_place_of_activations_are_as_good(gradient_sum):
    """Of eight blocks, the last five keep their activations."""
    homes = ("embed", *(f"block {k}" for k in (0, 1, 3, 4, 7)))

    def run(
        buffers: int, spare: int = 0, lenders: int = 0, late: tuple[str, ...] = ()
    ) -> list[torch.Tensor]:
        choices = at_home(
            homes, buffers, gradient_sum, kept_blocks=5, spare_buffers=spare, spare_blocks=lenders
        )
        return planes_after(choices, DelayedBackend(late), dtype="bfloat16", layers=8)

    expected = run(1)
    for spare, lenders in ((1, 1), (2, 3), (5, 5)):
        for buffers in (spare + 1, spare + 2):
            assert_same_bits(run(buffers, spare, lenders), expected)
        for late in LATE if spare == 2 else LATE[:2]:
            assert_same_bits(run(spare + 2, spare, lenders, late), expected)


def test_spare_buffers_are_there_between_the_backward_and_the_forward_of_their_lenders(monkeypatch):
    choices = at_home(("embed", "block 1"), 3, kept_blocks=2, spare_buffers=2, spare_blocks=1)
    run = streamed(plain_model(tiny_config("qwen3")), choices, dtype="bfloat16")
    state, there = run.engine.state, []
    work = BlockOps.work

    def watched(ops, op, step):
        do = work(ops, op, step)

        def then() -> None:
            do()
            there.append(
                (op.kind, op.unit, set(run.engine.plan.spare_buffers) <= state.states.keys())
            )

        return then

    monkeypatch.setattr(BlockOps, "work", watched)
    for step in (1, 2):
        run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
    last = f"block {len(run.model.blocks) - 1}"
    passes = [
        lent for kind, unit, lent in there if kind in ("forward", "backward") and unit == last
    ]
    assert passes and not any(passes)
    assert all(
        lent for kind, _, lent in there if kind in ("summary", "device_update", "embed_backward")
    )
    run.engine.drain()
    assert not set(run.engine.plan.spare_buffers) & state.states.keys()
    run.close()


@pytest.mark.parametrize("resident", [0, 2])
def test_what_runs_between_steps_changes_nothing(resident):
    """Weights that stay in a slot of their own are there again after an evaluation."""
    plain = plain_model(tiny_config("qwen3"))
    left = []
    for interrupted in (False, True):
        run = streamed(plain, at_home(HOMES["all"], 2, resident_blocks=resident), dtype="bfloat16")
        for step in (1, 2, 3):
            run.engine.train_step(step, random_batches(2, seed=step), 1e-2)
            if interrupted:
                run.engine.drain()
                for slot in run.engine.state.slots.values():
                    slot.fill_(float("nan"))
                assert math.isfinite(run.engine.evaluate(random_batches(2, seed=9)))
        run.engine.drain()
        left.append(
            [
                run.store.tensor(unit.name, plane).clone()
                for unit in run.model.units
                for plane in run.store.planes
            ]
        )
        run.close()
    assert_same_bits(*left)


@pytest.mark.parametrize("gradient_sum", SUMS)
@pytest.mark.parametrize(
    "late",
    [(), (Lane.HOST,), (Lane.D2H, Lane.HOST), (*UPDATE_LANES, Lane.HOST)],
    ids=lambda late: "+".join(late) or "none",
)
def test_a_loss_that_is_not_finite_applies_nothing(late, gradient_sum):
    """Also where the update runs on the device before the host has seen the loss."""
    run = streamed(
        plain_model(tiny_config("qwen3")),
        at_home(HOMES["all"], 3, gradient_sum, resident_blocks=1),
        backend=DelayedBackend(late),
        dtype="bfloat16",
    )
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)
    run.engine.drain()
    run.store.tensor("head", "weight_high")[3] = float("nan")
    kept = [
        (unit.name, plane)
        for unit in run.model.units
        for plane in run.store.planes
        if plane != "grad"
    ]
    before = [run.store.tensor(*key).clone() for key in kept]
    with pytest.raises(NonFiniteError, match="loss of step 2"):
        run.engine.train_step(2, random_batches(2, seed=2), 1e-2)
        run.engine.drain()
    for lane in Lane if late else ():  # what was under way when the error came
        held = run.backend._held[lane]
        while held and lane != Lane.HOST:
            run.backend.run_until(held[-1])
    assert_same_bits([run.store.tensor(*key) for key in kept], before)


# ---------------------------------------------------------------------- the arithmetic


def one_unit(dtype: str) -> HostStore:
    layout = lay_out(
        "unit",
        [
            ParameterSpec("weight", "weight", (70, 64), True),
            ParameterSpec("norm", "norm", (640,), False),
        ],
    )
    store = HostStore([layout], dtype, threads=1)
    store.allocate_weights()
    store.allocate_states()
    return store


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("eps", [1e-8, 1e-12])
def test_a_piece_is_updated_as_the_host_updates_it(dtype, eps):
    generator = torch.Generator().manual_seed(1)
    host, device = one_unit(dtype), one_unit(dtype)
    numel, decayed = host.layouts["unit"].numel, host.layouts["unit"].decay_numel
    for name, shape in (("weight", (70, 64)), ("norm", (640,))):
        values = torch.randn(shape, generator=generator)
        for store in (host, device):
            store.write("unit", name, values)
    adamw = HostAdamW(host, 0.9, 0.99, eps, 0.3, threads=1)
    for step in (1, 2, 3):
        # Of very different sizes; some zero, and moments that become subnormal.
        gradient = torch.randn(numel, generator=generator) * 10 ** (
            torch.rand(numel, generator=generator) * -30
        )
        gradient[::7] = 0.0
        if step == 3:
            gradient[5], gradient[decayed + 1] = float("inf"), float("nan")
        for store in (host, device):
            store.tensor("unit", "grad").copy_(gradient)
            if step == 2:
                store.tensor("unit", "exp_avg")[::7] = 1.2e-38
        adamw.update("unit", step, 1e-2, 0.7)
        scalars, clip = torch.from_numpy(adamw.scalars(step, 1e-2)), torch.tensor([0.7, 1.0])
        for start, stop in ((0, 1000), (1000, decayed + 64), (decayed + 64, numel)):
            planes = {plane: device.tensor("unit", plane)[start:stop] for plane in device.planes}
            update(
                planes,
                planes.pop("grad"),
                clip,
                scalars,
                min(max(0, decayed - start), stop - start),
                compiled=False,
            )
        ours, theirs = (
            [store.tensor("unit", plane) for plane in store.planes] for store in (device, host)
        )
        for name, mine, other in zip(
            ("master", "exp_avg", "exp_avg_sq"),
            states(ours, dtype)[0].values(),
            states(theirs, dtype)[0].values(),
        ):
            # Of a master near zero, only what its step of 1e-2 is rounded to.
            torch.testing.assert_close(
                mine, other, rtol=5e-6, atol=2e-9 if name == "master" else 1e-37, equal_nan=True
            )
            if name == "exp_avg" or (
                name == "exp_avg_sq" and eps == 1e-8
            ):  # a smaller eps has no space for a bias
                assert not ((mine != 0) & (mine.abs() < 2.0**-126)).any()
    adamw.close()
    host.close()
    device.close()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_a_factor_that_forbids_it_nothing_changes(dtype, value):
    store = one_unit(dtype)
    store.write("unit", "weight", torch.randn(70, 64))
    store.tensor("unit", "exp_avg").fill_(1e-39)  # left as it is, subnormal or not
    store.tensor("unit", "grad").fill_(value)
    planes = {plane: store.tensor("unit", plane) for plane in store.planes}
    before = [plane.clone() for plane in planes.values()]
    scalars = torch.from_numpy(HostAdamW(store, 0.9, 0.99, 1e-8, 0.3, threads=1).scalars(1, 1e-2))
    others = {name: plane for name, plane in planes.items() if name != "grad"}
    update(others, planes["grad"], torch.tensor([float("nan"), 0.0]), scalars, 4480, compiled=False)
    assert_same_bits(list(planes.values()), before)
    store.close()


@pytest.mark.parametrize("limit", [None, 0.5, 100.0])
def test_the_clip_factor_is_the_host_s(limit):
    squares, loss = [3.0, 1e-20, 6.0], 2.5
    factor, fine = clip_of(torch.tensor([*squares, loss]), limit).tolist()
    norm = math.sqrt(sum(squares))
    assert fine == 1 and factor == pytest.approx(
        1.0 if limit is None else min(1.0, limit / (norm + 1e-6)), rel=1e-6
    )
    for bad in (float("nan"), float("inf")):
        assert clip_of(torch.tensor([*squares, bad]), limit)[1] == 0
        assert clip_of(torch.tensor([bad, 1.0, loss]), limit)[1] == 0


# ---------------------------------------------------------------------- plans


def plans(depth: int):
    """Plans of many homes, with units of very different sizes, so that pieces are many."""
    blocks = [f"block {k}" for k in range(depth)]
    numel = {block: 100 + 10 * (k % 2) for k, block in enumerate(blocks)} | {
        "embed": 250,
        "head": 310,
    }
    for homes in (("embed",), ("head",), tuple(blocks[::2]), ("embed", *blocks, "head")):
        for tied in (False, True):
            for micro_batches, rounds, gradient_sum in (
                (1, 1, "vertical"),
                (4, 2, "device"),
                (4, 2, "host"),
            ):
                for slots, resident, kept in ((1, 0, 0), (2, 2, 1), (3, 0, 4), (2, depth, depth)):
                    for buffers, spare in (
                        ((1, 0), (2, 0), (3, 0), (8, 0), (2, 1), (8, 3))
                        if kept
                        else ((1, 0), (3, 0))
                    ):
                        choices = PlanChoices(
                            micro_batches=micro_batches,
                            rounds=rounds,
                            gradient_sum=gradient_sum,
                            slots=slots,
                            resident_blocks=resident,
                            kept_blocks=kept,
                            device_homes=homes,
                            update_buffers=buffers,
                            host_boundaries=buffers == 2,
                            prefetch_depth=max(1, slots - 1),
                            spare_buffers=spare,
                            spare_blocks=min(kept, 2) if spare else 0,
                        )
                        yield build_step_plan(blocks, tied, choices, numel), numel, choices


@pytest.mark.parametrize("depth", [4, 9])
def test_plans_with_homes_validate_and_update_everything_once(depth):
    for plan, numel, choices in plans(depth):
        validate(plan)
        pieces = {
            unit: [op.piece for op in plan.ops if op.kind == "device_update" and op.unit == unit]
            for unit in numel
        }
        hosts = [op.unit for op in plan.ops if op.kind == "update"]
        assert sorted(hosts) == sorted(set(numel) - set(choices.device_homes))
        for unit in choices.device_homes:
            covered = [k for start, stop in pieces[unit] for k in range(start, stop)]
            assert covered == list(range(numel[unit])) and all(
                b - a <= plan.piece_numel for a, b in pieces[unit]
            )
            for kind in ("fetch_states", "offload_weights", "offload_states"):
                found = [op.piece for op in plan.ops if op.kind == kind and op.unit == unit]
                # Pieces of one unit may be spread over spare and other buffers, which are free at
                # other times.
                assert (sorted(found) if choices.spare_buffers else found) == pieces[unit]
        sent = [op.buffer for op in plan.ops if op.kind == "offload_states"]
        if choices.spare_buffers:  # those are given back before what nothing waits for is sent
            late = len(sent) - len(plan.update_buffers)
            spares = [k for k, buffer in enumerate(sent) if buffer in plan.spare_buffers]
            assert not spares or spares[-1] <= len(spares) + max(0, late)
        used = {op.buffer for op in plan.ops if op.kind == "device_update"}
        assert used == set(plan.update_buffers[: sum(map(len, pieces.values()))])
        assert len(plan.update_buffers) == choices.update_buffers
        assert {unit for unit, _ in plan.placed} == {
            op.unit for op in plan.ops if op.kind == "device_update" and op.slot is not None
        }
        for (
            unit,
            slot,
        ) in plan.placed:  # its first use in a step finds it where the step before updated it
            own = [
                op
                for op in plan.ops
                if op.unit == unit and op.kind in ("prefetch", "embed", "forward", "loss")
            ]
            assert own[0].kind != "prefetch" and own[0].slot == slot


BLOCKS = [f"block {k}" for k in range(8)]


@pytest.mark.parametrize(
    "homes",
    [("embed", *BLOCKS[:3], *BLOCKS[5:7], "head"), (*BLOCKS[3:6], BLOCKS[7])],
    ids=["from the first", "of the middle"],
)
@pytest.mark.parametrize("gradient_sum", SUMS)
@pytest.mark.parametrize("spare", [0, 2])
def test_dropping_any_single_wait_of_a_plan_with_homes_is_found(gradient_sum, homes, spare):
    choices = PlanChoices(
        micro_batches=2,
        device_homes=homes,
        update_buffers=3 + spare,
        kept_blocks=4,
        resident_blocks=2,
        spare_buffers=spare,
        spare_blocks=spare,
        **SUMS[gradient_sum],
    )
    plan = build_step_plan(
        BLOCKS, False, choices, dict.fromkeys(BLOCKS, 100) | {"embed": 250, "head": 310}
    )
    validate(plan)
    assert bool(plan.arena) == (gradient_sum == "device")
    dropped = set(find_dropped_waits(plan))
    kinds = {kind for kind, _ in dropped}
    assert kinds >= {"fetch_states", "device_update", "offload_weights", "prefetch", "home"}
    assert (
        "fetch_gradient" in kinds or homes[0] == "embed"
    )  # what embed's gradient needs comes after all others'
    if gradient_sum == "device":  # states over sums: neither may come while the others are needed
        assert {("fetch_states", "waits"), ("backward", "waits_previous")} <= dropped
    # From the first, the forward pass waits before for a weight that goes out after all states in
    # spare buffers.
    assert (("reclaim", "waits_previous") in dropped) == (bool(spare) and homes[0] != "embed")


def test_homes_without_buffers_and_homes_of_no_unit_are_refused():
    spare = dict(device_homes=("embed",), update_buffers=2, spare_blocks=1)
    for changes in (
        dict(device_homes=("embed",)),
        dict(device_homes=("nothing",), update_buffers=1),
        spare | dict(spare_buffers=1),
        spare | dict(spare_buffers=2, kept_blocks=1),
    ):
        with pytest.raises(ValueError, match="buffers (for the optimizers|in the place)"):
            build_step_plan(
                ["block 0"], False, PlanChoices(**changes), {"embed": 1, "block 0": 1, "head": 1}
            )


def test_lanes_of_homes_are_columns_of_the_grid():
    plan = build_step_plan(
        ["block 0", "block 1"],
        False,
        PlanChoices(device_homes=("block 0",), update_buffers=2),
        {"embed": 9, "block 0": 4, "block 1": 4, "head": 9},
    )
    text = grid(plan)
    assert text.splitlines()[0].split() == " ".join(["op", *Lane, "waits for"]).split()
    assert "device_update block 0" in text and "update block 0" not in text.replace(
        "device_update block 0", ""
    )
