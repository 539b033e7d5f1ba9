"""A new run can train on from the weights of an earlier one: the Runs tab offers it, its route
fills the form, and the details have the command.
"""

from __future__ import annotations

import os
import shlex
import shutil

import pytest

from app.form.settings_form import read_config
from app.pages.new.checker import Checker
from app.pages.new.draft import Drafts, continues_from
from app.pages.new.draft_routes import draft_routes
from app.session.session import Session
from engine.runs.record.run_folder import open_run
from engine.training.loop.run import start_run
from tests.support.folders import make_config
from tests.support.routes import send
from tests.support.sessions import CONFIG, finished_run, get
from tests.support.synthetic_run import run_events
from tests.support.trained_runs import execute


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "runs")


def saved_run(session, step=7, **values):
    """Returns the folder of a run that is over and has a checkpoint of `step`."""
    folder = finished_run(session, **values)
    checkpoint = folder.checkpoints_path / f"step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    return folder


def train_on(session, run_id, **body):
    routes = draft_routes(session, Checker(session))
    return send(routes, "POST", f"/api/runs/{run_id}/draft", {"trains_on": True} | body)


def kept(session):
    """Returns the draft as a server that is started later finds it."""
    return Drafts(session.runs_dir).recall()


def row_of(session, run_id):
    session._list.forget()
    (row,) = [row for row in get(session, "/api/runs").json()["runs"] if row["id"] == run_id]
    return row


def commands_of(session, run_id):
    found = get(session, f"/api/runs/{run_id}/details").json()["commands"]
    return [shlex.split(command["text"])[3:] for command in found]


@pytest.mark.parametrize("changes", [{}, {"train.steps": 3}])
def test_the_form_starts_a_new_run_from_the_weights(session, changes):
    folder = saved_run(session, name="Before")
    assert "train-on" in row_of(session, folder.id)["actions"]
    answer = train_on(session, folder.id, changes=changes)
    assert (answer.status_code, answer.json()) == (200, {})
    preset, shown = kept(session)
    expected = {"name": "Before", "model.start_from": str(folder.path.resolve())} | changes
    assert continues_from(shown) == "Before"
    newest = {"model.start_from": f"{folder.path}/checkpoints/step-7"}
    assert continues_from(newest) == "Before" and continues_from({"model.start_from": ""}) == ""
    assert continues_from({"model.start_from": "no\0path"}) == "no\0path"
    assert preset is None and read_config(shown) == CONFIG.with_values(expected)
    assert ["--from", folder.id, "--runs-dir", str(session.runs_dir)] in commands_of(
        session, folder.id
    )


def test_a_run_that_kept_weights_alone_is_trained_on_from_and_not_resumed(session):
    folder = saved_run(session, events=run_events(20, total=60, ended=None))
    manifest = folder.checkpoints_path / "step-7" / "manifest.json"
    manifest.write_text('{"checksum": "0", "format": 2, "step": 7, "holds": "weights"}')
    row = row_of(session, folder.id)
    assert {"train-on", "export", "chat"} < set(row["actions"]) and "resume" not in row["actions"]
    offered = [arguments[0] for arguments in commands_of(session, folder.id)]
    assert "--from" in offered and "--resume" not in offered
    manifest.write_text('{"checksum": "0", "format": 2, "step": 7, "holds": "full"}')
    os.utime(folder.checkpoints_path)  # as a new checkpoint leaves it
    assert {"train-on", "resume"} < set(row_of(session, folder.id)["actions"])
    assert "--resume" in [arguments[0] for arguments in commands_of(session, folder.id)]


