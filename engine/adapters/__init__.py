"""The room adds adapters (LoRA) to the linear layers of blocks, and says which layers get one.

The room may import the rooms before it in `engine`, up to `planes`.
"""
