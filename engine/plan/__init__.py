"""A training step is plain data here: its ops, the builder that derives their waits, the validator
and the simulator. No file here imports torch.

The room may import the rooms before it in `engine`, up to `helper_process`; it needs none of them.
"""
