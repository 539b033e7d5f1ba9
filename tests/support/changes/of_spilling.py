"""Changes to moments that are on the disk."""

from __future__ import annotations

from tests.support.changes.record import Change

UPDATES = "engine/plan/spilled_updates.py"
DISK = "engine/host/disk_planes.py"
SPILLED = "tests/engine/runtime/test_spilled_units.py"
BITS = f"{SPILLED}::test_the_bits_are_those_of_moments_in_ram"
LATE = f"{SPILLED}::test_a_late_lane_changes_nothing"

SPILL_CHANGES = (
    Change(
        "moments-written-before-they-are-updated",
        UPDATES,
        "self._emit(WriteStates, piece, updated, {_states(piece): READY})",
        "self._emit(WriteStates, piece, {}, {_states(piece): READY})",
        "A piece goes back to the disk without waiting for its update.",
        (LATE,),
    ),
    Change(
        "moments-in-one-place",
        DISK,
        "places = (number * piece.room for number in range(len(MOMENTS)))",
        "places = (0 * number for number in range(len(MOMENTS)))",
        "The second moment is taken from the place of the first.",
        (BITS,),
    ),
    Change(
        "page-around-bytes-not-kept",
        DISK,
        "        self._files[unit].read(pages.data, offset - skip)\n",
        "        pages[:] = 0\n",
        "Bytes that are filled from a checkpoint zero the rest of their pages.",
        (f"{SPILLED}::test_bytes_of_a_plane_are_read_and_written_wherever_they_begin",),
    ),
    Change(
        "step-over-before-it-is-on-the-disk",
        "engine/plan/write_ops.py",
        "            states |= self.spilled.states()\n",
        "",
        "A step counts as applied while its moments are still being written.",
        (f"{SPILLED}::test_a_step_is_over_once_its_moments_are_on_the_disk",),
    ),
)
