"""A training step as plain data: ops, the builder that derives their waits, the validator, the simulator. No torch.

It imports `errors`, `paths`, `words`, `files` and `helper_process` at most.
"""
