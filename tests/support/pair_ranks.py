"""Training on pairs with several ranks."""

from __future__ import annotations

from engine.training.loop.run import start_run
from tests.support.made_pairs import marked_config, pair_config
from tests.support.trained_runs import execute


def train(tmp_path, name: str, ranks: int, objective: str, at_step=None, **values):
    make = marked_config if objective == "kto" else pair_config
    own = {
        "train.objective": objective,
        "engine.gpus": ranks,
        "train.micro_batch_size": 1,
        "output.checkpoint_every": 2,
        "output.keep_checkpoints": 9,
    }
    run = start_run(make(tmp_path, **own | values), tmp_path / name)
    ended = execute(run, at_step)
    assert ended.state == ("stopped" if at_step else "finished"), ended.reason
    return run