def test_a_run_that_has_its_best_weights_alone_is_chatted_with_exported_and_trained_on_from(
    session,
):
    """It writes no checkpoints (`output.checkpoint: none`), so only Start again is offered of what
    a resume could do. Best weights without a whole folder are none.
    """
    folder = finished_run(session, events=run_events(20, total=60, ended=None))
    partial = folder.best_path / ".step-10.partial"
    partial.mkdir(parents=True)
    row = row_of(session, folder.id)
    assert not {"train-on", "export", "chat"} & set(row["actions"]) and row["begins_anew"]
    refused = train_on(session, folder.id)
    assert refused.status_code == 409 and "has saved no weights" in refused.json()["error"]
    partial.rename(folder.best_path / "step-10")
    row = row_of(session, folder.id)
    assert {"train-on", "export", "chat"} < set(row["actions"]) and row["begins_anew"]
    details = get(session, f"/api/runs/{folder.id}/details").json()
    assert details["export"]["can_export"]
    assert details["export"]["caption"].startswith("Exports the best model, step 10")
    assert "--from" in [arguments[0] for arguments in commands_of(session, folder.id)]
    assert train_on(session, folder.id).status_code == 200
    assert read_config(kept(session)[1]).model.start_from == str(folder.path.resolve())


def test_only_trains_on_starts_from_the_weights(session):
    folder = saved_run(session)
    for trains_on in (False, None, 1, "true"):
        assert train_on(session, folder.id, trains_on=trains_on).status_code == 200
        assert read_config(kept(session)[1]).model.start_from is None


def test_what_is_trained_on_from_a_run_that_was_trained_on_starts_from_the_newer(session):
    folder = saved_run(session, **{"model.start_from": "/an/older/run"})
    assert train_on(session, folder.id).status_code == 200
    assert read_config(kept(session)[1]).model.start_from == str(folder.path.resolve())


def refused(session, run_id) -> str:
    answer = train_on(session, run_id)
    assert answer.status_code == 409 and kept(session) is None
    return answer.json()["error"]


@pytest.mark.parametrize("ended", ["finished", "failed"])
def test_a_run_without_a_checkpoint_is_refused(session, ended):
    folder = finished_run(session, run_events(5, total=10, ended=ended))
    # An exported model can be chatted with, but its folder has no checkpoint.
    (folder.path / "export").mkdir()
    (folder.path / "export" / "config.json").write_text("{}")
    actions = row_of(session, folder.id)["actions"]
    assert "chat" in actions and "train-on" not in actions
    assert refused(session, folder.id).startswith("Fake has saved no weights")
    assert not [line for line in commands_of(session, folder.id) if "--from" in line]


def test_a_run_that_trains_now_is_refused_until_it_ends(session):
    folder = saved_run(session, events=run_events(20, total=60, ended=None))
    with folder.lock():
        assert "train-on" not in row_of(session, folder.id)["actions"]
        assert refused(session, folder.id).startswith("Fake is still training")
    # A killed process leaves such a run, which can be trained on from as well as resumed.
    assert {"train-on", "resume"} <= set(row_of(session, folder.id)["actions"])
    assert train_on(session, folder.id).status_code == 200


def test_a_deleted_run_is_refused(session):
    folder = saved_run(session)
    shutil.rmtree(folder.path)
    assert "does not exist" in refused(session, folder.id)


def test_a_run_that_is_deleted_after_the_form_was_filled_is_told_when_the_new_run_starts(
    tmp_path, session
):
    values = {"train.steps": 2, "output.eval_every": 0}
    first = start_run(make_config(tmp_path, **values), session.runs_dir)
    assert execute(first).state == "finished"
    assert train_on(session, first.id).status_code == 200
    config = read_config(kept(session)[1])
    second = start_run(config, session.runs_dir)
    assert execute(second).state == "finished"
    shutil.rmtree(first.folder.path)
    # Within the same second, a run of the same name would take the folder's place.
    named = config.with_values({"name": "Third"})
    ended = execute(start_run(named, session.runs_dir))
    assert (ended.state, ended.error_type) == ("failed", "ModelError")
    assert f"the folder {first.folder.path} does not exist" in ended.reason
    assert open_run(session.runs_dir, second.id).config.model.start_from is not None
