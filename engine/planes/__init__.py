"""The room says where each parameter of a unit is in the unit's planes, and how many bytes the
planes take. It is pure arithmetic: no torch and no numpy.

The room may import the rooms before it in `engine`, up to `config`.
"""
