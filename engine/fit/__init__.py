"""Which plan a job gets, what that takes of memory and time, whether it fits, and what would help. No torch.

It may import the rooms before it in `engine`, up to `runs`.
"""
