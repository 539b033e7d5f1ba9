"""The weights with which a run starts."""

from __future__ import annotations

import pytest
import torch

from engine.training.loop.prepare import Prepared
from tests.support.trained_runs import execute


def weights_at_start(run) -> dict[str, torch.Tensor]:
    """Executes a run, and returns the fp32 masters with which it began."""
    found: dict[str, torch.Tensor] = {}
    build = Prepared.build_engine

    def poll(self, planned):
        for unit in self.model.units:
            for spec in unit.layout.parameters:
                found[spec.full_name] = self.host_states.parameters.master(unit.name, spec.name)
        return build(self, planned)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Prepared, "build_engine", poll)
        assert execute(run).state == "finished", run.recorder.snapshot.reason
    return found
