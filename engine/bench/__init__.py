"""How fast this machine is, and how near the engine comes to it.

It may import the rooms before it in `engine`, up to `talk`.
"""
