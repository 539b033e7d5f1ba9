"""Uploads are complete or absent, keep within their limits, and get names that are safe."""

from __future__ import annotations

import subprocess
import sys

import pytest

from app.session.uploads import (
    RefusedUpload,
    UploadLimits,
    Uploads,
    label_of,
    stored_name,
)
from tests.support.disks import small_file_system

ONE, TWO = "0123456789abcdef", "fedcba9876543210"
ROWS = b"a,b\n1,2\n"
SMALL = UploadLimits(largest=1000, quota=1500, reserve=0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / ".uploads"


@pytest.fixture
def uploads(folder):
    return Uploads(folder, SMALL)


def stored(uploads, upload_id=ONE, name="a.csv", content=ROWS):
    incoming = uploads.begin(upload_id, name, len(content))
    incoming.write(content)
    return incoming.keep()


def refusal_of(act, *arguments):
    with pytest.raises(RefusedUpload) as refused:
        act(*arguments)
    return refused.value.status, str(refused.value)


@pytest.mark.parametrize(
    ("given", "label", "name"),
    [
        ("questions.csv", "questions.csv", "questions.csv"),
        ("Meine Fragen (2).CSV", "Meine Fragen (2).CSV", "Meine-Fragen-2.csv"),
        ("../../etc/passwd.txt", "passwd.txt", "passwd.txt"),
        ("C:\\data\\train.jsonl.gz", "train.jsonl.gz", "train.jsonl.gz"),
        ("Grüße.tsv", "Grüße.tsv", "Grue.tsv"),
        ("日本語.parquet", "日本語.parquet", "data.parquet"),
        ("-rf.csv", "-rf.csv", "rf.csv"),
        ("a\n\x1b[31m\u202eb.csv", "a [31m b.csv", "a-31m-b.csv"),
        ("x" * 400, "x" * 119 + "…", "x" * 60),
        ("x" * 400 + ".json", "x" * 115 + ".json", "x" * 60 + ".json"),
    ],
)
def test_a_name_is_a_label_and_the_stored_name_is_plain(given, label, name):
    assert label_of(given) == label
    assert stored_name(label) == name


def test_a_complete_upload_is_listed_read_and_removed(uploads, folder):
    kept = stored(uploads, name="Meine Fragen.csv")
    assert kept.path == folder / ONE / "Meine-Fragen.csv"
    assert kept.path.read_bytes() == ROWS
    assert (kept.name, kept.bytes) == ("Meine Fragen.csv", len(ROWS))
    again = Uploads(folder, SMALL)
    assert again.listed() == [kept]
    again.remove(ONE)
    assert list(folder.iterdir()) == [] and again.listed() == []
    assert refusal_of(again.remove, ONE)[0] == 404
    assert refusal_of(again.remove, "../runs")[0] == 404


def test_what_is_dropped_leaves_nothing_and_its_id_is_free_again(uploads, folder):
    incoming = uploads.begin(ONE, "a.csv", 100)
    incoming.write(b"a,b\n")
    assert refusal_of(incoming.keep)[0] == 400, "bytes are missing"
    incoming.drop()
    incoming.drop()
    incoming.write(b"of a thread that was late")
    assert list(folder.iterdir()) == []
    stored(uploads)


def test_an_id_is_taken_once(uploads):
    incoming = uploads.begin(ONE, "a.csv", len(ROWS))
    assert refusal_of(uploads.begin, ONE, "b.csv", 5)[0] == 409
    incoming.write(ROWS)
    incoming.keep()
    status, shown = refusal_of(uploads.begin, ONE, "b.csv", 5)
    assert status == 409 and "complete already" in shown
    assert uploads.find(ONE).path.read_bytes() == ROWS


@pytest.mark.parametrize(
    ("name", "size", "status", "text"),
    [
        ("a.exe", 5, 415, "a.exe is not a data file"),
        ("a.parquet.gz", 5, 415, "is not a data file"),
        ("noname", 5, 415, "is not a data file"),
        (".csv", 5, 415, "is not a data file"),
        ("dataset_info.json:name", 5, 415, "is not a data file"),
        ("", 5, 415, "is not a data file"),
        ("a.csv", 0, 400, "a.csv is empty"),
        ("a.csv", 1001, 413, "--upload-limit"),
    ],
)
def test_what_is_not_received_is_told_before(uploads, folder, name, size, status, text):
    for refused in (
        refusal_of(uploads.begin, ONE, name, size),
        refusal_of(uploads.new_id, name, size),
    ):
        assert refused[0] == status and text in refused[1]
    assert not folder.exists()


def test_no_other_name_than_an_id_makes_a_folder(uploads, folder):
    for odd in ("", "..", "a/b", ONE.upper(), ONE + "0", ONE + "\n", f"{ONE}.partial"):
        assert refusal_of(uploads.begin, odd, "a.csv", 5)[0] == 404
    assert not folder.exists()


def test_the_quota_counts_what_is_stored_and_what_arrives(uploads):
    stored(uploads, ONE, content=b"x" * 700)
    incoming = uploads.begin(TWO, "b.csv", 700)
    status, shown = refusal_of(uploads.new_id, "c.csv", 200)
    assert status == 413 and "100 bytes are left for uploads" in shown
    incoming.drop()
    uploads.new_id("c.csv", 200)
    uploads.remove(ONE)
    stored(uploads, TWO, content=b"x" * 1000)


def test_the_reserve_of_the_disk_is_never_used(tmp_path):
    with small_file_system(tmp_path / "disk", 4) as disk:
        uploads = Uploads(disk / ".uploads", UploadLimits(reserve=2 << 20))
        status, shown = refusal_of(uploads.begin, ONE, "a.csv", 3 << 20)
        assert status == 507 and "of which 2.00 MiB are kept free" in shown
        incoming = uploads.begin(ONE, "a.csv", 3 << 19)
        # An upload under way has its room, though it is not written yet.
        assert refusal_of(uploads.begin, TWO, "b.csv", 1 << 20)[0] == 507
        (disk / "of another program").write_bytes(bytes(1 << 20))
        incoming.write(bytes(1 << 19))
        assert refusal_of(incoming.write, bytes(1 << 20))[0] == 507
        incoming.drop()
        assert list((disk / ".uploads").iterdir()) == []


def test_a_disk_that_fills_up_while_writing_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr("app.session.uploads.disk_free", lambda _: 1 << 40)
    with small_file_system(tmp_path / "disk", 1) as disk:
        uploads = Uploads(disk / ".uploads")
        incoming = uploads.begin(ONE, "a.csv", 2 << 20)
        status, shown = refusal_of(incoming.write, bytes(2 << 20))
        assert status == 507 and shown.startswith("The disk is full; ")
        incoming.drop()
        assert list((disk / ".uploads").iterdir()) == []


def test_a_killed_server_leaves_what_the_next_one_removes(uploads, folder):
    code = (
        "import os, sys; from pathlib import Path; from app.session.uploads import Uploads;"
        f"Uploads(Path(sys.argv[1])).begin('{ONE}', 'a.csv', 100).write(b'x'); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", code, folder], check=False, timeout=60)
    assert [path.name for path in folder.iterdir()] == [f"{ONE}.partial"]
    kept = stored(uploads, "1" * 16)
    living = Uploads(folder, SMALL).begin(TWO, "b.csv", len(ROWS))  # of another server
    uploads.remove_leftovers()
    assert {path.name for path in folder.iterdir()} == {"1" * 16, f"{TWO}.partial"}
    assert kept.path.exists()
    living.write(ROWS)
    living.keep()
    stored(uploads)
