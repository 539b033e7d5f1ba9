"""What choices count in memory, and which settings contradict each other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from engine.config.settings import ModelConfig
from engine.errors import ConfigError
from engine.machine.known_machines import named_machine
from engine.model.build.build import build_model
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.choose import choose, least_choices
from engine.planning.fit.job import Job, Target
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.requirements import FitStatus, requirements_of
from engine.planning.fit.strategy import Strategy
from engine.planning.shape.activation_sizes import DOCUMENTS
from engine.text import GIB, MIB
from tests.support.chosen import FAST_RATES, big_shape, config, on_gpu
from tests.support.tiny import tiny_config

pytestmark = [pytest.mark.computing, pytest.mark.usefixtures("compiler")]
BY_DOCUMENTS = dataclasses.replace(big_shape().attention, implementation=DOCUMENTS)


def test_rotary_embeddings_are_counted_for_every_row_of_their_own_positions():
    same = dict(
        train__micro_batch_size=37,
        engine__rounds=1,
        engine__blocks_kept_in_slots=0,
        engine__activation_checkpointing="offload",
    )
    free = dataclasses.replace(big_shape(), attention=BY_DOCUMENTS)
    packed, plain = (
        {
            item.name: item.bytes
            for item in on_gpu(24, free, data__packing=packing, **same).gpu_items
        }
        for packing in (True, False)
    )
    assert packed["Rotary embeddings"] == 148 * 1024 * 256 * 2
    assert plain["Rotary embeddings"] == 4 * 1024 * 256 * 2


def test_what_cannot_fit_is_answered_with_the_minimum_choices():
    chosen = on_gpu(1)
    assert chosen.micro_batch_size == 1
    assert chosen.choices.activations.offloaded_block_inputs
    assert chosen.choices.placement.blocks_kept_in_slots == 0
    assert chosen.gpu_bytes > GIB


def test_dense_masks_are_counted_only_where_rows_are_packed():
    same = dict(
        train__micro_batch_size=37,
        engine__rounds=1,
        engine__blocks_kept_in_slots=0,
        engine__activation_checkpointing="offload",
    )
    sizes = [
        {item.name: item.bytes for item in on_gpu(24, data__packing=packing, **same).gpu_items}
        for packing in (True, False)
    ]
    masks = sizes[0].pop("Tokens and masks") - sizes[1].pop("Tokens and masks")
    assert (
        masks == 148 * 1024 * 1024 and sizes[0]["Working set"] > sizes[1]["Working set"]
    )  # which keeps a mask too
    plain = on_gpu(24)
    unpackable = dataclasses.replace(big_shape(), packs=False)
    assert on_gpu(24, unpackable, data__packing=True) == plain
    windows = dataclasses.replace(big_shape().attention, sliding_window=512)
    sliding = dataclasses.replace(big_shape(), attention=windows)
    assert on_gpu(24, sliding, length=512) == on_gpu(24, length=512)
    assert on_gpu(24, sliding) != plain


def test_attention_by_documents_makes_no_masks_on_the_gpu():
    shape = dataclasses.replace(big_shape(), argument_numel=0)
    plain, free = on_gpu(24, shape), dataclasses.replace(shape, attention=BY_DOCUMENTS)
    windows = dataclasses.replace(BY_DOCUMENTS, sliding_window=512)
    sliding = dataclasses.replace(free, attention=windows)
    assert on_gpu(24, free, data__packing=True) == on_gpu(24, sliding) == plain
    assert not any("mask" in item.note for item in on_gpu(24, free, data__packing=True).gpu_items)
    assert not BY_DOCUMENTS.masked_blocks(True, 1024, "bfloat16", "cpu")
    assert windows.masked_blocks(True, 1024, "bfloat16", "cpu")
    assert not windows.masked_blocks(True, 1024, "bfloat16", "cuda")
    assert not windows.masked_blocks(True, 512, "bfloat16", "cpu")


def test_masks_of_short_rows_in_float32_are_counted_on_the_gpu():
    free = dataclasses.replace(big_shape("float32"), attention=BY_DOCUMENTS, argument_numel=0)
    same = dict(
        engine__rounds=1,
        engine__blocks_kept_in_slots=0,
        engine__activation_checkpointing="offload",
        train__batch_size=8,
    )

    def masks(rows: int, length: int) -> int:
        packed, plain = (
            {
                item.name: item.bytes
                for item in on_gpu(
                    80, free, length, data__packing=packing, train__micro_batch_size=rows, **same
                ).gpu_items
            }
            for packing in (True, False)
        )
        return packed["Tokens and masks"] - plain["Tokens and masks"]

    assert masks(4, 512) == 8 * 512 * 512 * 4
    assert masks(8, 512) == 0
    assert masks(1, 1024) == 8 * 1024 * 1024 * 4


def test_what_blocks_hand_on_is_counted_for_each_row_also_where_rows_are_not_packed():
    """Positions, and so rotary embeddings, differ between rows only where rows are packed."""
    shape = dataclasses.replace(big_shape(), argument_numel=16, handed_numel=8)
    same = dict(
        engine__rounds=1,
        engine__blocks_kept_in_slots=0,
        engine__activation_checkpointing="offload",
        train__batch_size=8,
        train__micro_batch_size=4,
    )

    def inputs(packing: bool) -> int:
        items = on_gpu(80, shape, 1024, data__packing=packing, **same).gpu_items
        return next(item.bytes for item in items if item.name == "Rotary embeddings")

    assert inputs(packing=False) == 2 * 1024 * (16 + 4 * 8) * shape.item_bytes
    assert inputs(packing=True) == 2 * 1024 * (4 * 16 + 4 * 8) * shape.item_bytes


# ---------------------------------------------------------------------- contradictions


@pytest.mark.parametrize(
    "field,changes",
    [
        ("engine.blocks_kept_in_slots", dict(engine__blocks_kept_in_slots=29)),
        ("engine.rounds", dict(engine__rounds=3)),
        ("engine.rounds", dict(engine__rounds=4, train__micro_batch_size=74)),
    ],
)
def test_contradictions_are_refused_by_name(field, changes):
    with pytest.raises(ConfigError) as caught:
        on_gpu(80, **changes)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)
    assert str(caught.value).endswith(".")


def test_rows_beyond_a_table_of_positions_are_refused():
    table = shape_of(build_model(tiny_config("gpt2"), ModelConfig(source="tiny")))
    assert table.learned_positions and not big_shape().learned_positions
    choose(Job(table, config(), 64), Target("cpu", None, 8 * GIB))
    with pytest.raises(ConfigError, match="data.max_seq_len.*64 positions"):
        choose(Job(table, config(), 65), Target("cpu", None, 8 * GIB))


def test_block_inputs_that_do_not_fit_in_host_memory_are_not_chosen_for_speed():
    """With these rates rounds with block inputs on the host are a little faster; there is RAM for
    them in one case.
    """

    def block_inputs(ram: int) -> int:
        asked = config(train__batch_size=256, engine__gradients="host")
        target = Target("cuda", 48 * GIB, ram * GIB, FAST_RATES)
        return choose(Job(big_shape(), asked, 1024), target).offloaded_input_bytes

    assert block_inputs(125) <= 125 * GIB - big_shape().states.host_bytes


def test_a_way_that_fits_is_found_where_one_of_all_candidates_fits(monkeypatch):
    """Those that cannot fit are passed over before they are filled, and others once one fits."""
    found, filled = [], []

    class Compared(Strategy):
        @property
        def has_room(self) -> bool:
            has_room = super().has_room
            usual = self.minimum_lack <= 0 and self.sizer.fits(*self.minimum_memory())
            roomy = [each for each in self.candidates if self.lack(each) <= 0]
            assert has_room == (usual or bool(roomy))
            found.append(has_room)
            filled.append(len(roomy))
            return has_room

    monkeypatch.setattr("engine.planning.fit.choose.Strategy", Compared)
    for gib, ram, optimizer, rounds in itertools.product(
        (12, 48, 139), (40, 90, 130), ("adamw", "adamw_8bit"), ("auto", 2)
    ):
        changes = dict(train__optimizer=optimizer, train__batch_size=8, engine__rounds=rounds)
        job = Job(big_shape().with_optimizer(optimizer), config(**changes), 1024)
        least_choices(job, Target("cuda", gib * GIB, ram * GIB))
    assert {*found} == {True, False}  # jobs of both kinds were compared
    assert max(filled) > 1


def test_the_ram_that_a_job_needs_is_enough():
    """All units of a small job live on the GPU where RAM is plentiful, which takes the least of it.
    With little more than that, another plan was chosen once, and refused.
    """
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    model = ModelConfig(source="tiny", dtype="float32")
    shape = shape_of(build_model(tiny_config("llama", **sizes), model))
    asked = config(
        train__batch_size=4,
        engine__slots=2,
        engine__activation_checkpointing="full",
        engine__blocks_kept_in_slots=0,
        engine__rounds=1,
        engine__kernels="eager",
    )
    machine = named_machine("H100 SXM")
    plenty = requirements_of(asked, machine, shape)
    assert plenty.chosen.choices.placement.gpu_resident_units == 8
    need = plenty.parts[PartName.HOST].total
    for free in (need + 16 * MIB, need + GIB // 4):
        with_little = dataclasses.replace(machine, ram_available=free)
        assert requirements_of(asked, with_little, shape).status() != FitStatus.DOES_NOT_FIT
    too_little = dataclasses.replace(machine, ram_available=need - 16 * MIB)
    assert requirements_of(asked, too_little, shape).status() == FitStatus.DOES_NOT_FIT
