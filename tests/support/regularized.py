"""Label smoothing and noise on embeddings in plain training: the loss is that of transformers, and
the noise is drawn by numpy, number by number as the documents say.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from transformers.trainer_pt_utils import LabelSmoother

from engine.config.regularization import NO_REGULARIZATION, Regularization
from tests.support.tiny import Batch


@dataclass(frozen=True)
class PlainStep:
    """What a step of plain training does to the loss and to the embeddings."""

    regularization: Regularization = NO_REGULARIZATION
    number: int = 0
    seed: int = 0

    def loss(self, logits: torch.Tensor, labels: torch.Tensor, total: int) -> torch.Tensor:
        """Returns the loss of a micro-batch, a share of that of the step, whose `total` tokens
        have a label: for float32 logits [n, vocabulary] and labels [n].
        """
        if not self.regularization.label_smoothing:
            return F.cross_entropy(logits, labels, reduction="sum") / total
        smoother = LabelSmoother(epsilon=self.regularization.label_smoothing)
        return smoother((logits,), labels, num_items_in_batch=total)

    @contextlib.contextmanager
    def noisy(self, model: torch.nn.Module, batch: Batch) -> Iterator[None]:
        """Gives a scope in which the model's embeddings have the noise of a micro-batch."""
        if not self.regularization.neftune_alpha:
            yield
            return

        def with_noise(_module, _inputs, vectors: torch.Tensor) -> torch.Tensor:
            noise = torch.from_numpy(self.noise(batch, vectors.shape[-1]))
            return vectors + noise.to(vectors.device, vectors.dtype)

        hook = model.get_input_embeddings().register_forward_hook(with_noise)
        try:
            yield
        finally:
            hook.remove()

    def noise(self, batch: Batch, width: int) -> np.ndarray:
        """Returns the noise of the rows of a micro-batch, float32 [rows, tokens, width]."""
        rows, tokens = batch.input_ids.shape
        found = np.zeros((rows, tokens, width), np.float32)
        for row in range(rows):
            content = struct.pack("<qqq", self.seed, self.number, int(batch.places[row]))
            key = hashlib.blake2b(content, digest_size=8).digest()
            low, high = np.frombuffer(key, np.uint32)
            places = np.arange(tokens, dtype=np.uint32)
            first = lowbias32(places + low)[:, None]
            second = lowbias32(places ^ high)[:, None]
            columns = np.arange(width, dtype=np.uint32) * np.uint32(0x9E3779B9)
            words = lowbias32(columns + first, second)
            signed = words.view(np.int32) >> 8
            numbers = (signed.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)
            alpha = self.regularization.neftune_alpha
            scale = np.float32(alpha / np.sqrt(batch.lengths[row]))
            found[row] = numbers * (scale * np.float32(1 / np.sqrt(width)))
        return found


PLAIN = PlainStep()


def regularized_loss(model: torch.nn.Module, batches: list[Batch], how: PlainStep) -> torch.Tensor:
    """Returns the loss of a step of plain training in float32."""
    total, loss = sum(batch.loss_tokens for batch in batches), torch.zeros(())
    for batch in batches:
        with how.noisy(model, batch):
            logits = model(input_ids=torch.from_numpy(batch.input_ids), use_cache=False).logits
        labels = torch.from_numpy(batch.labels).reshape(-1)
        loss = loss + how.loss(logits.float().view(-1, logits.shape[-1]), labels, total)
    return loss


def lowbias32(words: np.ndarray, middle: np.ndarray | None = None) -> np.ndarray:
    """The hash of Chris Wellons of uint32 words, with a word added in its middle."""
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x7FEB352D)
    if middle is not None:
        words = words + middle
    words = words ^ (words >> np.uint32(15))
    words = words * np.uint32(0x846CA68B)
    return words ^ (words >> np.uint32(16))
