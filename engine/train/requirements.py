"""What a new run needs beside memory is looked at here before it begins: the weights to start from,
and the files of its model. Its data are checked apart (`engine.data.preview`), and so is the folder
of all runs (`engine.runs.runs_folder`). No torch, unless a run starts from other weights.
"""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.hub.missing_files import refuse_missing_files


def refuse_incomplete(config: TrainConfig, waits: bool = True) -> None:
    """Raises RamstreamError, in one sentence, for something that a new run needs and lacks now.
    Nothing is loaded. `waits`: as for `refuse_missing_files`.
    """
    own_weights = True
    if config.model.start_from is not None:
        from engine.checkpoints.start_weights import needs_own_weights, refuse_start

        refuse_start(config)
        own_weights = needs_own_weights(config)
    weights = config.model.init == "pretrained" and own_weights
    refuse_missing_files(config.model.source, weights, waits)
