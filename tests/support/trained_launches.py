"""A run that torchrun or a scheduler starts, and its figures."""

from __future__ import annotations

from pathlib import Path

from engine.runs.record.events import EvalFinished, PlanBuilt, StepFinished
from tests.support.launches import events_in, launch


def trained(folder: Path, preset: str, nodes: int, ranks: int, *how) -> Path:
    """Trains on so many nodes; returns the folder of the run. how: as for `Launch`."""
    runs = folder / f"{nodes}x{ranks}-{len(list(folder.iterdir()))}"
    with launch(nodes, ranks, [[preset, "--runs-dir", str(runs)]] * nodes, *how) as started:
        codes, out, err = started.ended()
    assert codes == [0] * nodes and out.count("Finished all 8 steps") == 1, (out, err)
    assert "Traceback" not in err
    words = f"on {nodes} nodes of {ranks} rank{'s' if ranks > 1 else ''} each"
    assert (words in out) == (nodes > 1)
    (built,) = events_in(runs, PlanBuilt)
    assert (built.choices["replicas"], built.choices["ranks"]) == (nodes, ranks)
    assert not list(runs.glob(".torchrun"))
    return runs


def figures(runs: Path) -> list[float]:
    steps, evaluations = (events_in(runs, kind) for kind in (StepFinished, EvalFinished))
    return [n for e in steps for n in (e.loss, e.grad_norm)] + [e.loss for e in evaluations]
