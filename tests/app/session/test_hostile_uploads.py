"""Uploads in a folder that others may have written: nothing outside of it is read or removed."""

from __future__ import annotations

import json
import os

import pytest

from app.session.uploads import RefusedUpload, UploadLimits, Uploads
from tests.support.other_account import as_nobody, needs_root
from tests.support.stuck import never_stuck

ONE, TWO = "0123456789abcdef", "fedcba9876543210"
ROWS = b"a,b\n1,2\n"
LIMITS = UploadLimits(largest=1000, quota=1 << 30, reserve=0)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "runs" / ".uploads"


@pytest.fixture
def victim(tmp_path):
    """A folder of the owner's that no upload may touch."""
    place = tmp_path / "victim"
    place.mkdir()
    (place / "x.csv").write_bytes(ROWS)
    return place


def made(folder, upload_id, about, **files):
    """Makes the folder of an upload, as a stranger would."""
    place = folder / upload_id
    place.mkdir(parents=True)
    text = about if isinstance(about, str) else json.dumps(about)
    (place / ".about.json").write_text(text)
    for name, content in files.items():
        (place / name.replace("_", ".")).write_bytes(content)
    return place


def about(file, **more):
    return {"name": "a.csv", "file": file, "uploaded": 1.0} | more


def is_refused(act, *arguments):
    with pytest.raises(RefusedUpload) as refused:
        act(*arguments)
    return str(refused.value)


@pytest.mark.parametrize(
    "file", ["../../../victim/x.csv", "../a_csv", "sub/x.csv", "..", ".", "", ".about.json"]
)
def test_a_name_that_leads_elsewhere_is_neither_listed_nor_removed(folder, victim, file):
    place = made(folder, ONE, about(file), a_csv=ROWS)
    (place / "sub").mkdir()
    (place / "sub" / "x.csv").write_bytes(ROWS)
    uploads = Uploads(folder, LIMITS)
    assert uploads.listed() == []
    assert "cannot be read" in is_refused(uploads.remove, ONE)
    assert f"1 upload cannot be read: {ONE} (" in uploads.problem
    assert place.exists() and (victim / "x.csv").exists()


def test_an_absolute_name_is_none(folder, victim):
    made(folder, ONE, about(str(victim / "x.csv")))
    uploads = Uploads(folder, LIMITS)
    assert uploads.listed() == []
    is_refused(uploads.remove, ONE)
    assert (victim / "x.csv").exists()


def test_links_are_neither_listed_nor_removed(folder, victim):
    (victim / ".about.json").write_text(json.dumps(about("x.csv")))
    folder.mkdir(parents=True)
    (folder / ONE).symlink_to(victim)
    (folder / f"{TWO}.partial").symlink_to(victim)
    place = made(folder, "1" * 16, about("x.csv"))
    (place / "x.csv").symlink_to(victim / "x.csv")
    uploads = Uploads(folder, LIMITS)
    uploads.remove_leftovers()
    assert uploads.listed() == []
    for upload_id in (ONE, "1" * 16):
        is_refused(uploads.remove, upload_id)
    assert sorted(path.name for path in victim.iterdir()) == [".about.json", "x.csv"]
    assert (folder / f"{TWO}.partial").is_symlink() and (folder / ONE).is_symlink()
    assert "a link, which is not followed here" in uploads.problem


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 100_000,
        "{}",
        "null",
        json.dumps(about(1)),
        json.dumps(about(["a.csv"])),
        '{"name": "a", "file": "a.csv", "uploaded": 1e400}',
        '{"name": null, "file": "a.csv", "uploaded": 1}',
        "x" * (5 << 20),
    ],
)
def test_a_damaged_description_hides_no_other_upload(folder, text):
    made(folder, ONE, text, a_csv=ROWS)
    made(folder, TWO, about("a.csv"), a_csv=ROWS)
    uploads = Uploads(folder, LIMITS)
    assert [upload.id for upload in uploads.listed()] == [TWO]
    assert uploads.problem.startswith(f"1 upload cannot be read: {ONE} (")
    uploads.new_id("a.csv", 5)


@pytest.mark.parametrize("name", [".about.json", "a.csv", "lock"])
def test_a_pipe_is_not_waited_for(folder, name):
    place = made(folder, ONE, about("a.csv"), a_csv=ROWS)
    (place / name).unlink(missing_ok=True)
    os.mkfifo(place / name)
    left = made(folder, f"{TWO}.partial", about("a.csv"))
    os.mkfifo(left / "pipe")
    with never_stuck():
        uploads = Uploads(folder, LIMITS)
        assert [upload.id for upload in uploads.listed()] == ([ONE] if name == "lock" else [])
        uploads.remove_leftovers()
    assert not left.exists()


