"""What an export leaves that ends early."""

from __future__ import annotations

import pytest

from engine.checkpoints.export import export_run


class Enough(Exception):
    pass


def test_an_export_that_is_given_up_leaves_nothing(tmp_path, runs, stopped_run):
    """It is given up when the weights are written, at the last word of its progress."""
    before = sorted(tmp_path.rglob("*"))

    def give_up(done: int, total: int, what: str = "") -> None:
        if what == "Writing the model" and done == total:
            assert any(path.name == ".home.partial" for path in tmp_path.iterdir())
            raise Enough

    with pytest.raises(Enough):
        export_run(runs, stopped_run.id, tmp_path / "home", progress=give_up)
    assert sorted(tmp_path.rglob("*")) == before
