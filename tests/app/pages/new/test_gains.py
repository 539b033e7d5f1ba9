"""Another process works out what more memory would save. It is ended when nobody waits."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import app.pages.new.gains
from app.form.settings_form import shown_values
from app.pages.new.checker import Checker
from app.pages.new.gains import Gains
from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures
from engine.model.build.shape_of_run import shape_of_run
from engine.planning.fit.memory_items import PartName
from engine.planning.fit.pool_times import gains
from engine.planning.fit.report import estimate
from engine.planning.shape.catalog import entry_of

SMALL = "Qwen/Qwen2.5-0.5B"
MACHINE = with_figures(named_machine("RTX 4090", 64), disk_gib=500)
SLEEPS = "import time; time.sleep(600)"


def job(source: str = SMALL) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": {"source": source},
            "data": {"source": "assets/starter.jsonl"},
            "train": {"steps": 5},
        }
    )


def test_the_process_finds_what_the_engine_finds():
    found = Gains().find(job(), MACHINE)
    assert found == gains(job(), MACHINE, entry_of(SMALL).shape("bfloat16"))
    assert set(found) == {PartName.GPU, PartName.HOST}


@pytest.mark.slow("it plans hundreds of jobs, for five seconds or more")
def test_a_model_that_cannot_be_read_has_no_gains():
    assert Gains().find(job("no/such-folder/here"), MACHINE) is None


def test_it_is_given_up_at_once(monkeypatch):
    monkeypatch.setattr(app.pages.new.gains, "_PROGRAM", SLEEPS)
    made = Gains()
    told = []
    worker = threading.Thread(target=lambda: told.append(made.find(job(), MACHINE)))
    worker.start()
    while worker.is_alive():  # until it is started, there is nothing to give up
        made.give_up()
        time.sleep(0.01)
    assert told == [None]


@pytest.fixture
def checker(tmp_path, monkeypatch):
    monkeypatch.setattr(app.pages.new.checker, "read_machine", lambda folder: MACHINE)
    engine = SimpleNamespace(
        estimate=lambda config, machine: estimate(config, machine, shape_of_run(config)),
        refuse_out_of_reach=lambda *_, **__: None,
    )
    session = SimpleNamespace(runs_dir=tmp_path, why_not_start=lambda: None, engine=engine)
    return Checker(session)


def shown(source: str = SMALL) -> dict:
    return shown_values(job(source))


def test_the_page_gets_sentences_and_the_same_ones_at_once(checker, monkeypatch):
    asked = []

    def find(_self, config, machine):
        asked.append(config)
        return {PartName.GPU: 0.001, PartName.HOST: 0.0}

    monkeypatch.setattr(Gains, "find", find)
    told = checker.gains(shown())["gains"]
    assert told["gpu"]["saves"] and told["gpu"]["text"].startswith("8 GiB more GPU memory would")
    assert told["host"] == {
        "text": "8 GiB more RAM would not make a step shorter.",
        "saves": False,
    }
    assert checker.gains(shown()) == {"gains": told} and len(asked) == 1


def test_without_times_nothing_is_worked_out(checker, monkeypatch):
    monkeypatch.setattr(Gains, "find", lambda *_: pytest.fail("nothing is to be found"))
    assert checker.gains(shown() | {"engine.device": "cpu"}) == {"gains": {}}
    assert checker.gains(shown() | {"train.batch_size": "none"}) == {"gains": {}}


def test_a_check_of_another_draft_ends_the_work_and_the_page_may_ask_again(checker, monkeypatch):
    monkeypatch.setattr(app.pages.new.gains, "_PROGRAM", SLEEPS)
    told = []
    worker = threading.Thread(target=lambda: told.append(checker.gains(shown())))
    worker.start()
    while worker.is_alive():
        checker.check(None, shown(), keep=False)
        time.sleep(0.01)
    assert told == [{"gains": None}]
