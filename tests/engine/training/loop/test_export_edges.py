"""What an export leaves that ends early."""

from __future__ import annotations

import os

import pytest

from engine.errors import RunError
from engine.training.export.export import export_run


class Enough(Exception):
    pass


def test_an_export_that_is_given_up_leaves_nothing(tmp_path, runs, stopped_run):
    """It is given up when the weights are written, at the last word of its progress."""
    before = sorted(tmp_path.rglob("*"))

    def abort(done: int, total: int, what: str = "") -> None:
        if what == "Writing the model" and done == total:
            assert any(path.name == ".home.partial" for path in tmp_path.iterdir())
            raise Enough

    with pytest.raises(Enough):
        export_run(runs, stopped_run.id, tmp_path / "home", progress=abort)
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_left_of_an_export_is_not_followed(tmp_path, runs, stopped_run):
    """A link in place of the unfinished folder led all files of the model elsewhere."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("mine")
    (tmp_path / ".home.partial").symlink_to(elsewhere)
    export_run(runs, stopped_run.id, tmp_path / "home")
    assert (tmp_path / "home" / "config.json").is_file() and not (tmp_path / "home").is_symlink()
    assert [path.name for path in elsewhere.iterdir()] == ["config.json"]
    assert (elsewhere / "config.json").read_text() == "mine"


def test_a_folder_that_is_filled_meanwhile_is_kept(tmp_path, runs, stopped_run):
    home = tmp_path / "home"
    home.mkdir()

    def fill(done: int, total: int, what: str = "") -> None:
        (home / "mine").write_text("mine")

    with pytest.raises(RunError, match="cannot be written to .*home .Directory not empty"):
        export_run(runs, stopped_run.id, home, progress=fill)
    assert [path.name for path in home.iterdir()] == ["mine"]


def test_what_is_no_folder_is_kept_and_named(tmp_path, runs, stopped_run):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    for name in ("pipe", "loop"):
        with pytest.raises(RunError, match=f"{name} is not an empty folder"):
            export_run(runs, stopped_run.id, tmp_path / name)
        assert (tmp_path / name).lstat()
