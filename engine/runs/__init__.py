"""A run's folder and its record are handled in this room: the events, their only writer, their
readers, and the snapshot built from them. The room does not import torch.

It may import the rooms before it in `engine`, up to `model`.
"""
