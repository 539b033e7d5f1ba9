"""Where moments are in their planes, for units of any shape: every element has its moments once,
the counts of the planner are the bytes of the ranges, and no chunk of an update cuts a block.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.config.optimizers import BLOCK, OPTIMIZERS, SMALL, StateFormat
from engine.planning.layout.layout import ParameterSpec, UnitLayout, lay_out
from engine.planning.layout.optimizer_states import MAXIMUM_BYTES, StateRange, format_bytes
from engine.planning.layout.update_buffers import UpdateBuffer
from engine.planning.schedule.shards import cut

NUMELS = st.one_of(
    st.integers(0, 300),
    st.integers(SMALL - 70, SMALL + 600),
    st.integers(SMALL, 5 * SMALL),
    st.integers(1, 40).map(lambda count: count * BLOCK),
)
PARAMETERS = st.lists(st.tuples(NUMELS, st.booleans()), min_size=1, max_size=9)
UNITS = st.sampled_from(["embed", "block 0", "head"])


def layout_of(parameters: list[tuple[int, bool]], unit: str = "head") -> UnitLayout:
    """A unit of parameters with these numbers of elements, each with decay or without."""
    return lay_out(
        unit,
        [
            ParameterSpec(f"p{number}", f"p{number}", (numel,), decay)
            for number, (numel, decay) in enumerate(parameters)
        ],
    )


def expected_kind(numel: int, unit: str, optimizer: str) -> StateFormat:
    described = OPTIMIZERS[optimizer]
    if not described.is_rounded or numel < 4096:
        return StateFormat.FP32
    return StateFormat.BF16 if unit == "embed" else described.format


def blocks_of(range_: StateRange) -> list[tuple[int, int]]:
    """The first element of each block of codes, and the one after its last."""
    starts = range(range_.start, range_.stop, BLOCK)
    return [(start, min(start + BLOCK, range_.stop)) for start in starts]


@given(PARAMETERS, UNITS, st.sampled_from(list(OPTIMIZERS)))
@example(
    [(8960, True), (4097, True), (100, True), (5000, False), (64, False)], "head", "adamw_8bit"
)
def test_ranges_cover_every_element_once_and_are_counted(parameters, unit, optimizer):
    layout = layout_of(parameters, unit)
    ranges = layout.state_ranges(optimizer)["exp_avg"]
    assert [range_.start for range_ in ranges[1:]] == [range_.stop for range_ in ranges[:-1]]
    assert (ranges[0].start, ranges[-1].stop) == (0, layout.numel) if ranges else not layout.numel
    place = 0
    for range_ in ranges:
        assert range_.place == place and place % 4 == 0
        place += range_.bytes
    assert set(layout.state_counts.bytes(optimizer).values()) == {place}
    stops = (*layout.offsets[1:], layout.numel)
    for spec, start, stop in zip(layout.parameters, layout.offsets, stops):
        if start == stop:  # an empty parameter is in no range
            continue
        kinds = {r.kind for r in ranges if r.start < stop and start < r.stop}
        assert kinds <= {expected_kind(spec.numel, unit, optimizer)}
        for first, last in [b for r in ranges if r.kind == StateFormat.CODES for b in blocks_of(r)]:
            assert not first < start < last and not first < stop < last, "a block of two parameters"
            assert first // BLOCK == (last - 1) // BLOCK, "a block crosses a multiple of 256"


@given(PARAMETERS, st.sampled_from(["block 0", "head"]))
def test_whole_blocks_are_joined(parameters, unit):
    """A kernel runs on few ranges: neighbors of one kind are apart only where a block is short."""
    ranges = layout_of(parameters, unit).state_ranges("adamw_8bit")["exp_avg"]
    for left, right in itertools.pairwise(ranges):
        is_short = left.kind == StateFormat.CODES and (left.start % BLOCK or left.stop % BLOCK)
        assert left.kind != right.kind or is_short


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("unit", ["embed", "head"])
@settings(max_examples=150)
@given(parameters=PARAMETERS, largest=st.integers(1, 300))
@example(parameters=[(70 * 128 + 64, True), (SMALL + 64, False), (9000, False)], largest=7)
@example(parameters=[(4160, False)] * 9, largest=70)
def test_every_chunk_fits_into_the_buffer_and_none_cuts_a_block(
    parameters, largest, unit, optimizer
):
    """Also where the head has a bias, a norm or several matrices, at any place."""
    layout = layout_of(parameters, unit)
    block = layout_of([(64 * largest, True)], "block 0")
    counts = [each.state_counts for each in (layout, block)]
    buffer = UpdateBuffer.of("bfloat16", optimizer, counts, block.numel)
    sizes = dict(buffer.planes)
    assert buffer.numel >= block.numel and sizes["grad"] == 2 * buffer.numel
    assert sizes["exp_avg"] == sizes["exp_avg_sq"] and sizes["exp_avg"] % 16 == 0
    for each in (layout, block):
        place = 0
        for start, stop in cut(each.numel, buffer.numel):
            begin, end = each.state_bounds(optimizer, "exp_avg", start, stop)
            most = each.state_counts.most_bytes(optimizer, buffer.numel)["exp_avg"]
            assert begin == place and end - begin <= most <= sizes["exp_avg"]
            place = end
        assert place == each.state_counts.bytes(optimizer)["exp_avg"]


def test_a_buffer_is_hardly_larger_than_its_chunks():
    """Otherwise the device would hold fewer of them."""
    layout = layout_of([(4096 * 640, True), (4096, False), (640, False)])
    block = layout_of([(4096 * 64, True), (4096, False)], "block 0")
    counts = [each.state_counts for each in (layout, block)]
    for optimizer, item in (("adamw", 4), ("adamw_bf16", 2), ("adamw_8bit", 1 + 4 / 256)):
        buffer = UpdateBuffer.of("bfloat16", optimizer, counts, block.numel)
        assert buffer.numel == block.numel
        moment = dict(buffer.planes)["exp_avg"]
        assert item * buffer.numel <= moment <= item * buffer.numel + 3 * 640 + 32
        assert buffer.bytes == 6 * buffer.numel + 2 * moment


@given(
    st.integers(0, 3).map(lambda n: n * BLOCK),
    st.integers(1, 5 * BLOCK),
    st.integers(0, 9 * BLOCK),
    st.integers(0, 9 * BLOCK),
    st.sampled_from([kind for kind in StateFormat if kind.item_bytes]),
)
def test_a_part_of_a_range_is_where_its_elements_are(start, numel, first, last, kind):
    range_ = StateRange(start, start + numel, kind, 36)
    low, high = max(first, start), min(last, start + numel)
    is_cut = kind == StateFormat.CODES and any(
        bound % BLOCK and bound not in (range_.start, range_.stop) for bound in (low, high)
    )
    if low >= high:
        assert range_.within(first, last) is None
    elif is_cut:
        with pytest.raises(ValueError, match="cut a block of 256 in two"):
            range_.within(first, last)
    else:
        part = range_.within(first, last)
        assert (part.start, part.stop, part.kind) == (low, high, kind)
        before = low - start
        codes = before + MAXIMUM_BYTES * (before // BLOCK)
        skipped = codes if kind == StateFormat.CODES else before * kind.item_bytes
        assert part.place == 36 + skipped and part.bytes == format_bytes(kind, high - low)


def test_bytes_of_a_block_and_of_a_shorter_one():
    assert format_bytes(StateFormat.CODES, 256) == 260 and format_bytes(StateFormat.CODES, 64) == 68
    assert format_bytes(StateFormat.CODES, 257) == 265 and format_bytes(StateFormat.CODES, 0) == 0
    assert format_bytes(StateFormat.BF16, 3) == 6 and format_bytes(StateFormat.FP32, 3) == 12
