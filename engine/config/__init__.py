"""Every setting: its default, its checks, how it is read and written. No torch.

It may import the rooms before it in `engine`, up to `plan`.
"""
