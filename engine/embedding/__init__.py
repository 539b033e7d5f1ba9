"""What a step does to the vectors that a model looks up: noise on them, and their gradients row by
row.

It may import the rooms before it in `engine`, up to `exchange`.
"""
