"""Progress bars of the command line."""

from __future__ import annotations

import time
from typing import Any

from tqdm import tqdm


class SteadyBar(tqdm):
    """A bar that measures its rate and its remaining time on a clock that nobody sets, where tqdm
    itself uses the wall clock.
    """

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._time = time.monotonic
        self.start_t = self.last_print_t = self._time()
