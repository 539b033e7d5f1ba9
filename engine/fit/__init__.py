"""Which plan a job gets, what that takes of memory and time, whether it fits, and what would help.

No torch, unless the shape of a model is asked for that nobody has built here before
(`engine.model.find_shape`).

It may import the rooms before it in `engine`, up to `runs`.
"""
