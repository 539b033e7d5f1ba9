"""What an export leaves that ends early."""

from __future__ import annotations

import os

import pytest

from engine.errors import ModelError, RunError
from engine.training.export.export import export_run
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.trained_runs import execute


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


def test_a_link_to_a_private_file_gets_into_no_run_and_no_export(tmp_path, runs, stopped_run):
    """A chat template of a stranger's model was any file of this account."""
    (tmp_path / "id_rsa").write_text("-----BEGIN OPENSSH PRIVATE KEY-----")
    template = tmp_path / "model" / "chat_template.jinja"
    kept = template.rename(tmp_path / "kept")
    template.symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelError) as refused:
        export_run(runs, stopped_run.id, tmp_path / "home")
    assert f"{template} is a link to a file outside of the model's folder" in str(refused.value)
    assert not (tmp_path / "home").exists()
    ended = execute(start_run(make_config(tmp_path), tmp_path / "more"))
    assert (ended.state, ended.reason) == ("failed", str(refused.value))
    template.unlink()
    kept.rename(template)
    export_run(runs, stopped_run.id, tmp_path / "home")
