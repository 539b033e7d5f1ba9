"""The command `launch.py doctor`: what stops or slows training on this machine, one line for each
check, with the command that mends it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from engine.machine.findings import Check, Effect, Finding, findings
from engine.machine.readings import CudaTrial, Readings, read
from engine.text import counted

WORDS = {
    Effect.RIGHT: "ok",
    Effect.NOTE: "note",
    Effect.SLOWS: "slow",
    Effect.NO_GPU: "wrong",
}
_MARK = max(map(len, WORDS.values())) + 2
_NAME = max(map(len, Check)) + 2


def doctor(runs_dir: str | Path) -> tuple[str, int]:
    """Returns the lines of all checks, and the exit code: 1 if something stops or slows training.
    Runs are kept in `runs_dir`.
    """
    readings = read(runs_dir)
    found = findings(replace(readings, trial=_tried(readings)))
    return as_text(found), int(any(each.is_wrong for each in found))


def as_text(found: Sequence[Finding]) -> str:
    """Returns a line for each check, the command that mends it below, and how many are wrong."""
    wrong = sum(each.is_wrong for each in found)
    last = "Nothing here stops or slows training."
    if wrong:
        last = f"{counted(wrong, 'check')} of {len(found)} found what stops or slows training."
    return "\n".join([*_lines(found), "", last])


def _lines(found: Sequence[Finding]) -> Iterator[str]:
    for each in found:
        yield f"{WORDS[each.effect]:<{_MARK}}{each.check:<{_NAME}}{each.text}"
        if each.command:
            yield f"{'':<{_MARK + _NAME}}$ {each.command}"


def _tried(readings: Readings) -> CudaTrial | None:
    """Returns what torch does with the GPU; None where there is nothing to try."""
    build = readings.torch
    if not readings.driver.gpus or build is None or build.cuda is None:
        return None
    # It brings torch.
    from engine.runtime.device.cuda_trial import try_cuda

    return try_cuda()
