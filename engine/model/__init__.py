"""A Hugging Face model is found here, fetched, split into units, tried and captured. It is also
measured, as the shape that the planner sees.

It may import the rooms before it in `engine`, up to `data`.
"""
