"""A model that is not on this machine is refused before a run begins, while nobody can give it."""

from __future__ import annotations

import re
import threading

import pytest

from engine.config.settings import TrainConfig
from engine.data.sources import hub_connection
from engine.data.sources.open_source import open_source
from engine.errors import DataError, ModelError
from engine.model.build.pretrained_files import load_tokenizer
from engine.model.hub import missing_files
from engine.model.hub.missing_files import refuse_missing_files
from engine.training.weights.usable_start import refuse_unusable
from tests.support.folders import make_model
from tests.support.stuck import never_stuck

NAME = "acme/tiny"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Returns a folder in the hub's cache that is to hold the model."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = tmp_path / "models--acme--tiny"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc", encoding="utf-8")
    return model / "snapshots" / "abc"


def test_offline_only_what_is_there_counts(cache):
    with pytest.raises(
        ModelError, match=f"{NAME} is not downloaded yet, and this computer cannot reach"
    ):
        refuse_missing_files(NAME, weights=False)
    make_model(cache)
    refuse_missing_files(NAME, weights=True)
    (cache / "model.safetensors").unlink()
    refuse_missing_files(NAME, weights=False)
    with pytest.raises(
        ModelError, match=f"the weights of {NAME} are not downloaded yet, and .* HF_HUB_OFFLINE"
    ):
        refuse_missing_files(NAME, weights=True)


def test_a_hub_that_answers_gives_what_is_missing(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(missing_files, "why_cut_off", lambda: None)
    refuse_missing_files(NAME, weights=True)
    monkeypatch.setattr(missing_files, "why_cut_off", lambda: "no route to host")
    with pytest.raises(ModelError, match="no route to host"):
        refuse_missing_files(NAME, weights=True)


@pytest.mark.parametrize("source", ["./models/x", "../x", "models/of/mine", "~/x", "models\\x"])
def test_a_path_that_leads_nowhere_is_told_and_not_asked_for(cache, source):
    refuse_missing_files("assets/starter-model", weights=True)
    refuse_missing_files(source, weights=True)
    config = TrainConfig.from_dict(
        {"model": {"source": source}, "data": {"source": source}, "train": {"steps": 1}}
    )
    sentence = re.escape(f"model.source: the folder {source} does not exist")
    with pytest.raises(ModelError, match=sentence):
        refuse_unusable(config)
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(source)
    with pytest.raises(DataError, match=re.escape(f"no file or folder {source}; check data")):
        open_source(config.data)
    started = config.with_values(
        {"model.source": "assets/starter-model", "model.start_from": source}
    )
    with pytest.raises(ModelError, match=r"model\.start_from: the folder .* does not exist"):
        refuse_unusable(started)


def test_a_page_does_not_wait_for_a_hub_that_says_nothing(cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    connection = hub_connection._Connection()
    monkeypatch.setattr(hub_connection, "_CONNECTION", connection)

    continues = threading.Event()

    def silent():
        assert continues.wait(600)
        return "it gave no answer"

    monkeypatch.setattr(hub_connection, "_ask", silent)
    with never_stuck():
        refuse_missing_files(NAME, weights=True, waits=False)  # not known yet
    continues.set()
    assert connection.why_cut_off() == "it gave no answer"
    with pytest.raises(ModelError, match="it gave no answer"):
        refuse_missing_files(NAME, weights=True, waits=False)
