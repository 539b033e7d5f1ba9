"""A run is executed in this room, from its folder to the last line of its record.

It may import the rooms before it in `engine`, up to `memory`.
"""
