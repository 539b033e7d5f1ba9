"""A run folder from a stranger: its links are not followed when it is resumed, and its checkpoints
are used whole or not at all.
"""

from __future__ import annotations

import shutil

import pytest

from engine.config.export_choice import ExportChoice
from engine.errors import CheckpointError, RamstreamError
from engine.tools.chat.chat_engines import load
from engine.tools.chat.conversation import checkpoint_of
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from tests.support.forged import THOUGHT_OF, body_of, forge, thought_of
from tests.support.trained_runs import execute, resumed_to_the_end


@pytest.mark.parametrize("name", ["checkpoints", "best", "export"])
def test_a_resume_is_refused_where_a_folder_of_weights_is_a_link(stopped_run, tmp_path, name):
    place = stopped_run.folder.path / name
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step-3").mkdir(parents=True)
    (elsewhere / "step-3" / "mine").write_text("mine")
    if place.exists():
        place.rename(tmp_path / "moved")
    place.symlink_to(elsewhere)
    record = stopped_run.folder.events_path.read_bytes()
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*elsewhere, and a run .* put"):
        resume_run(stopped_run.folder.path.parent, stopped_run.folder.id)
    assert (elsewhere / "step-3" / "mine").read_text() == "mine"
    assert stopped_run.folder.events_path.read_bytes() == record


def test_a_runs_folder_on_another_disk_is_resumed_and_exported(stopped_run, tmp_path):
    runs = stopped_run.folder.path.parent
    runs.rename(tmp_path / "bigger disk")
    runs.symlink_to(tmp_path / "bigger disk")
    again = resumed_to_the_end(stopped_run)
    export_run(runs, again.folder.id, runs / "out", ExportChoice(weights="best"))
    assert (tmp_path / "bigger disk" / "out" / "config.json").is_file()


FORGED = [change.__name__.strip("_").replace("_", " ") for change in THOUGHT_OF]


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_checkpoint_is_refused_in_a_sentence_in_every_use(stopped_run, tmp_path, name):
    folder, runs = stopped_run.folder, stopped_run.folder.path.parent
    newest = max(folder.checkpoints_path.iterdir(), key=lambda path: int(path.name[5:]))
    for other in folder.checkpoints_path.iterdir():
        if other != newest:
            shutil.rmtree(other)
    shutil.rmtree(folder.best_path, ignore_errors=True)  # these would be taken instead
    before = body_of(newest)
    forge(newest, dict(thought_of(before))[name])
    found = []
    uses = {
        "export": lambda: export_run(runs, folder.id, tmp_path / "out"),
        "step": lambda: export_run(
            runs, folder.id, tmp_path / "out", ExportChoice(checkpoint=before["step"])
        ),
        "chat": lambda: load(checkpoint_of(runs, folder.id, folder.config, None, "r")).close(),
        "train on": lambda: ended(start_run(trained_on(folder), tmp_path / "more")),
        "resume": lambda: ended(resume_run(runs, folder.id)),
    }
    for use, call in uses.items():
        try:
            call()
        except RamstreamError as error:
            found.append(str(error))
        else:
            pytest.fail(f"{use} succeeds")
    assert all("\n" not in each and "checkpoint" in each.lower() for each in found), found
    assert not (tmp_path / "out").exists()


def trained_on(folder):
    return folder.config.with_values({"model.start_from": str(folder.path), "name": "more"})


def ended(run) -> None:
    """Raises the sentence with which a run has failed."""
    result = execute(run)
    if result.state == "failed":
        assert result.error_type in ("CheckpointError", "ModelError", "OtherCheckpointFormat"), (
            result
        )
        raise RamstreamError(result.reason)
