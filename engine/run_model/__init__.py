"""The model and the tokenizer of a run are those of its source, with what the settings change:
tokens that are added (`data.add_tokens`), and longer rows (`model.rope_scaling`).

`read_model` reads both. `shape_of_run` is the shape of that model for the planner.
"""
