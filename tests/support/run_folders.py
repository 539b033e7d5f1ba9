"""Run folders with a record, made without a model, data or an engine."""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder
from engine.runs.record.snapshot import RunSnapshot

CONFIG = TrainConfig.from_dict(
    {"name": "My Run!", "model": {"source": "models/m"}, "data": {"source": "d.jsonl"}}
)


def named(name: str) -> TrainConfig:
    return CONFIG.with_values({"name": name})


def record(folder: RunFolder, *events) -> RunSnapshot:
    """What the events, recorded there, add up to."""
    recorder = RunRecorder(folder, folder.id)
    for event in events:
        recorder.emit(event)
    recorder.close()
    return recorder.snapshot
