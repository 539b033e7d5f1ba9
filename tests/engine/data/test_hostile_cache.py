"""Caches that others may have written: nothing outside is read, waited for or removed."""

from __future__ import annotations

import json
import os
import re

import pytest

from engine import kept_files, safe_files
from engine.data.sources.open_source import open_source
from engine.data.tokens import column_survey, token_cache
from engine.data.tokens.column_survey import whole_survey
from engine.files import body_checksum
from engine.machine import rates
from engine.paths import PROGRAM_ROOT
from engine.planning.shape import shape_cache
from tests.support.cached_data import kept, prepared, write
from tests.support.no_files import KINDS, put
from tests.support.stuck import never_stuck


@pytest.fixture
def outside(tmp_path):
    """A file of the owner's, which stays as it is."""
    (tmp_path / "notes.txt").write_text("a note")
    yield tmp_path / "notes.txt"
    assert (tmp_path / "notes.txt").read_text() == "a note"


def replace(path, kind, outside):
    """Puts something that is no file of this program in the place of a file."""
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name("aside"))
    path.unlink(missing_ok=True)
    put(path, kind, outside)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["manifest.json", "train.ids", "prompts.jsonl", ""])
def test_tokens_that_are_no_files_are_made_again(
    tmp_path, tokenizer, own_cache, outside, kind, name
):
    path = write(tmp_path / "a.jsonl")
    prepared(path, tokenizer)
    (key,) = kept(own_cache)
    replace(own_cache / "tokens" / key / name, kind, outside)
    with never_stuck(computing=10):
        assert not prepared(path, tokenizer).summary["cached"]
    assert prepared(path, tokenizer).summary["cached"]


def forged(folder, change):
    """Writes the manifest with a change and with its right checksum."""
    manifest = json.loads((folder / "manifest.json").read_bytes())
    change(manifest["body"], folder)
    manifest["checksum"] = body_checksum(manifest["body"])
    (folder / "manifest.json").write_text(json.dumps(manifest))


def _lead_out(body, folder):
    (folder / "../../out").write_bytes(b"")
    body["files"]["../../out"] = [0, body["files"]["prompts.jsonl"][1]]


def _leave_out(body, folder):
    del body["files"]["train.starts"]
    (folder / "train.starts").unlink()


def _with(**values):
    def change(body, _):
        for name, value in values.items():
            (body if name in body else body["tally"])[name] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _lead_out,
        _leave_out,
        _with(key="0" * 40),
        _with(files=[]),
        _with(files={"train.ids": ["1", 2]}),
        _with(tally=[]),
        _with(rows="many"),
        _with(rows=1e400),
        _with(ends="abc"),
        _with(skipped={"a": "b"}),
        _with(column_survey={"unknown": 1}),
    ],
)
def test_a_forged_manifest_counts_as_damage(tmp_path, tokenizer, own_cache, change):
    path = write(tmp_path / "a.jsonl")
    sound = prepared(path, tokenizer)
    (key,) = kept(own_cache)
    forged(own_cache / "tokens" / key, change)
    again = prepared(path, tokenizer)
    assert not again.summary["cached"] and again.fingerprint == sound.fingerprint


def test_a_half_number_counts_as_damage(tmp_path, tokenizer, own_cache):
    path = write(tmp_path / "a.jsonl")
    prepared(path, tokenizer)
    (key,) = kept(own_cache)

    def cut(body, folder):
        content = (folder / "train.ids").read_bytes() + b"x"
        (folder / "train.ids").write_bytes(content)
        body["files"]["train.ids"] = [len(content), token_cache.new_digest().hexdigest()]
        digest = token_cache.new_digest()
        digest.update(content)
        body["files"]["train.ids"][1] = digest.hexdigest()

    forged(own_cache / "tokens" / key, cut)
    assert not prepared(path, tokenizer).summary["cached"]


def test_only_what_a_writer_left_is_removed(tmp_path, tokenizer, own_cache, outside):
    tokens = own_cache / "tokens"
    tokens.mkdir()
    names = (".removed", ".photos.removed", ".work.partial", "0" * 40 + ".partial")
    for name in names:
        (tokens / name).mkdir()
        os.utime(tokens / name, (1, 1))
    link = f".{'a' * 32}.removed"
    (tmp_path / "victim").mkdir()
    (tokens / link).symlink_to(tmp_path / "victim")
    (tokens / f".{'b' * 32}.removed").mkdir()
    prepared(write(tmp_path / "a.jsonl"), tokenizer)
    assert {*names, link} <= set(os.listdir(tokens)) and (tmp_path / "victim").exists()
    assert f".{'b' * 32}.removed" not in os.listdir(tokens)


def test_a_cache_on_another_disk_of_its_owner_is_used(tmp_path, tokenizer, own_cache):
    (tmp_path / "disk").mkdir()
    (own_cache / "tokens").symlink_to(tmp_path / "disk")
    path = write(tmp_path / "a.jsonl")
    prepared(path, tokenizer)
    assert prepared(path, tokenizer).summary["cached"] and len(kept(own_cache)) == 1


def test_what_is_made_is_its_owners_alone(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "cache"))
    prepared(write(tmp_path / "a.jsonl"), tokenizer)
    for place in (tmp_path / "cache/tokens", *(tmp_path / "cache/tokens").iterdir()):
        assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("kind", KINDS)
def test_other_kept_files_that_are_no_files_count_as_missing(
    tmp_path, own_cache, outside, kind, monkeypatch
):
    with never_stuck():
        (own_cache / "shapes").mkdir()
        key = "a" * 64
        replace(own_cache / "shapes" / f"{key}.json", kind, outside)
        assert shape_cache.kept_shape(key, "float32", "m") is None
        replace(own_cache / "rates.json", kind, outside)
        assert rates.kept_entry("disk") is None
        monkeypatch.setattr(column_survey, "_LEAST_KEPT", 0)
        config = column_survey.DataConfig(source=str(write(tmp_path / "a.jsonl")))
        source = open_source(config)
        survey = whole_survey(config, source)
        (name,) = os.listdir(own_cache / "columns")
        replace(own_cache / "columns" / name, kind, outside)
        assert whole_survey(config, source).names == survey.names


def test_no_file_of_another_is_removed_to_keep_a_cache_small(own_cache):
    (own_cache / "shapes").mkdir()
    (own_cache / "shapes" / "notes.txt").write_text("a note")
    for number in range(4):
        (own_cache / "shapes" / f"{number:064x}.json").write_text("{}")
    safe_files.remove_oldest(own_cache / "shapes", kept_files.OURS, 2)
    left = sorted(os.listdir(own_cache / "shapes"))
    assert len(left) == 3 and left[-1] == "notes.txt"


def test_what_is_read_from_files_is_never_code():
    """Arrays and tensors of files are told to hold none; only pipes to helpers carry pickles."""
    found: dict[str, set[str]] = {}
    for wing in ("engine", "app"):
        for file in (PROGRAM_ROOT / wing).rglob("*.py"):
            for call in re.findall(r"(?:np|torch|pickle)\.loads?\(.*", file.read_text()):
                if "allow_pickle=False" not in call and "weights_only=True" not in call:
                    found.setdefault(str(file.relative_to(PROGRAM_ROOT)), set()).add(call[:12])
    assert found == {
        "engine/data/tokens/workers.py": {"pickle.loads"},
        "engine/data/tokens/template_process.py": {"pickle.loads"},
    }
