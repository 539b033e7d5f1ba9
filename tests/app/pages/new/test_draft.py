"""The form is filled from a run through its route, and each tab has a draft of its own."""

from __future__ import annotations

import json

import pytest

from app.form.settings_form import read_config, shown_values
from app.pages.new.checker import Checker
from app.pages.new.draft import MOST, NO_TAB, Drafts
from app.pages.new.draft_routes import draft_routes
from app.pages.new.form_routes import form_routes
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.runs.record.run_folder import create_run
from tests.support.routes import send

CONFIG = TrainConfig.from_dict(
    {
        "name": "Fake",
        "model": {"source": "/models/m"},
        "train": {"steps": 7, "batch_size": 4},
        "data": {"source": [{"source": "a", "weight": 2}, {"source": "b"}]},
    }
)
OTHER = CONFIG.with_values({"name": "Other", "train.steps": 8})


@pytest.fixture
def session(tmp_path):
    return Session(tmp_path / "runs")


@pytest.fixture
def folder(session):
    return create_run(session.runs_dir, CONFIG)


def post(session, run_id, body):
    return send(draft_routes(session, Checker(session)), "POST", f"/api/runs/{run_id}/draft", body)


def kept(session, *tabs):
    """Returns the draft as a server that is started later finds it."""
    return Drafts(session.runs_dir).recall(*tabs)


@pytest.mark.parametrize(
    "changes", [{}, {"train.batch_size": 8, "engine.rounds": 1}, {"train.max_grad_norm": None}]
)
def test_the_form_becomes_the_runs_settings_with_the_changes(session, folder, changes):
    answer = post(session, folder.id, {"changes": changes})
    assert (answer.status_code, answer.json()) == (200, {})
    preset, shown = kept(session)
    assert preset is None and read_config(shown) == CONFIG.with_values(changes)
    assert session.active_id is None and len(session.runs()) <= 1


def test_changes_may_be_left_out(session, folder):
    assert post(session, folder.id, {}).status_code == 200
    assert read_config(kept(session)[1]) == CONFIG


@pytest.mark.parametrize(
    "changes, text",
    [
        ({"train.batch_size": 0}, "train.batch_size: 0 is too small"),
        ({"train.bach_size": 8}, "did you mean batch_size"),
        ({"": 1}, "no such setting"),
        ({"model": 3}, "expected a mapping"),
        ([1], "is not an object"),
        ({"train.micro_batch_size": 3}, "does not divide"),
    ],
)
def test_a_change_that_is_none_is_refused_in_a_sentence(session, folder, changes, text):
    answer = post(session, folder.id, {"changes": changes})
    assert answer.status_code == 409 and text in answer.json()["error"]
    assert kept(session) is None


def test_runs_that_do_not_load_are_refused(session, folder):
    (folder.path / "config.yaml").write_text("train: {batch_size: none}", encoding="utf-8")
    answer = post(session, folder.id, {"changes": {}})
    assert answer.status_code == 409
    assert "The settings of this run cannot be used" in answer.json()["error"]
    assert post(session, "20200101-000000-nothing", {"changes": {}}).status_code == 409
    assert post(session, "..", {"changes": {}}).status_code in (404, 409)
    assert kept(session) is None


def test_the_form_of_one_tab_becomes_the_runs_settings(session, folder):
    Drafts(session.runs_dir).remember("other", "starter.yaml", shown_values(OTHER))
    assert post(session, folder.id, {"tab": "mine"}).status_code == 200
    assert read_config(kept(session, "mine")[1]) == CONFIG
    assert kept(session, "other") == ("starter.yaml", shown_values(OTHER))
    for wrong in ("../x", "a b", "a" * 41, "A"):
        assert post(session, folder.id, {"tab": wrong}).status_code == 409


