"""What passes between the embedding, the blocks and the head: a hidden state, and in some families
more than that.
"""
