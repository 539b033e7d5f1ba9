"""Changes to label smoothing, to the noise on embeddings and to the balance of experts."""

from __future__ import annotations

from tests.support.changes.record import Change

NOISE = "engine/runtime/step/neftune.py"
TESTS = "tests/engine/runtime/test_regularization.py"
BALANCE = "engine/runtime/step/router_aux_loss.py"
BALANCED = "tests/engine/runtime/test_router_balance.py"
RUNS = "tests/engine/training/loop/test_regularized_runs.py"

REGULARIZED = (
    Change(
        "smoothing-left-out",
        "engine/runtime/step/compute_ops.py",
        "scale, smoothing = inputs.loss_scale, inputs.label_smoothing",
        "scale, smoothing = inputs.loss_scale, 0.0",
        "The loss of a step is a plain cross-entropy whatever the settings say.",
        (TESTS,),
    ),
    Change(
        "smoothing-not-told-to-other-ranks",
        "engine/runtime/distributed/worker.py",
        "            message.regularization,\n",
        "",
        "Workers compute their rows without smoothing and noise.",
        (RUNS,),
    ),
    Change(
        "noise-by-the-place-in-the-micro-batch",
        "engine/data/batches/rows.py",
        "np.array(range(count) if places is None else places, dtype=np.int64)",
        "np.array(range(count), dtype=np.int64)",
        "A row has other noise in another micro-batch.",
        (TESTS,),
    ),
    Change(
        "noise-of-padded-lengths",
        "engine/data/batches/rows.py",
        "lengths=np.array([len(part.input_ids) for part in parts], dtype=np.int64)",
        "lengths=np.array([length for part in parts], dtype=np.int64)",
        "The strength of the noise depends on the padding of the micro-batch.",
        (TESTS,),
    ),
    Change(
        "noise-alike-in-every-step",
        NOISE,
        'struct.pack("<qqq", self.seed, self.step, place)',
        'struct.pack("<qqq", self.seed, 0, place)',
        "Every step has the same noise.",
        (TESTS,),
    ),
    Change(
        "noise-alike-for-every-token",
        NOISE,
        "second = _hashed(places ^ self._keys[:, 1:])",
        "second = _hashed((places ^ places) ^ self._keys[:, 1:])",
        "One of the two random words of a token is that of its row.",
        (TESTS,),
    ),
    Change(
        "noise-that-is-not-centered",
        NOISE,
        ".float().add_(0.5).mul_(2.0**-23)",
        ".float().mul_(2.0**-23)",
        "The mean of the noise is half of its finest step below 0.",
        (TESTS,),
    ),
    Change(
        "experts-balanced-by-one-layer",
        BALANCE,
        "return tokens.counted.sum(1) / self.rows_of(tokens)",
        "return tokens.counted[:, -1] * len(self._layers) / self.rows_of(tokens)",
        "The choices of the last layer alone balance the experts of all layers.",
        (BALANCED,),
    ),
    Change(
        "padding-balanced",
        BALANCE,
        "        if batch.lengths is not None:\n            places = torch",
        "        if batch.lengths is None:\n            places = torch",
        "The padding of rows counts in the loss that balances experts.",
        (BALANCED,),
    ),
    Change(
        "balance-of-every-micro-batch-whole",
        BALANCE,
        "batch.loss_weight * loss_scale, counted",
        "1.0, counted",
        "The loss that balances experts is added up over micro-batches.",
        (BALANCED,),
    ),
)
