"""The planes that ranks of several nodes leave."""

from __future__ import annotations

from tests.support.worker_groups import StartedGroup


def trained_planes(workers: StartedGroup) -> dict[tuple[str, str], bytes]:
    states = workers.host_states
    return {
        (unit, plane): states.content(unit, plane, 0, states.nbytes(unit, plane)).tobytes()
        for unit in states.layouts
        for plane in states.planes
        if plane != "grad"
    }
