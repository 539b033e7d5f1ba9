"""Tokens that a user adds (`data.add_tokens`), and the model and the tokenizer of a run with them.

`read_model` reads both. `shape_of_run` is the shape of that model for the planner.
"""
