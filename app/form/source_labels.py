"""Labels of the settings of the model and of the data."""

from __future__ import annotations

LABELS = {
    "model.source": "Model",
    "model.init": "Weights to start from",
    "model.start_from": "Train on from a run",
    "model.dtype": "Precision",
    "model.rope_scaling": "Longer rows: rotary embeddings",
    "model.rope_factor": "Longer rows: by this factor",
    "data.source": "Data set",
    "data.columns.messages": "Column of the turns",
    "data.columns.prompt": "Column of the prompt",
    "data.columns.completion": "Column of the answer",
    "data.columns.input": "Column added to the prompt",
    "data.columns.history": "Column of the earlier turns",
    "data.columns.chosen": "Column of the chosen answer",
    "data.columns.rejected": "Column of the rejected answer",
    "data.columns.system": "Column of the system message",
    "data.columns.tools": "Column of the tools",
    "data.columns.text": "Column of the text",
    "data.max_seq_len": "Sequence length (tokens)",
    "data.train_on": "Tokens to train on",
    "data.dropped_turns": "If the chat template drops a turn",
    "data.typed_tokens": "Special tokens in turns",
    "data.long_texts": "Texts longer than a row",
    "data.overlap": "Repeated tokens where a text goes on",
    "data.add_tokens": "Tokens to add (one a line)",
    "data.roles": "Roles with other names (one a line)",
    "data.unused_flags": "Keys that are no flags",
    "data.eval_fraction": "Validation share",
}

CHOICE_LABELS = {
    "model.init": {
        "pretrained": "the model's own weights",
        "random": "random weights (from scratch)",
    },
    "model.dtype": {"bfloat16": "bfloat16, fp32 masters", "float32": "float32"},
    "model.rope_scaling": {
        "none": "as they are",
        "linear": "linear: all positions are divided",
        "dynamic": "dynamic: for reading alone, after training",
        "yarn": "YaRN: slow frequencies are divided",
    },
    "data.train_on": {"assistant": "the answers only", "all": "every token"},
    "data.dropped_turns": {
        "turn_by_turn": "train each answer after its prompt",
        "refuse": "refuse such rows",
    },
    "data.long_texts": {"continue": "go on in more rows", "cut": "are cut", "skip": "are skipped"},
    "data.typed_tokens": {"text": "are text", "tokens": "are tokens, as a server reads them"},
}

SHORT_HELP = {
    "model.source": "A local folder or a Hugging Face id.",
    "model.dtype": "The number format of the math. bfloat16 is the usual choice on a GPU.",
    "data.source": "A file, a folder, or a data set on Hugging Face.",
    "data.max_seq_len": "Examples longer than this are cut; we tell you how many.",
    "model.rope_scaling": "For rows longer than those of the model, which must learn them.",
    "model.rope_factor": "Rows may be this many times as long.",
    "data.roles": "Such as customer=user, or critic=critic if the chat template has that role.",
    "data.unused_flags": "One a line: true and false there says nothing of training.",
    "data.add_tokens": "Each is one token in the data, such as <tool>; the embedding may grow.",
}
