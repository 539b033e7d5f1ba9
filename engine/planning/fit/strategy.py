"""A `Strategy` gives the candidates of one plan family (`engine.planning.fit.plan_families`) with
all batch splits. No torch.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from operator import attrgetter

from engine.config.settings import AUTO
from engine.planning.fit.batch_splits import BatchSplit
from engine.planning.fit.fill_memory import Candidate, MemoryFiller
from engine.planning.schedule.ops import MainGrad
from engine.planning.shape.saved_attention_sizes import returned_bytes
from engine.text import GIB

USABLE_RESERVE_BYTES = GIB // 2
"""Part of the reserve of RAM (`HOST_RESERVE_BYTES` of choose.py) that candidates may take where
nothing fits otherwise. The rest is for the program, its data and the pages of a checkpoint.
"""


class Strategy:
    """One plan family on one job, over all its batch splits.

    free_host_bytes: as for `MemoryFiller`.
    """

    def __init__(self, filler: MemoryFiller, batch_splits: list[BatchSplit], free_host_bytes: int):
        self.sizer = filler.sizer
        self._filler = filler
        self._batch_splits = batch_splits
        self._free_host_bytes = free_host_bytes

    @functools.cached_property
    def candidates(self) -> list[Candidate]:
        """Candidates that fit on the device, by batch split."""
        return list(self._candidates())

    def lack(self, candidate: Candidate) -> int:
        """Returns the bytes of RAM that the candidate lacks; negative where RAM is left."""
        return self._filler.host_bytes(candidate) - self._free_host_bytes

    @property
    def has_room(self) -> bool:
        """Whether a candidate fits, and leaves RAM free beside the states, the program and the
        block inputs.
        """
        if self.minimum_lack <= 0 and self.sizer.fits(*self.minimum_memory()):  # the most common
            return True
        return self._fits_in(0)

    @property
    def fits_in_filled_ram(self) -> bool:
        """Whether a candidate fits if RAM is filled to the last."""
        return self._fits_in(USABLE_RESERVE_BYTES)

    def _fits_in(self, more: int) -> bool:
        """Returns whether a candidate fits if `more` bytes beyond the free RAM may be taken."""
        candidates = self._candidates(self._free_host_bytes + more)
        return any(self.lack(candidate) <= more for candidate in candidates)

    @functools.cached_property
    def minimum_lack(self) -> int:
        """What the minimum-memory candidate lacks of RAM, in bytes."""
        return self.lack(self.minimum_memory())

    def fits_on_device(self) -> bool:
        """Returns whether the device holds the minimum-memory candidate."""
        return self.sizer.fits(*self.minimum_memory(), self.sizer.memory.limit)

    def minimum_memory(self) -> Candidate:
        """Returns the candidate that takes the least memory. More rounds would take still less, but
        they round the accumulators once per round, which is done only on request.
        """
        splits = self._batch_splits
        fewest_rounds = splits[0].rounds
        smallest = min(
            (split for split in splits if split.rounds == fewest_rounds), key=attrgetter("size")
        )
        return self._filler.offloaded_to_disk(self._filler.minimum_memory(smallest))

    def balanced(self, host_free: int) -> Candidate | None:
        """Returns the minimum-memory candidate with the number of GPU-resident units at which RAM
        (`host_free` bytes are free) and the device's memory are equally full; None where no unit
        may live on the device.
        """
        planes = host_free - self._free_host_bytes

        def fullest(candidate: Candidate) -> float:
            on_host = (planes + self._filler.host_bytes(candidate)) / host_free
            return max(on_host, self.sizer.total(*candidate) / self.sizer.memory.limit)

        return min(
            self._filler.gpu_resident_candidates(self.minimum_memory()), key=fullest, default=None
        )

    def _candidates(self, host_bytes: float = math.inf) -> Iterator[Candidate]:
        """Yields the candidates that fit on the device, by batch split. host_bytes: as for
        `MemoryFiller.filled`.
        """
        job = self.sizer.job
        # An accumulator that is rounded once per round is used only if the settings request it.
        exact = not job.rounding and job.config.engine.rounds == AUTO
        for batch_split in self._batch_splits:
            minimum = self._filler.minimum_memory(batch_split)
            if not self.sizer.fits(*minimum):
                continue
            for candidate in self._filler.filled(minimum, host_bytes):
                if exact and candidate.choices.gradients.main_grad == MainGrad.HOST:
                    continue
                yield from self._filler.disk_offload_candidates(candidate)
                yield from self._keeping_attention(candidate, minimum)
            if self.sizer.device == "cpu":  # sizes are tried in order of preference
                break

    def _keeping_attention(self, candidate: Candidate, minimum: Candidate) -> Iterator[Candidate]:
        """Yields the candidate with as many blocks that keep what attention returned as RAM has
        room for. Their buffers on the device may take the place of blocks that stay there and of
        activations, as far as `minimum` does without them.
        """
        sizer, shape, (size, choices) = self.sizer, self.sizer.shape, candidate
        activations = choices.activations
        is_of_one = activations.blocks_per_saved_input == 1
        if not (sizer.tile_tokens and activations.offloaded_block_inputs and is_of_one):
            return
        of_token = returned_bytes(shape.attention.width, shape.attention.heads, shape.item_bytes)
        one = choices.changed(attention_blocks=1, attention_bytes=of_token)
        kept_counts = range(
            choices.activations.blocks_without_recompute,
            minimum.choices.activations.blocks_without_recompute - 1,
            -1,
        )
        resident_counts = range(
            choices.placement.blocks_kept_in_slots,
            minimum.choices.placement.blocks_kept_in_slots - 1,
            -1,
        )
        for kept, resident in itertools.product(kept_counts, resident_counts):
            found = one.changed(blocks_without_recompute=kept, blocks_kept_in_slots=resident)
            if sizer.fits(size, found):
                yield from self._with_most_attention(Candidate(size, found))
                return

    def _with_most_attention(self, candidate: Candidate) -> Iterator[Candidate]:
        """Yields the candidate, in which one block keeps what attention returned, with as many such
        blocks as RAM has room for.
        """
        size, choices = candidate
        before = self._filler.host_bytes(Candidate(size, choices.changed(attention_blocks=0)))
        room = int(self._free_host_bytes - before) // (self._filler.host_bytes(candidate) - before)
        recomputed = (
            self.sizer.most_without_recompute - choices.activations.blocks_without_recompute
        )
        count = min(room, recomputed)
        if count > 0:
            yield Candidate(size, choices.changed(attention_blocks=count))
