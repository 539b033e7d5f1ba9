"""A hidden state passes between the embedding, the blocks and the head, and in some families more
than that.
"""
