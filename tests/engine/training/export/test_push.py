"""A push gives the hub an exported folder whole or not at all, and says what to do where it
cannot.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from engine.paths import PROGRAM_ROOT
from tests.support.fake_hub import FakeHub, serve


@pytest.fixture
def exported(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("---\ntags: [ramstream]\n---\n\n# Tiny\n")
    for number in (1, 2):
        (folder / f"model-0000{number}-of-00002.safetensors").write_bytes(bytes([number]) * 5000)
    (folder / ".hidden").write_text("not sent")
    return folder


@pytest.fixture
def hub(tmp_path):
    with serve(FakeHub({}, writers={"hf_mine": "me"})) as answering:
        yield answering


def push(hub, tmp_path, *arguments, token="hf_mine"):
    """Pushes from a terminal, whose environment knows this hub alone."""
    own = {"HF_TOKEN": token, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "launch.py", "push", *map(str, arguments)],
        cwd=PROGRAM_ROOT,
        env=os.environ | hub.variables(tmp_path / "cache") | own,
        capture_output=True,
        text=True,
    )


def test_a_folder_is_pushed_whole_into_a_private_repository(hub, exported, tmp_path):
    done = push(hub, tmp_path, exported, "tiny")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"http://127.0.0.1:{hub.port}/me/tiny\n"
    sent = {file.name: file.read_bytes() for file in exported.iterdir() if file.name[0] != "."}
    assert hub.pushed == {"me/tiny": sent} and hub.private == {"me/tiny": True}
    shown = done.stderr.splitlines()
    assert shown[0].startswith("Asking the hub (0 KB of")
    assert shown[-1].startswith("Making the commit")
    assert "hf_mine" not in done.stdout + done.stderr


def test_a_repository_is_public_only_where_that_is_asked(hub, exported, tmp_path):
    assert push(hub, tmp_path, exported, "me/open", "--public").returncode == 0
    assert hub.private == {"me/open": False}


def test_a_push_that_breaks_off_shows_nothing_and_goes_on_with_what_is_there(
    hub, exported, tmp_path
):
    hub.room = 1
    broken = push(hub, tmp_path, exported, "tiny")
    assert broken.returncode == 2
    assert hub.pushed == {}
    assert len(hub.uploaded) == 1
    assert "The hub refuses the push to tiny" in broken.stderr
    assert "Traceback" not in broken.stderr
    hub.room = None
    assert push(hub, tmp_path, exported, "tiny").returncode == 0
    assert len(hub.pushed["me/tiny"]) == 4 and len(hub.uploaded) == 2


@pytest.mark.parametrize(
    ("repository", "token", "words"),
    [
        ("tiny", "", "There is no login of the Hugging Face hub"),
        ("tiny", "hf_wrong", "The hub refuses the push to tiny"),
        ("other/tiny", "hf_mine", "The hub refuses the push to other/tiny"),
        ("a/b/c", "hf_mine", "is no name for a repository"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(hub, exported, tmp_path, repository, token, words):
    done = push(hub, tmp_path, exported, repository, token=token)
    assert done.returncode == 2
    assert words in done.stderr
    assert hub.pushed == {}
    assert "Traceback" not in done.stderr and "hf_mine" not in done.stderr


def test_a_folder_without_a_model_is_refused_before_the_hub_is_asked(hub, tmp_path):
    done = push(hub, tmp_path, tmp_path, "tiny")
    assert done.returncode == 2 and "holds no exported model" in done.stderr
    assert hub.requests == []


@pytest.mark.parametrize("name", ["README.md", "notes.txt"])
def test_what_somebody_linked_into_a_folder_is_not_for_the_hub(hub, exported, tmp_path, name):
    (tmp_path / "secret").write_text("a private key")
    (exported / name).unlink(missing_ok=True)
    (exported / name).symlink_to(tmp_path / "secret")
    done = push(hub, tmp_path, exported, "tiny")
    (exported / name).unlink()
    assert done.returncode == 2 and f"{name} is a link" in done.stderr
    assert hub.requests == [] and hub.pushed == {}
