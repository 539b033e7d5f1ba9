"""These modules define every setting with its default and its checks, and read and write settings.
No torch is imported.

The room may import the rooms before it in `engine`, up to `plan`.
"""
