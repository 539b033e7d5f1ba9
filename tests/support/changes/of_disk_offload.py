"""Changes to moments and block inputs that are on the disk."""

from __future__ import annotations

from tests.support.changes.record import Change

UPDATES = "engine/planning/schedule/offloaded_updates.py"
DISK = "engine/runtime/host/disk_planes.py"
DISK_OFFLOADED = "tests/engine/runtime/test_disk_offloaded_units.py"
BITS = f"{DISK_OFFLOADED}::test_the_bits_are_those_of_moments_in_ram"
LATE = f"{DISK_OFFLOADED}::test_a_late_lane_changes_nothing"

BLOCK_INPUTS = "engine/planning/schedule/offloaded_activations.py"
KEPT = "engine/runtime/step/pinned_buffers.py"
WITH_BOUNDARIES = "tests/engine/runtime/test_block_inputs_on_disk.py"
SAME_BOUNDARIES = f"{WITH_BOUNDARIES}::test_the_bits_are_those_of_block_inputs_in_ram"
LATE_BOUNDARIES = f"{WITH_BOUNDARIES}::test_a_late_lane_changes_nothing"

DISK_OFFLOAD_CHANGES = (
    Change(
        "moments-written-before-they-are-updated",
        UPDATES,
        "self._emit(WriteStates, chunk, updated, {_states(chunk): READY})",
        "self._emit(WriteStates, chunk, {}, {_states(chunk): READY})",
        "A chunk goes back to the disk without waiting for its update.",
        (LATE,),
    ),
    Change(
        "moments-in-one-place",
        DISK,
        "places = (number * chunk.room for number in range(len(chunk.planes)))",
        "places = (0 * number for number in range(len(chunk.planes)))",
        "The second moment is taken from the place of the first.",
        (BITS,),
    ),
    Change(
        "page-around-bytes-not-kept",
        DISK,
        "        self._files[unit].read(pages.data, offset - skip)\n",
        "        pages[:] = 0\n",
        "Bytes that are filled from a checkpoint zero the rest of their pages.",
        (f"{DISK_OFFLOADED}::test_bytes_of_a_plane_are_read_and_written_wherever_they_begin",),
    ),
    Change(
        "step-over-before-it-is-on-the-disk",
        "engine/planning/schedule/write_ops.py",
        "            states |= self.disk_offloaded.states()\n",
        "",
        "A step counts as applied while its moments are still being written.",
        (f"{DISK_OFFLOADED}::test_a_step_is_over_once_its_moments_are_on_the_disk",),
    ),
    Change(
        "block-input-written-before-it-has-arrived",
        BLOCK_INPUTS,
        "self._emit(WriteBlockInput, (block, micro_batch), _in(ring, block, micro_batch), on_disk)",
        "self._emit(WriteBlockInput, (block, micro_batch), _in(ring, block, micro_batch), "
        "on_disk)\n"
        "        self._drafts[-1].reads = {}",
        "A block input may be written from its buffer before the device has sent it there.",
        (LATE_BOUNDARIES,),
    ),
    Change(
        "block-input-read-before-it-is-written",
        BLOCK_INPUTS,
        "self._emit(ReadBlockInput, found, _on_disk(*found, self._round), _in(ring, *found))",
        "self._emit(ReadBlockInput, found, {}, _in(ring, *found))",
        "A block input may be read from the disk before it is written there.",
        (LATE_BOUNDARIES,),
    ),
    Change(
        "block-inputs-in-one-place",
        KEPT,
        "{key: place * self._room for place, key in enumerate(on_disk)}",
        "{key: 0 for place, key in enumerate(on_disk)}",
        "All block inputs have one place in the file.",
        (SAME_BOUNDARIES,),
    ),
    Change(
        "block-inputs-of-other-micro-batches-on-the-disk",
        "engine/planning/schedule/choices.py",
        "        for place in range(together)\n",
        "        for place in reversed(range(together))\n",
        "Other block inputs than those that the plan spreads evenly go to the disk.",
        (f"{WITH_BOUNDARIES}::test_block_inputs_on_the_disk_are_spread_over_the_pass",),
    ),
    Change(
        "block-inputs-written-are-not-counted",
        KEPT,
        "        self._disk.count_block_input(len(pages))\n",
        "",
        "The wear of the drive by block inputs is not counted.",
        (f"{WITH_BOUNDARIES}::test_what_was_written_is_counted_in_whole_pages",),
    ),
    Change(
        "buffers-of-block-inputs-not-in-the-report",
        "engine/planning/fit/buffer_sizes.py",
        "    return in_ram + disk_rings_bytes(shape, choices, tokens)\n",
        "    return in_ram\n",
        "The report leaves out the buffers that block inputs pass through.",
        ("tests/engine/planning/fit/test_overflow.py::test_the_bytes_are_the_engine_s",),
    ),
)
