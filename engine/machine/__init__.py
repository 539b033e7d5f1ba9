"""A machine has memory, GPUs and limits, and works at some speed. This room reads the machine that
it runs on, and knows others. It does without torch.

It may import the rooms before it in `engine`, up to `config`.
"""