def test_only_what_an_upload_left_is_removed(folder):
    folder.mkdir(parents=True)
    for name in (".partial", "work.partial", f"{ONE}.partial.partial", f"x{ONE}.partial"):
        (folder / name).mkdir()
    Uploads(folder, LIMITS).remove_leftovers()
    assert len(list(folder.iterdir())) == 4


def test_the_folder_of_uploads_may_be_a_link_of_its_owner(folder, tmp_path):
    folder.parent.mkdir()
    (tmp_path / "disk").mkdir()
    folder.symlink_to(tmp_path / "disk")
    uploads = Uploads(folder, LIMITS)
    incoming = uploads.begin(ONE, "a.csv", len(ROWS))
    incoming.write(ROWS)
    kept = incoming.keep()
    assert kept.path.read_bytes() == ROWS and uploads.listed() == [kept]
    uploads.remove(ONE)
    assert list((tmp_path / "disk").iterdir()) == []


def test_what_arrives_is_its_owners_alone(folder):
    incoming = Uploads(folder, LIMITS).begin(ONE, "a.csv", len(ROWS))
    incoming.write(ROWS)
    kept = incoming.keep()
    for place in (folder, kept.path.parent):
        assert place.stat().st_mode & 0o777 == 0o700


@needs_root
def test_a_folder_of_another_account_keeps_nothing_from_starting(folder, capfd):
    """The server may neither read nor remove what root left there."""
    left = made(folder, f"{ONE}.partial", about("a.csv"), a_csv=ROWS)
    left.chmod(0o700)
    made(folder, TWO, about("a.csv"), a_csv=ROWS).chmod(0o755)
    made(folder, "1" * 16, about("a.csv"), a_csv=ROWS).chmod(0o700)
    imports = "import sys, pathlib; from app.session.uploads import Uploads"
    code = (
        "uploads = Uploads(pathlib.Path(sys.argv[1])); uploads.remove_leftovers();"
        "print([each.id for each in uploads.listed()]); print(uploads.problem)"
    )
    listed, problem = as_nobody(imports, code, folder, readable=folder).splitlines()
    assert listed == f"['{TWO}']"
    assert f"{left} is left of an upload that ended, and cannot be removed" in problem
    assert f"1 upload cannot be read: {'1' * 16} (Permission denied)" in problem
    assert f"ramstream: {left} is left of an upload" in capfd.readouterr().err


# ---------------------------------------------------------------------- many of them


def test_there_are_only_so_many_uploads(folder):
    uploads = Uploads(folder, UploadLimits(most=3, reserve=0))
    for number in range(2):
        made(folder, f"{number:016x}", about("a.csv"), a_csv=ROWS)
    incoming = uploads.begin(ONE, "a.csv", len(ROWS))
    shown = is_refused(uploads.new_id, "b.csv", 5)
    assert shown == (
        "3 files are uploaded already, and there may be no more; remove some of them, or join "
        "small files into one."
    )
    incoming.drop()
    uploads.new_id("b.csv", 5)


def test_a_check_reads_only_what_has_changed(folder, monkeypatch):
    for number in range(300):
        made(folder, f"{number:016x}", about("a.csv"), a_csv=ROWS)
    uploads = Uploads(folder, UploadLimits(reserve=0))
    read = []
    reading = Uploads._read
    monkeypatch.setattr(Uploads, "_read", lambda self, at: read.append(at) or reading(self, at))
    uploads.new_id("b.csv", 5)
    assert len(read) == 300
    uploads.new_id("b.csv", 5)
    assert len(read) == 300
    made(folder, ONE, about("a.csv"), a_csv=ROWS)  # by another server
    (folder / f"{7:016x}" / "a.csv").unlink()
    assert len(uploads.listed()) == 300 and len(read) == 302


def test_the_sum_of_what_is_stored_is_that_of_now(folder):
    uploads = Uploads(folder, UploadLimits(quota=100, reserve=0))
    for upload_id in (ONE, TWO):
        incoming = uploads.begin(upload_id, "a.csv", 40)
        incoming.write(b"x" * 40)
        incoming.keep()
    assert "20 bytes are left for uploads" in is_refused(uploads.new_id, "b.csv", 30)
    Uploads(folder).remove(ONE)  # by another server
    uploads.new_id("b.csv", 30)


def test_the_description_is_read_as_it_was_written_before(folder):
    """The file of an older version."""
    made(folder, ONE, '{"name": "Fragen.csv", "file": "Fragen.csv", "uploaded": 1764000000.5}')
    (folder / ONE / "Fragen.csv").write_bytes(ROWS)
    (kept,) = Uploads(folder, LIMITS).listed()
    assert (kept.name, kept.bytes, kept.uploaded) == ("Fragen.csv", len(ROWS), 1764000000.5)
