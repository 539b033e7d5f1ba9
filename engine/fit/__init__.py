"""These files choose the plan of a job, tell what that takes of memory and time and whether it
fits, and find what would help.

They load no torch, unless somebody asks for the shape of a model that nobody has built here before
(`engine.model.find_shape`).

The room may import the rooms before it in `engine`, up to `runs`.
"""
