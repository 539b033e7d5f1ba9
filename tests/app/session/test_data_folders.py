"""Folders that the command line names are browsed, and nothing outside of them."""

from __future__ import annotations

import os

import pytest

from app.pages.new.folder_routes import folder_routes
from app.session.data_folders import MOST_ENTRIES, DataFolders
from engine.errors import RamstreamError
from tests.support.routes import send

SECRET = "secret.csv"


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "data"
    (root / "inner").mkdir(parents=True)
    (root / "B.csv").write_text("a,b\n")
    (root / "a.jsonl.gz").write_bytes(b"\x1f\x8b")
    (root / "inner" / "c.txt").write_text("text")
    for not_shown in ("program.exe", ".hidden.csv"):
        (root / not_shown).write_text("x")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / SECRET).write_text("a,b\n")
    (root / "link").symlink_to(outside)
    (root / "link.csv").symlink_to(outside / SECRET)
    (root / "broken.csv").symlink_to(root / "nowhere")
    (root / "round").symlink_to(root / "round")
    (root / "inside.csv").symlink_to(root / "B.csv")
    (root / os.fsdecode(b"\xff.csv")).write_text("x")
    return root


def listed(root, below=""):
    answer = send(folder_routes(DataFolders.named([root])), "GET", f"/api/folders/0?below={below}")
    return answer.status_code, answer.json()


def test_folders_and_data_files_are_shown_and_links_out_are_not(root):
    status, found = listed(root)
    assert status == 200 and found["path"] == str(root)
    assert found["folders"] == ["inner"]
    assert [(file["name"], file["bytes"]) for file in found["files"]] == [
        ("a.jsonl.gz", 2),
        ("B.csv", 4),
        ("inside.csv", 4),
    ]
    status, found = listed(root, "inner")
    assert [file["path"] for file in found["files"]] == [str(root / "inner" / "c.txt")]


@pytest.mark.parametrize(
    "below",
    [
        "..",
        "inner/..",
        "inner/../..",
        "../outside",
        "link",
        "/",
        "/etc",
        "inner//",
        ".",
        "round",
        "nowhere",
        "B.csv",
        "a%00b",
        "%2e%2e",
        "x" * 5000,
    ],
)
def test_no_path_leads_out_or_fails_with_a_fault(root, below):
    status, shown = listed(root, below)
    assert status == 404 and SECRET not in str(shown) and len(shown["error"]) < 6000, shown


@pytest.mark.parametrize("number", ["1", "-1", "x", "9" * 40])
def test_only_named_folders_have_a_number(root, number):
    routes = folder_routes(DataFolders.named([root]))
    assert send(routes, "GET", f"/api/folders/{number}").status_code == 404


def test_a_folder_with_very_many_entries_shows_a_part(tmp_path):
    for number in range(MOST_ENTRIES + 3):
        (tmp_path / f"{number}.csv").touch()
    _, found = listed(tmp_path)
    assert (len(found["files"]), found["left_out"]) == (MOST_ENTRIES, 3)


def test_what_the_command_line_names_is_a_folder(root):
    with pytest.raises(RamstreamError, match="--data-folder .*not a folder"):
        DataFolders.named([root / "B.csv"])
    assert send(folder_routes(DataFolders()), "GET", "/api/folders").json() == {"folders": []}
    twice = DataFolders.named([root, root / "inner" / ".."])
    assert twice.roots == (root,)
