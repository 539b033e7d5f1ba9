"""The CPU is measured here with one thread, which small models compute with."""

from __future__ import annotations

import torch

from engine.machine.rates import Rates
from engine.measuring.ceilings import measure
from engine.runtime.backend import Backend


def one_thread_rates(backend: Backend, seconds: float) -> Rates:
    """Returns the measured rates of the CPU with torch limited to one thread. Copies and AdamW keep
    their own threads.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return measure(backend, seconds, lambda _what: None, for_plans=True).rates()
    finally:
        torch.set_num_threads(threads)
