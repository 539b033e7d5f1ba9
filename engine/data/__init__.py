"""Examples become rows of tokens: chat templates, loss masks, packing, and an order that a resumed
run can continue. No torch is imported.

The rooms before it are `sources` (data sets as rows) and `examples` (rows as conversations, pairs
and texts). All code that affects the tokens of a data set is in these three: when one of their
files changes, cached tokens are made again.
"""
