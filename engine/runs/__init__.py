"""Run folders, and what is recorded in them: events, their one writer, their readers, the snapshot
that they add up to. No torch.

It may import the rooms before it in `engine`, up to `model`.
"""
