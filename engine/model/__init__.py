"""A Hugging Face model: found, fetched, split into units, tried, captured; and as a shape that the
planner sees.

It may import the rooms before it in `engine`, up to `data`.
"""
