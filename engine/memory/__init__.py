"""The memory of a run while it trains is watched in this room: how much it takes, what it is short
of, and what is said then.

It may import the rooms before it in `engine`, up to `checkpoints`.
"""
