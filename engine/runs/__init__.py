"""A run's folder and what is recorded in it belong to this room: events, their one writer, their
readers, and the snapshot that they add up to. No torch is imported.

It may import the rooms before it in `engine`, up to `model`.
"""
