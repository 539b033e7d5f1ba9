"""Data that is prepared through the cache of tokens, and how two of it are compared."""

from __future__ import annotations

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from tests.support.rows import write_rows


def write(path, count=40, word="hello", start=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": f"q{i} {word}" + " he" * (i % 7), "completion": f"a{i}" if i % 9 else ""}
        for i in range(start, start + count)
    ]
    return write_rows(path, rows)


def prepared(source, tokenizer, seed=1, **changes):
    settings = {
        "source": str(source) if not isinstance(source, tuple) else source,
        "max_seq_len": 128,
        "eval_fraction": 0.1,
        **changes,
    }
    return prepare_data(DataConfig(**settings), tokenizer, seed)


def kept(folder) -> list[str]:
    return sorted(path.name for path in (folder / "tokens").iterdir())


def assert_same(one, two):
    assert one.fingerprint == two.fingerprint and one.highest_id == two.highest_id
    assert one.summary | {"cached": None} == two.summary | {"cached": None}
    assert one.eval_prompts(99) == two.eval_prompts(99)
    for ours, theirs in ((one.train, two.train), (one.eval, two.eval)):
        for name in ("ids", "loss_mask", "starts"):
            assert getattr(ours, name)[:].tolist() == getattr(theirs, name)[:].tolist()
        assert ours.rows.documents.tolist() == theirs.rows.documents.tolist()
        assert ours.row_lengths.tolist() == theirs.row_lengths.tolist()
        assert ours.loss_tokens == theirs.loss_tokens
