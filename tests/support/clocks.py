"""Clocks that a test moves: the wall clock, which anybody may set, and the even one."""

from __future__ import annotations

import time

DAYS_40 = 3_456_000.0


class Clocks:
    """Both clocks of the process, in the place of the real ones. They stand still unless moved."""

    def __init__(self, monkeypatch, wall: float = 1_760_000_000.0):
        self.wall, self.even = wall, 50.0
        monkeypatch.setattr(time, "time", lambda: self.wall)
        monkeypatch.setattr(time, "monotonic", lambda: self.even)

    def pass_by(self, seconds: float) -> None:
        self.wall += seconds
        self.even += seconds

    def set_by(self, seconds: float) -> None:
        """What a person or a time server does to the wall clock."""
        self.wall += seconds


class WallClock:
    """The real wall clock, which can be set."""

    def __init__(self, monkeypatch):
        self.ahead, real = 0.0, time.time
        monkeypatch.setattr(time, "time", lambda: real() + self.ahead)

    def set_by(self, seconds: float) -> None:
        self.ahead += seconds
