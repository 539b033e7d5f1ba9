"""The states of a model in host memory: planes in RAM, on disk, across processes."""
