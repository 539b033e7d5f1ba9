"""What passes between the blocks of a model, and parts of blocks that run in sequence chunks."""
