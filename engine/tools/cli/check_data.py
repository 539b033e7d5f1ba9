"""The first rows of the data, which `launch.py check` also reads: a job that fits, but has nothing
to train on, is no job.
"""

from __future__ import annotations

from engine.config.settings import TrainConfig
from engine.data.batches.preview import check_first_rows, preview
from engine.errors import DataError
from engine.model.build.added_tokens import add_tokens
from engine.model.hub.hub import is_fetched
from engine.paths import resolve_source


def checked_data(config: TrainConfig) -> str:
    """Reads the first rows of data on this machine, and returns a sentence on what was found.

    It returns an empty text for data sets of the hub, which are read when a run starts. Raises
    DataError for data that a run would refuse, and ModelError if the tokenizer cannot be read.
    """
    parts = [part.only_source for part, _ in config.data.parts()]
    check_first_rows(config.read_data)
    if any(resolve_source(source) is None for source in parts):
        return ""
    model = config.model.source
    if resolve_source(model) is None and not is_fetched(model):
        return (
            "Data: the first rows can be read; how much of them is trained is known once the "
            f"tokenizer of {model} is on this machine."
        )
    # transformers brings torch, which a check of a model alone need not load.
    from engine.model.build.pretrained_files import load_tokenizer

    tokenizer = load_tokenizer(model)
    add_tokens(tokenizer, config.data.add_tokens)
    found = preview(config.read_data, tokenizer)
    problem = found.get("error") or found["untrainable"]
    if problem and not found.get("has_more"):
        raise DataError(problem)
    if problem:
        return f"Data: {problem} Later rows were not read."
    text = (
        f"Data: {found['percent_trained']} % of the tokens of the first {found['rows_measured']:,} "
        "rows are trained on."
    )
    if found["ends"]:
        text += f" An answer ends with {' or '.join(found['ends'])}."
    warning = found["endless"] and f"\nWarning: {found['endless']}"
    return f"{text} {found['text_rows']}".rstrip() + warning
