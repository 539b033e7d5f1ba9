"""The memory, GPUs, disks and rates of this computer, and of known machines. No torch."""
