"""Data sets as rows of tokens: formats, chat templates, loss masks, packing and a resumable order.
No torch.

It may import the rooms before it in `engine`, up to `machine`. All that decides which tokens a data
set becomes is in this folder: cached tokens are made anew when a file of it changes.
"""
