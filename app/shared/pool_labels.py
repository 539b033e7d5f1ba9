"""The pool of memory as texts and bars: where units live, what each part holds, and what that
costs a step. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from app.labels import in_bytes
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool import Held, Pool, PoolPart, Share, Units, listed, together_text
from engine.planning.fit.pool_costs import LEAST_SHARE, Costs, Work, roughly

HELD_LABELS = {
    Held.MODEL: "the model",
    Held.COPY: "a copy of its weights",
    Held.STEP: "working memory",
    Held.FILES: "checkpoints and loading",
    Held.PROGRAM: "program, data and reserve",
}
FREE = "free"
ALL_PLANES = 3
"""Everything that there is of a unit: weights, moments and gradients."""


@dataclass(frozen=True)
class Segment:
    """Segment of a bar: what a part holds of one kind, of neighbors together."""

    held: Held
    units: tuple[Units, ...]
    bytes: int

    @property
    def text(self) -> str:
        """What it is, as in "embed and blocks 0 to 10: weights, moments and gradients"."""
        if not self.units:
            return HELD_LABELS[self.held]
        which = together_text(self.units)
        if self.held == Held.COPY:
            return f"{which}: a copy of the weights"
        return which


def pool_bar(part: PoolPart) -> dict[str, Any]:
    """Returns the bar of a part: `segments` with the share of the bar that each takes, from left to
    right, and the place of the `limit` where more is needed than there is, or None.
    """
    total, limit = part.total, part.limit
    whole = max(1, total, limit or 0)
    segments = [_drawn(part.name, segment, whole) for segment in segments_of(part)]
    if limit is not None and limit > total:
        text = f"{FREE}: {in_bytes(limit - total)}"
        free = {"held": FREE, "share": round((limit - total) / whole, 4), "label": "", "text": text}
        segments.append(free)
    is_short = limit is not None and total > limit
    return {"segments": segments, "limit": round((limit or 0) / whole, 4) if is_short else None}


def segments_of(part: PoolPart) -> list[Segment]:
    """Returns the segments of a part. Neighbors of which the same planes live there are one."""
    found = []
    for (held, _), run in groupby(part.shares, key=lambda share: _kind(part.name, share)):
        shares = list(run)
        units = tuple(share.units for share in shares if share.units is not None)
        found.append(Segment(held, units, sum(share.bytes for share in shares)))
    return found


def _kind(name: PartName, share: Share) -> tuple[Held, tuple[str, ...]]:
    units = share.units
    return share.held, () if units is None else units.placement.planes_in(name)


def _drawn(name: PartName, segment: Segment, whole: int) -> dict[str, Any]:
    share, text, label = segment.bytes / whole, segment.text, ""
    if segment.held == Held.MODEL and segment.units:
        planes = segment.units[0].placement.planes_in(name)
        text = f"{text}: {listed(planes)}"
        label = _label(segment.units, planes)
    return {
        "held": segment.held.value,
        "share": round(share, 4),
        "label": label,
        "text": f"{text}: {in_bytes(segment.bytes)}",
    }


def _label(units: Sequence[Units], planes: Sequence[str]) -> str:
    """Returns what lives there as a bar has room for it: "embed, blocks 0–10" if all of these
    units does, else what of them does.
    """
    if len(planes) < ALL_PLANES:
        return ", ".join(planes)
    return together_text(units).replace(" and ", ", ").replace(" to ", "–")


def held_text(part: PoolPart) -> str:
    """Returns the bar of a part as text, for those who cannot see it."""
    return "; ".join(segment["text"] for segment in pool_bar(part)["segments"])


# ---------------------------------------------------------------------- sentences


def places_text(units: Sequence[Units], on_gpu: bool, fits: bool = True) -> tuple[str, str]:
    """Returns a sentence on where units live, and further ones. on_gpu: blocks compute on a GPU.
    fits: the job fits, so that units do live there.
    """
    whole = f"The whole model {'lives' if fits else 'would live'}"
    if not on_gpu:
        runs, stays = ("Runs", "stays") if fits else ("Would run", "would stay")
        return f"{runs} on the CPU; everything {stays} in RAM.", ""
    living = [each for each in units if each.placement.weights == PartName.GPU]
    others = [each for each in units if each.placement.weights != PartName.GPU]
    if not others:
        return f"{whole} on the GPU.", "A step moves none of it."
    lives = f"{whole} in RAM."
    if living:
        verb = "lives" if living[-1].numbers[-1] == 0 else "live"
        verb = verb if fits else "would live"
        lives = f"{_capital(together_text(living))} {verb} on the GPU, "
        lives += f"{together_text(others)} in RAM."
    on_disk = [each for each in others if each.placement.moments == PartName.DISK]
    if on_disk:
        lives = f"{lives[:-1]}, except for moments that are on the disk."
    others_pass = "These pass" if living else "It passes"
    more = [f"{others_pass} through the GPU unit by unit in each step."]
    if not living and not on_disk:
        stays, streams = ("stays", "streams") if fits else ("would stay", "stream")
        lives = f"The model {stays} in RAM and {streams} through the GPU."
        more = []
    copied = [each for each in others if each.placement.is_copied]
    if copied:
        which = together_text(copied)
        more.append(f"The weights of {which} stay there from forward to backward.")
    if any(each.placement.gradient == PartName.GPU for each in others):
        more.append("Gradients wait on the GPU until they are applied.")
    if on_disk:
        more.append(f"The moments of {together_text(on_disk)} live on the disk.")
    return lives, " ".join(more)


def _capital(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}"


def cost_in_a_sentence(pool: Pool, name: PartName, costs: Costs) -> str:
    """Returns what it costs a step that units live in a part, or their moments on the disk; an
    empty text where none do. What the disk costs is shown for the disk alone.
    """
    units = [each for each in pool.living_in(name) if _settles(each, name)]
    if not units:
        return ""
    cost, step = costs.of(units), costs.step_seconds
    busy, disk_waited = cost.busy, cost.waited[Work.DISK]
    if name == PartName.DISK:
        return _beside_computing([("reads and writes", busy[Work.DISK])], disk_waited, step)
    on_gpu = busy[Work.GPU_OPTIMIZER]
    if name == PartName.GPU:
        return f"A step: the optimizer takes {roughly(on_gpu)}; these units are not moved."
    bus = busy[Work.TO_GPU] + busy[Work.TO_HOST] + busy[Work.BLOCK_INPUTS]
    works = [
        ("copies over the bus", bus),
        ("the optimizer on the CPU", busy[Work.HOST_OPTIMIZER]),
        ("the optimizer on the GPU", on_gpu),
    ]
    return _beside_computing(works, cost.waited_seconds - disk_waited, step)


def _settles(units: Units, name: PartName) -> bool:
    """Returns whether a part is the one that shows the units' cost: that of their weights, and
    the disk for their moments.
    """
    place = units.placement
    return name == (place.moments if name == PartName.DISK else place.weights)


def _beside_computing(works: Sequence[tuple[str, float]], waited: float, step: float) -> str:
    """Returns a sentence on work in seconds, of which the GPU waits `waited`; an empty text
    where it is hardly anything.
    """
    sentences = [
        f"{text} {roughly(seconds)}" for text, seconds in works if seconds > LEAST_SHARE * step
    ]
    if not sentences:
        return ""
    ending = "the GPU does not wait for that"
    if waited > LEAST_SHARE * step:
        ending = f"the GPU waits {roughly(waited)} for that ({100 * waited / step:.2g} %)"
    return f"A step, beside computing: {listed(sentences)}; {ending}."
