"""A person can talk to the weights of a checkpoint, an export, a paused run or a base model.

It may import the rooms before it in `engine`, up to `train`.
"""
