"""The weights that a run starts from, streamed from files into planes."""
