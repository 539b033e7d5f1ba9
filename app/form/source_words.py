"""These words are shown for the settings of the model and of the data."""

from __future__ import annotations

LABELS = {
    "model.source": "Model",
    "model.init": "Weights to start from",
    "model.start_from": "Train on from a run",
    "model.dtype": "Precision",
    "data.source": "Data set",
    "data.columns.messages": "Column of the turns",
    "data.columns.prompt": "Column of the prompt",
    "data.columns.completion": "Column of the completion",
    "data.columns.input": "Column added to the prompt",
    "data.columns.history": "Column of the earlier turns",
    "data.columns.chosen": "Column of the chosen answer",
    "data.columns.rejected": "Column of the rejected answer",
    "data.columns.system": "Column of the system message",
    "data.columns.tools": "Column of the tools",
    "data.columns.text": "Column of the text",
    "data.max_seq_len": "Sequence length (tokens)",
    "data.train_on": "Tokens to train on",
    "data.lost_turns": "Turns that the template leaves out",
    "data.typed_tokens": "Special tokens in turns",
    "data.add_tokens": "Tokens to add (one a line)",
    "data.eval_fraction": "Held-out share",
}
