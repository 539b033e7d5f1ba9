"""The held-out loss, computed by transformers alone."""

from __future__ import annotations

import torch


def plain_loss(model: torch.nn.Module, rows) -> tuple[float, int]:
    """Returns the mean cross-entropy over the trained tokens of `rows`, and their number. Each
    document goes through the model alone.
    """
    total, count = 0.0, 0
    for start, end in zip(rows.starts[:-1].tolist(), rows.starts[1:].tolist()):
        ids = torch.from_numpy(rows.ids[start:end].astype("int64"))
        trained = torch.from_numpy(rows.loss_mask[start:end].copy())[1:]
        with torch.no_grad():
            scores = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
        total -= float(scores.gather(1, ids[1:, None])[:, 0][trained].sum())
        count += int(trained.sum())
    return total / count, count
