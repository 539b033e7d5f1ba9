"""Limits on guessing a password, with which nobody can lock the owner out at the machine itself.

- From elsewhere, an address with too many wrong passwords is not answered for a while. Guesses may
  come from many addresses, so after too many from all of them nobody from elsewhere is.
- At the machine itself there is no such limit. Passwords are checked one after the other there, a
  few in a second: the right one always has its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable

from app.server.clients import Client

FORGOTTEN_SECONDS = 60
"""Seconds for which a wrong password is remembered."""
WRONG_OF_ONE, WRONG_OF_ALL = 10, 100
"""Number of wrong passwords from one address, or from all addresses together, after which no
further password from elsewhere is checked until some are forgotten.
"""
TURN_SECONDS = 0.25
"""Seconds in which one password is checked at the machine itself."""


class Attempts:
    """Decides when a password may be checked, and remembers the wrong ones of the last minute."""

    def __init__(self) -> None:
        self._wrong: deque[tuple[float, str]] = deque()
        self._queue = asyncio.Lock()
        self._next_turn = 0.0

    def are_too_many(self, client: Client, now: float | None = None) -> bool:
        """Returns whether no password of this client is checked for now."""
        if client.is_here:
            return False
        now = time.monotonic() if now is None else now
        while self._wrong and self._wrong[0][0] <= now - FORGOTTEN_SECONDS:
            self._wrong.popleft()
        of_this_one = sum(group == client.group for _, group in self._wrong)
        return of_this_one >= WRONG_OF_ONE or len(self._wrong) >= WRONG_OF_ALL

    def was_wrong(self, client: Client, now: float | None = None) -> None:
        """Notes a wrong password. Those of this machine do not count: they would lock out who
        is elsewhere.
        """
        if not client.is_here:
            now = time.monotonic() if now is None else now
            self._wrong.append((now, client.group))

    async def turn(self, client: Client, has_left: Callable[[], Awaitable[bool]]) -> bool:
        """Waits until a password of this client may be checked. Returns False if the client has
        left by then: it takes no turn, so that those behind it do not wait for it.
        """
        if not client.is_here:
            return True
        async with self._queue:
            if await has_left():
                return False
            await asyncio.sleep(self._next_turn - time.monotonic())
            self._next_turn = time.monotonic() + TURN_SECONDS
            return True
