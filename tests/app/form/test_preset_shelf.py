"""A person's own presets: saved, listed, edited by hand, deleted."""

from __future__ import annotations

import os
from datetime import date

import pytest

from app.form.presets import OWN, PresetShelf
from engine.config.settings import TrainConfig
from engine.errors import RunError
from tests.support.stuck import never_stuck

TODAY = date(2026, 11, 5)


@pytest.fixture
def shelf(tmp_path):
    return PresetShelf(tmp_path / "runs")


@pytest.fixture
def config(shelf):
    return shelf.get("starter.yaml").config.with_values({"train.learning_rate": 1e-3})


def test_a_saved_preset_is_listed_last_and_fills_the_form_with_the_same_settings(shelf, config):
    saved = shelf.save("  My  own: try/1 ", config, TODAY)
    assert saved.file == OWN + "my-own-try-1.yaml" and saved.is_own
    assert saved.name == "My own: try/1" and saved.label == "My own: try/1 (yours)"
    assert saved.about == "Saved from the form on 2026-11-05."
    assert list(shelf.listed())[-1] == saved.file
    assert shelf.get(saved.file).config == config.with_values({"name": saved.name})
    # The file is a preset for the command line too.
    assert TrainConfig.load(shelf.own_folder / "my-own-try-1.yaml") == saved.config


@pytest.mark.parametrize("name", ["", "  ", "x" * 61, "Starter", "starter"])
def test_a_name_that_cannot_be_used_is_refused(shelf, config, name):
    with pytest.raises(RunError):
        shelf.save(name, config, TODAY)
    assert not shelf.own_folder.exists()


def test_a_preset_is_never_overwritten(shelf, config):
    shelf.save("Two words", config, TODAY)
    for name in ("two words", "Two words", "two: words"):
        with pytest.raises(RunError, match="choose another name"):
            shelf.save(name, config, TODAY)


def test_names_without_letters_and_paths_stay_in_the_folder(shelf, config):
    for name in ("../../etc/passwd", "数据", "..", ".hidden"):
        saved = shelf.save(name, config, TODAY)
        assert (shelf.own_folder / saved.file.removeprefix(OWN)).parent == shelf.own_folder
        assert saved.name == name
        shelf.remove(saved.file)


def test_only_own_presets_are_deleted(shelf, config):
    saved = shelf.save("Mine", config, TODAY)
    for file in ("starter.yaml", OWN + "none.yaml", "../mine.yaml"):
        with pytest.raises(RunError, match="none was deleted"):
            shelf.remove(file)
    shelf.remove(saved.file)
    assert shelf.get(saved.file) is None and shelf.get("starter.yaml") is not None


def test_an_own_preset_that_was_broken_by_hand_says_so(shelf, config):
    saved = shelf.save("Mine", config, TODAY)
    (shelf.own_folder / "mine.yaml").write_text("train: [", encoding="utf-8")
    broken = shelf.get(saved.file)
    assert broken.config is None
    assert "cannot be used" in broken.name
    assert broken.about


@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "dangling link", "large", "denied"])
def test_what_is_no_preset_keeps_no_other_from_the_list(shelf, config, tmp_path, kind):
    good = shelf.save("Mine", config, TODAY)
    path = shelf.own_folder / "odd.yaml"
    notes = tmp_path / "notes.yaml"
    notes.write_text("name: a secret\n")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "large":
        path.touch()
        os.truncate(path, 1 << 40)
    elif kind == "denied":
        path.write_bytes(b"\xff")
    else:
        path.symlink_to(notes if kind == "link" else tmp_path / "nowhere.yaml")
    with never_stuck():
        listed = shelf.listed()
    assert listed[good.file] == good
    odd = listed[OWN + "odd.yaml"]
    assert odd.config is None
    assert odd.name == "odd.yaml (cannot be used)"
    assert "odd.yaml" in odd.about
    with pytest.raises(RunError, match="There is a preset named Odd"):
        shelf.save("Odd", config, TODAY)
    if kind != "folder":
        shelf.remove(odd.file)
        assert not os.path.lexists(path)
    assert notes.read_text() == "name: a secret\n" and not (tmp_path / "nowhere.yaml").exists()
