"""What this machine can do is measured here, as fast as a step would do it: copies, products, host
AdamW.

The room may import the rooms before it in `engine`, up to `runtime`.
"""
