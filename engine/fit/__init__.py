"""The room chooses the plan of a job, predicts its memory and time, judges whether it fits, and
finds settings that would make it fit.

It does not load torch, except to find the shape of a model that was never built on this machine
(`engine.model.find_shape`).

The room may import the rooms before it in `engine`, up to `runs`.
"""
