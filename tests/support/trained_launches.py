"""A run that torchrun or a scheduler starts, and its figures."""

from __future__ import annotations

from pathlib import Path

from engine.runs.record.events import EvalFinished, PlanBuilt, StepFinished
from tests.support.launches import events_in, launch


def trained(folder: Path, preset: str, hosts: int, ranks: int, *how) -> Path:
    """Trains on so many hosts; returns the folder of the run. how: as for `Launch`."""
    runs = folder / f"{hosts}x{ranks}-{len(list(folder.iterdir()))}"
    with launch(hosts, ranks, [[preset, "--runs-dir", str(runs)]] * hosts, *how) as started:
        codes, out, err = started.ended()
    assert codes == [0] * hosts and out.count("Finished all 8 steps") == 1, (out, err)
    assert "Traceback" not in err
    words = f"on {hosts} hosts of {ranks} rank{'s' if ranks > 1 else ''} each"
    assert (words in out) == (hosts > 1)
    (built,) = events_in(runs, PlanBuilt)
    assert (built.choices["hosts"], built.choices["ranks"]) == (hosts, ranks)
    assert not list(runs.glob(".torchrun"))
    return runs


def figures(runs: Path) -> list[float]:
    steps, evaluations = (events_in(runs, kind) for kind in (StepFinished, EvalFinished))
    return [n for e in steps for n in (e.loss, e.grad_norm)] + [e.loss for e in evaluations]
