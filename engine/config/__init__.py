"""Every setting has its default and its checks here, and is read and written here. No torch is
imported.

The room may import the rooms before it in `engine`, up to `plan`.
"""
