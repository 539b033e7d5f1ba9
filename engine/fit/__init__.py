"""The room chooses the plan of a job, predicts its memory and time, judges whether it fits, and
finds settings that would make it fit.

It does not load torch: the shape of the model is given to it.

The room may import the rooms before it in `engine`, up to `runs`.
"""
