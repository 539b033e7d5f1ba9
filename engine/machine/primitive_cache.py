"""A bound on the kernels that oneDNN keeps. On the CPU, torch multiplies matrices in bf16 with
oneDNN, which makes a kernel for each shape and keeps the latest 1,024 of them. A batch with another
length has other shapes, so memory would grow by some 8 MiB for each new length. No torch.
"""

from __future__ import annotations

import os

KEPT_KERNELS = 32
"""Number of kernels that are kept. A block has some twenty products of different shapes, in forward
and backward together. All blocks share their kernels, so these are enough to make each kernel once
for a micro-batch.
"""
KERNEL_BYTES = 640 << 10
"""Bytes of RAM of a kernel (measured with AVX-512: 590 KiB)."""
KEPT_BYTES = 2 * KEPT_KERNELS * KERNEL_BYTES
"""Bytes of both caches together where they are full."""
_OF_ONEDNN = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "DNNL_PRIMITIVE_CACHE_CAPACITY")
_OF_TORCH = ("LRU_CACHE_CAPACITY",)
"""Setting for torch's own cache above oneDNN's."""


def bound_kept_kernels() -> None:
    """Sets the environment variables that bound both caches. They are read when the first product
    is computed. Values that the user has set are kept.
    """
    for names in (_OF_ONEDNN, _OF_TORCH):
        if not any(name in os.environ for name in names):
            os.environ.setdefault(names[0], str(KEPT_KERNELS))
