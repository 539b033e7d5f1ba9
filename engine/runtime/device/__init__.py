"""Devices, streams, compiled functions and CUDA graphs."""
