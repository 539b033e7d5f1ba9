"""Events of a record, folded into a snapshot."""

from __future__ import annotations

from engine.runs.record.events import Record
from engine.runs.record.snapshot import RunSnapshot


def fold(records) -> RunSnapshot:
    snapshot = RunSnapshot()
    for record in records:
        snapshot.apply(record)
    return snapshot


def fold_of(*events, run_id="r") -> RunSnapshot:
    return fold(
        Record(run_id, seq, 1000.0 + seq, event) for seq, event in enumerate(events, start=1)
    )
