"""A tensor of any type is read as fp32, a chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch

_CHUNK = 4 << 20  # elements that are converted at once


def chunk_buffer() -> torch.Tensor:
    """Returns a buffer for the chunks of any tensor, shape [4 Mi]. It takes no memory before it is
    written to.
    """
    return torch.empty(_CHUNK, dtype=torch.float32)


def fp32_chunks(tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> Iterator[torch.Tensor]:
    """Yields a tensor's values in order, as flat fp32 chunks, shape [elements]. Where possible the
    only chunk is the tensor itself. Otherwise a part at a time is converted into one reused buffer,
    so a chunk is valid only until the next one is yielded.
    """
    is_plain = (
        tensor.dtype == torch.float32
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.data_ptr() % 4 == 0
    )
    if is_plain:
        yield tensor.view(-1)
        return
    if buffer is None:
        buffer = torch.empty(min(tensor.numel(), _CHUNK), dtype=torch.float32)
    if tensor.numel() <= _CHUNK:
        chunk = buffer[: tensor.numel()]
        chunk.view(tensor.shape).copy_(tensor)
        yield chunk
        return
    rows = _CHUNK * len(tensor) // tensor.numel()
    # A single row may already be too large; then each row is cut further.
    parts = tensor.split(rows) if rows else tensor
    for part in parts:
        yield from fp32_chunks(part, buffer)
