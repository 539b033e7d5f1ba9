"""Data sets become rows of tokens: formats, chat templates, loss masks, packing, and an order in
which a resumed run can go on. There is no torch here.

The room may import the rooms before it in `engine`, up to `machine`. Everything that decides which
tokens a data set becomes is in this folder: cached tokens are made anew when a file of it changes.
"""
