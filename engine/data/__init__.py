"""A user's rows become micro-batches of tokens. No torch.

All code that affects the tokens of a data set is here and in `engine.config`: when one of their
files changes, cached tokens are made again.
"""
