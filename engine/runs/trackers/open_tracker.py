"""Opening of a tracker by its name. Only the packages of those that are opened are imported."""

from __future__ import annotations

from engine.runs.trackers.tracker import TrackedRun, Tracker


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Opens the tracker `name` of `output.trackers` for a run. Raises what its package raises."""
    if name == "tensorboard":
        from engine.runs.trackers.to_tensorboard import ToTensorBoard

        return ToTensorBoard(run)
    if name == "trackio":
        from engine.runs.trackers.to_trackio import ToTrackio

        return ToTrackio(run)
    if name == "wandb":
        from engine.runs.trackers.to_wandb import ToWandb

        return ToWandb(run)
    from engine.runs.trackers.to_mlflow import ToMlflow

    return ToMlflow(run)