def test_a_tab_begins_with_a_copy_and_keeps_it(session):
    drafts = Drafts(session.runs_dir)
    assert drafts.recall("first") is None
    drafts.remember("first", None, shown_values(CONFIG))
    drafts.remember("second", None, shown_values(OTHER))
    assert drafts.recall("new") == (None, shown_values(OTHER)), "a copy of the last one"
    assert drafts.recall("duplicate", "first") == (None, shown_values(CONFIG))
    drafts.remember("first", "starter.yaml", shown_values(OTHER))
    assert kept(session, "duplicate") == (None, shown_values(CONFIG))
    assert kept(session, "first") == ("starter.yaml", shown_values(OTHER))
    for _ in range(2):  # what is of no tab is for the next one, also if it is the same again
        drafts.remember(NO_TAB, None, shown_values(CONFIG))
        assert drafts.recall() == (None, shown_values(CONFIG))
        drafts.remember("second", None, shown_values(OTHER))
        drafts.remember("second", "starter.yaml", shown_values(OTHER))
        assert drafts.recall() == ("starter.yaml", shown_values(OTHER))


def test_who_continues_a_run_keeps_the_own_draft(session):
    drafts, own = Drafts(session.runs_dir), shown_values(OTHER)
    continuing = shown_values(CONFIG.with_values({"model.start_from": "runs/one"}))
    drafts.remember("mine", "starter.yaml", own)
    for _ in range(2):
        drafts.remember_continuing("mine", continuing)
    changed = continuing | {"train.steps": "9"}
    drafts.remember("mine", None, changed)
    assert kept(session, "mine") == (None, changed)
    assert kept(session, "new") == ("starter.yaml", own), "another tab continues nothing"
    again = Drafts(session.runs_dir)
    assert again.is_continuing("mine") and again.own("mine") == ("starter.yaml", own)
    again.remember("mine", None, changed | {"model.start_from": ""})
    assert not again.is_continuing("mine"), "it starts from its model, and is the own draft"
    again.remember_continuing("fresh", continuing)
    assert again.recall("fresh") == (None, continuing) and again.own("fresh") is None


def test_the_own_draft_is_had_again_by_its_route(session):
    checker = Checker(session)
    routes = draft_routes(session, checker)

    def own():
        return send(routes, "POST", "/api/draft/own", {"tab": "mine"}).json()["draft"]

    checker.drafts.remember("mine", None, shown_values(OTHER))
    assert own() is None
    checker.drafts.remember_continuing("mine", shown_values(CONFIG))
    assert own() == {"preset": None, "about": "", "shown": shown_values(OTHER)}
    checker.drafts.remember_continuing("fresh", shown_values(CONFIG))
    first = send(routes, "POST", "/api/draft/own", {"tab": "fresh"}).json()["draft"]
    assert first["preset"] == "starter.yaml" and first["about"]


def test_the_drafts_that_were_changed_last_are_kept(session):
    drafts, values = Drafts(session.runs_dir), shown_values(CONFIG)
    for number in range(MOST + 3):
        drafts.remember(f"tab-{number}", None, values | {"name": f"Run {number}"})
    (file,) = session.runs_dir.iterdir()
    assert list(json.loads(file.read_text())["drafts"]) == [
        f"tab-{number}" for number in range(3, MOST + 3)
    ]


def test_a_page_gets_its_form_and_the_fit_of_it_at_once(session, monkeypatch):
    checker = Checker(session)
    fits = {"can_start": True}
    monkeypatch.setattr(checker, "fit_panel", lambda shown, timed, preset: fits)
    routes, starter = form_routes(checker), checker.presets.get("starter.yaml")

    def opening(**tabs):
        return send(routes, "POST", "/api/opening", tabs)

    laid_out = opening(tab="a").json()
    assert laid_out["shown"] == shown_values(starter.config) and not laid_out["fills"]
    assert laid_out["preset"] == "starter.yaml" == laid_out["choices"][0][1]
    draft = shown_values(starter.config.with_values({"train.batch_size": 16}))
    asked = {"tab": "b", "preset": "starter.yaml", "shown": draft}
    checked = send(routes, "POST", "/api/check", asked).json()
    mine = opening(tab="c", other="b").json()
    assert mine["fills"] and mine["about"] == starter.about
    assert (mine["preset"], mine["shown"], mine["check"]) == ("starter.yaml", draft, checked)
    checker.drafts.remember("d", None, draft)
    of_run = opening(tab="d").json()
    assert of_run["preset"] is None and of_run["about"] == "", "these settings are a run's"
    monkeypatch.setattr("app.pages.new.form_routes.CHECK_SECONDS", 0.0)
    assert "check" not in opening(tab="b").json(), "the form does not wait for a long check"
    assert opening(tab="../x").status_code == 409
