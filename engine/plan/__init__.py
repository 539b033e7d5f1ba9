"""A training step as plain data: ops, the builder that derives their waits, the validator, the
simulator. No torch.

It may import the rooms before it in `engine`, up to `helper_process`; it needs none of them.
"""
