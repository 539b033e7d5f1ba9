"""Data sets become rows of tokens: formats, chat templates, loss masks, packing, and an order that
a resumed run can continue. No torch is imported.

The room may import the rooms before it in `engine`, up to `machine`. All code that affects the
tokens of a data set is in this folder: when one of its files changes, cached tokens are made again.
"""
