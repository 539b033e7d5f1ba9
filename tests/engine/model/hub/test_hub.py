"""Models of a hub: downloaded with progress, given up at once, gone on with where they were, and
told in one sentence when they cannot be had.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from engine.errors import FitError, ModelError
from engine.model.hub import hub as engine_hub
from engine.model.hub.hub import fetch
from engine.model.hub.hub_cache import cached_weights, weight_files
from tests.support.fake_hub import NAME, FakeHub, GivenUp, content_name, serve
from tests.support.folders import make_model
from tests.support.pickled_folders import pickle_weights


@pytest.fixture
def hub(model, tmp_path, monkeypatch):
    with serve(FakeHub({NAME: model})) as hub:
        for name, value in hub.variables(tmp_path / "hub").items():
            monkeypatch.setenv(name, value)
        yield hub


def told(seen):
    """A `progress` that keeps what it is told."""
    return lambda done, total, words: seen.append((done, total, words))


def nothing():
    pass


def gives_up_after(size):
    def progress(done, total, words):
        if done >= size:
            raise GivenUp

    return progress


def blobs(tmp_path):
    return tmp_path / "hub" / "models--acme--tiny" / "blobs"


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def processes():
    """Of downloads that this process has started."""
    listed = subprocess.run(
        ["ps", "--ppid", str(os.getpid()), "-o", "stat=,args="], capture_output=True, text=True
    ).stdout
    return [
        line for line in listed.splitlines() if "hub_download" in line and not line.startswith("Z")
    ]


# ------------------------------------------------------------------ what is fetched


def test_a_model_is_fetched_with_its_progress(hub, model):
    seen = []
    fetch(NAME, True, told(seen), nothing)
    folder = cached_weights(NAME)
    assert contents(folder) == contents(model)
    done = [done for done, _, _ in seen]
    assert done == sorted(done) and {total for _, total, _ in seen} == {hub.size(NAME)}
    assert seen[-1] == (hub.size(NAME), hub.size(NAME), "6 of 6 files")
    assert done.count(hub.size(NAME)) == 1, "the end is told once, when all is in its place"
    assert processes() == []


def test_what_is_there_is_not_fetched_again(hub):
    fetch(NAME, True, told([]), nothing)
    before, seen = len(hub.weights_asked()), []
    fetch(NAME, True, told(seen), nothing)
    assert len(hub.weights_asked()) == before == 1 and seen == []


def test_without_weights_only_small_files_come(hub):
    seen = []
    fetch(NAME, False, told(seen), nothing)
    assert cached_weights(NAME) is None
    assert hub.weights_asked() == []
    assert seen[-1][2] == "5 of 5 files"


def test_only_the_weights_that_are_read_are_fetched(hub, tmp_path):
    """Some publishers add a second copy in a form of their own."""
    folder = tmp_path / "sharded"
    make_model(folder)
    whole = (folder / "model.safetensors").read_bytes()
    for name in (
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "consolidated.safetensors",
    ):
        (folder / name).write_bytes(name.encode() + whole)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps(
            {
                "weight_map": {
                    "a": "model-00001-of-00002.safetensors",
                    "b": "model-00002-of-00002.safetensors",
                }
            }
        ),
        encoding="utf-8",
    )
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    hub.models[NAME] = folder
    fetch(NAME, True, told([]), nothing)
    assert {path.name for path in cached_weights(NAME).iterdir()} == {
        path.name for path in folder.iterdir()
    } - {"consolidated.safetensors", "pytorch_model.bin"}


@pytest.mark.parametrize("files", [1, 2])
def test_pickled_weights_are_fetched_where_there_are_no_others(hub, tmp_path, files):
    folder = make_model(tmp_path / "pickled")
    pickle_weights(folder, files)
    for name in ("pytorch_model.bin", "pytorch_model.bin.index.json"):
        if not (folder / name).exists():
            (folder / f"{name}.old").write_bytes(b"not read")
    (folder / "training_args.bin").write_bytes(b"not read")
    hub.models[NAME] = folder
    fetch(NAME, True, told([]), nothing)
    kept = cached_weights(NAME)
    others = {"training_args.bin", "pytorch_model.bin.old", "pytorch_model.bin.index.json.old"}
    assert contents(kept) == {k: v for k, v in contents(folder).items() if k not in others}
    assert len(hub.weights_asked()) == files


def test_a_download_of_pickled_weights_goes_on_where_it_was(hub, model, tmp_path):
    folder = shutil.copytree(model, tmp_path / "pickled")
    pickle_weights(folder)
    hub.models[NAME], hub.pause = folder, 0.02
    size = (folder / "pytorch_model.bin").stat().st_size
    with pytest.raises(GivenUp):
        fetch(NAME, True, gives_up_after(size // 4), nothing)
    have = (blobs(tmp_path) / f"{content_name(folder / 'pytorch_model.bin')}.incomplete").stat()
    hub.pause = 0
    fetch(NAME, True, told([]), nothing)
    assert hub.weights_asked() == ["", f"bytes={have.st_size}-"] and have.st_size > 0
    assert contents(cached_weights(NAME)) == contents(folder)


@pytest.mark.parametrize(
    "files, expected",
    [
        (
            {
                "pytorch_model.bin.index.json": '{"weight_map": {"a": "2.bin", "b": "1.bin"}}',
                "1.bin": "",
            },
            ["pytorch_model.bin.index.json", "1.bin", "2.bin"],
        ),
        (
            {
                "pytorch_model.bin": "",
                "model.safetensors.index.json": '{"weight_map": {"a": "1.safetensors"}}',
            },
            ["model.safetensors.index.json", "1.safetensors"],
        ),
        ({"pytorch_model.bin": "", "pytorch_model.bin.index.json": "{"}, ["pytorch_model.bin"]),
        (
            {"config.json": "{}", "model.safetensors": "", "model.safetensors.index.json": "{"},
            ["model.safetensors"],
        ),
        (
            {
                "config.json": '{"transformers_weights": "own.safetensors"}',
                "own.safetensors": "",
                "model.safetensors": "",
            },
            ["own.safetensors"],
        ),
        ({"config.json": "{}", "model.safetensors.index.json": "[]"}, []),
        ({"config.json": "{"}, []),
        ({}, []),
    ],
)
def test_which_files_hold_the_weights(files, expected):
    assert weight_files(files, files.__getitem__) == expected


@pytest.mark.parametrize("source", ["/no/such/folder", "a/b/c", "nobody's model"])
def test_what_is_no_hub_id_is_not_asked_for(hub, source):
    fetch(source, True, told([]), nothing)
    assert hub.requests == []


# ------------------------------------------------------------------ given up, and gone on with


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_a_download_that_was_given_up_goes_on_where_it_was(hub, model, tmp_path, ignores_ranges):
    hub.pause, size = 0.02, (model / "model.safetensors").stat().st_size
    with pytest.raises(GivenUp):
        fetch(NAME, True, gives_up_after(size // 4), nothing)
    assert processes() == [] and cached_weights(NAME) is None
    partial = blobs(tmp_path) / f"{content_name(model / 'model.safetensors')}.incomplete"
    have = partial.stat().st_size
    assert 0 < have < size
    hub.pause, hub.ignores_ranges, seen = 0, ignores_ranges, []
    fetch(NAME, True, told(seen), nothing)
    assert hub.weights_asked() == ["", f"bytes={have}-"]
    assert seen[0][0] >= have
    assert [s[0] for s in seen] == sorted(s[0] for s in seen)
    assert seen[-1][0] == seen[-1][1]
    assert (cached_weights(NAME) / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert not partial.exists()


def test_it_is_given_up_while_the_hub_says_nothing(hub, monkeypatch):
    """`check` is asked until the first byte, `progress` after it, whether or not any come."""
    hub.pause = 3600
    looks = []

    def progress(done, total, words):
        looks.append(words)
        if "nothing has come" in words:
            raise GivenUp

    monkeypatch.setattr(engine_hub, "SILENT_SECONDS", 0.5)
    with pytest.raises(GivenUp):
        fetch(NAME, True, progress, nothing)
    assert looks[-1].startswith("5 of 6 files, nothing has come for ") and processes() == []

    hub.silent.add("acme/other")

    def check():
        raise GivenUp

    with pytest.raises(GivenUp):
        fetch("acme/other", True, told([]), check)
    assert processes() == []


def test_the_time_left_is_that_of_the_latest_bytes(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(engine_hub.time, "monotonic", lambda: now[0])
    pace = engine_hub._Pace()
    for done in range(5000, 5041, 10):  # what was there at first took no time
        pace.take({"done": done, "total": 10_000, "files": 3, "of": 7})
        now[0] += 1
    assert pace.text() == "3 of 7 files, about 10 min 20 s left" and pace.done == 5040
    pace.take({"done": 4000, "total": 10_000, "files": 3, "of": 7})
    assert pace.done == 5040, "a server that begins anew takes no bytes back"
    pace.take({"done": 10_000, "total": 10_000, "files": 7, "of": 7})
    assert pace.done == 9_999, "not before all is in its place"


# ------------------------------------------------------------------ what the hub does not give


def test_an_unknown_model_is_one_sentence(hub):
    with pytest.raises(
        ModelError,
        match=r"^model\.source: 'acme/none' is neither a local folder nor a model "
        r"that the hub gave \(.*\); check the name, and log in with `hf auth login` or set "
        r"HF_TOKEN if it is",
    ):
        fetch("acme/none", True, told([]), nothing)


def test_a_gated_model_is_one_sentence(hub):
    hub.gated.add(NAME)
    with pytest.raises(
        ModelError,
        match=rf"only to those who have accepted its license; do so on "
        rf"http://127\.0\.0\.1:{hub.port}/acme/tiny, then log in with `hf auth login` or set "
        r"HF_TOKEN, and try again\.$",
    ):
        fetch(NAME, True, told([]), nothing)


@pytest.mark.slow("huggingface_hub waits twelve seconds between its attempts")
def test_a_lost_connection_is_one_sentence_and_goes_on_later(hub, model):
    hub.breaks_after = 3 << 20
    with pytest.raises(
        ModelError,
        match=r"^model\.source: the connection to the hub was lost while acme/tiny was downloaded "
        r"\(.*\); try again when it is back: what has come is kept\.$",
    ):
        fetch(NAME, True, told([]), nothing)
    hub.breaks_after = None
    fetch(NAME, True, told([]), nothing)
    assert (cached_weights(NAME) / "model.safetensors").read_bytes() == (
        model / "model.safetensors"
    ).read_bytes()
    assert hub.weights_asked()[-1].startswith("bytes=")


def test_too_little_disk_is_told_before_anything_is_fetched(hub, tmp_path):
    hub.claimed["model.safetensors"] = 1 << 60
    with pytest.raises(
        FitError,
        match=r"^model\.source: [\d,.]+ GiB of acme/tiny are still to be downloaded to .*/hub, "
        r"where .* is free; free some disk space, or set HF_HOME to a folder on a larger disk\.$",
    ):
        fetch(NAME, True, told([]), nothing)
    assert hub.weights_asked() == []


def test_weights_that_arrive_damaged_are_not_used(hub, model, tmp_path):
    blobs(tmp_path).mkdir(parents=True)
    partial = blobs(tmp_path) / f"{content_name(model / 'model.safetensors')}.incomplete"
    partial.write_bytes(bytes(1 << 20))  # as a power cut may leave it
    with pytest.raises(
        ModelError,
        match=r"model\.safetensors of acme/tiny arrived damaged and was thrown away; try again\.$",
    ):
        fetch(NAME, True, told([]), nothing)
    assert not partial.exists() and cached_weights(NAME) is None
    fetch(NAME, True, told([]), nothing)
    assert cached_weights(NAME) is not None


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize("how", ["offline", "no answer"])
def test_without_a_hub_the_cache_will_do(hub, tmp_path, monkeypatch, how):
    fetch(NAME, False, told([]), nothing)
    if how == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.breaks_after = 0
    fetch(NAME, False, told([]), nothing)
    with pytest.raises(
        ModelError,
        match=r"^model\.source: the weights of acme/tiny are not in the Hugging Face cache, and "
        r"the hub did not give them \(.*\); check your connection",
    ):
        fetch(NAME, True, told([]), nothing)
    if how == "no answer":
        with pytest.raises(
            ModelError,
            match=r"'acme/other' is neither a local folder nor a model that the hub gave \(.*\); "
            r"check the name or your connection",
        ):
            fetch("acme/other", True, told([]), nothing)
    hub.breaks_after = None
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    fetch(NAME, True, told([]), nothing)
    hub.breaks_after = 0
    fetch(NAME, True, told([]), nothing)
