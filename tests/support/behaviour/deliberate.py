"""Differences that are wanted: data, each with the reason for it. All others make the comparison fail."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Deliberate:
    """`path` is that of a difference, as it is printed; `*` stands for any characters."""

    path: str
    reason: str


DELIBERATE: tuple[Deliberate, ...] = ()
