"""The planes that ranks of several nodes leave."""

from __future__ import annotations

from tests.support.worker_groups import StartedGroup


def trained_planes(workers: StartedGroup) -> dict[tuple[str, str], bytes]:
    store = workers.store
    return {
        (unit, plane): store.content(unit, plane, 0, store.nbytes(unit, plane)).tobytes()
        for unit in store.layouts
        for plane in store.planes
        if plane != "grad"
    }
