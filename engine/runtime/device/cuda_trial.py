"""A trial of the GPU in a helper process: whether torch can use it, and how much RAM can be locked
for transfers. A driver that hangs or ends the process harms the helper alone.
"""

from __future__ import annotations

import mmap
from dataclasses import asdict

import msgspec
import numpy as np
import torch

from engine.errors import first_line
from engine.helper_process import HelperProcess, ending, take_output
from engine.machine.readings import CudaTrial
from engine.runtime.device.cuda_backend import cuda_problem
from engine.text import MIB

LOCK_BYTES = 1280 * MIB
"""RAM that is locked as a trial: WSL2 refuses it from 0.5 to 1 GiB on."""
_PART = 64 * MIB
PATIENCE = 120
"""Seconds that the helper may take."""
_PROGRAM = "from engine.runtime.device.cuda_trial import answer; answer()"


def try_cuda() -> CudaTrial:
    """Returns what torch does with the GPU, as a helper process has tried it."""
    helper = HelperProcess(_PROGRAM, {}, quiet=True)
    try:
        found = helper.next_line(PATIENCE)
        if found:
            return CudaTrial(**found)
        if found is None:
            return CudaTrial(f"it does not answer within {PATIENCE} seconds")
        return CudaTrial(f"it ended with {ending(helper.wait())}")
    finally:
        helper.close()


def answer() -> None:
    """Tries the GPU and writes what came of it, as a line; the helper calls this."""
    with take_output() as output:
        output.write(msgspec.json.encode(asdict(tried())) + b"\n")


def tried() -> CudaTrial:
    """Returns what torch does with the GPU, as this process has tried it."""
    problem = cuda_problem()
    if problem:
        return CudaTrial(problem)
    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError as error:
        return CudaTrial(first_line(error))
    memory = mmap.mmap(-1, LOCK_BYTES)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    locked = 0
    while locked < LOCK_BYTES and _locks(address + locked):
        locked += _PART
    for part in range(0, locked, _PART):
        torch.cuda.cudart().cudaHostUnregister(address + part)
    return CudaTrial("", LOCK_BYTES, locked)


def _locks(address: int) -> bool:
    return int(torch.cuda.cudart().cudaHostRegister(address, _PART, 0)) == 0
