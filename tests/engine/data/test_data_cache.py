"""Tokens are cached on disk: made once, found again, never stale, never incomplete, and never above
the size limits.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib.metadata
import json
import os
import resource
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

from engine.config.data_settings import DataColumns, DataConfig, DataSource
from engine.config.preference_settings import PairedData
from engine.data.batches.loader import prepare_data
from engine.data.tokens import cache_key, token_cache, tokenize
from engine.data.tokens.encode import Encoder
from engine.data.tokens.tokenize import Execution
from engine.errors import DataError
from tests.support import data_tokenizers as made
from tests.support.cached_data import assert_same, kept, prepared, write
from tests.support.imported import imported_by, packages_of


def sources(tmp_path):
    import datasets
    import pyarrow as pa
    from pyarrow import parquet

    lines = write(tmp_path / "a.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    write(tmp_path / "folder/1.jsonl", 20)
    write(tmp_path / "folder/2.jsonl", 20, start=20)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "dataset_info.json").write_text(
        json.dumps(
            {
                "named": {
                    "file_name": "a.jsonl",
                    "columns": {"prompt": "prompt", "response": "completion"},
                }
            }
        )
    )
    return [
        lines,
        tmp_path / "a.json",
        tmp_path / "a.parquet",
        tmp_path / "folder",
        tmp_path / "saved",
        f"{tmp_path}/dataset_info.json:named",
        (DataSource(str(lines), 2.5), DataSource(str(tmp_path / "folder"), 0.5)),
    ]


def test_a_second_preparation_reads_and_encodes_nothing_and_is_the_same_to_the_bit(
    tmp_path, tokenizer, monkeypatch
):
    every = sources(tmp_path)
    first = [prepared(source, tokenizer) for source in every]
    assert not any(data.summary["cached"] for data in first[:-1])

    def refuse(*arguments, **named):
        raise AssertionError("something was read or encoded again")

    monkeypatch.setattr(Encoder, "encode", refuse)
    monkeypatch.setattr(tokenize, "open_source", refuse)
    for source, before in zip(every, first):
        found = []
        settings = DataConfig(
            source if isinstance(source, tuple) else str(source), max_seq_len=128, eval_fraction=0.1
        )
        again = prepare_data(
            settings, tokenizer, 1, execution=Execution(lambda *now: found.append(now))
        )
        assert_same(before, again)
        assert again.summary["cached"] and found[-1][2].endswith(" read from the cache")
    # Settings that only select tokens do not make new ones.
    for changes in ({"seed": 2}, {"packing": False}, {"shuffle": False}):
        assert prepared(every[0], tokenizer, **changes).summary["cached"]
    assert (
        prepared((DataSource(str(every[0]), 7.0),), tokenizer).summary["train_examples"]
        == 7 * first[0].summary["train_examples"]
    )


def test_tokens_are_mapped_and_read_only(tmp_path, tokenizer):
    rows = prepared(write(tmp_path / "a.jsonl"), tokenizer).train
    for array in (rows.ids, rows.loss_mask, rows.starts):
        assert isinstance(array.base, np.memmap) and not array.flags.writeable


@pytest.mark.parametrize("by_content", [True, False])
def test_a_changed_file_is_never_served_stale(tmp_path, tokenizer, monkeypatch, by_content):
    if not by_content:
        monkeypatch.setattr(cache_key, "_BYTES_HASHED", 0)
    path = write(tmp_path / "a.jsonl")
    before, times = prepared(path, tokenizer), path.stat()
    write(path, word="jello")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert path.stat().st_size == times.st_size and path.stat().st_mtime_ns == times.st_mtime_ns
    after = prepared(path, tokenizer)
    assert not after.summary["cached"] and after.fingerprint != before.fingerprint
    write(tmp_path / "set/1.jsonl")
    before = prepared(tmp_path / "set", tokenizer)
    write(tmp_path / "set/2.jsonl", 3)
    assert (
        prepared(tmp_path / "set", tokenizer).summary["rows_read"]
        == before.summary["rows_read"] + 3
    )


def test_whatever_determines_tokens_is_in_the_key(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path / "a.jsonl")
    before = prepared(path, tokenizer)
    for changes in (
        {"max_seq_len": 48},
        {"train_on": "all"},
        {"eval_fraction": 0.2},
        {"format": "prompt_completion"},
    ):
        assert not prepared(path, tokenizer, **changes).summary["cached"]
    other_template = made.byte_level_tokenizer(made.CHATML.replace("im_start", "im_begin"))
    for other in (
        other_template,
        made.byte_level_tokenizer(made.CHATML, eos=False),
        made.sentencepiece_tokenizer(made.CHATML),
    ):
        assert not prepared(path, other).summary["cached"]
    used = made.byte_level_tokenizer(made.CHATML)
    used(["a", "a b"], padding=True, truncation=True, max_length=2)  # modifies the tokenizer
    assert prepared(path, used).fingerprint == before.fingerprint
    assert prepared(path, used).summary["cached"]
    monkeypatch.setattr(cache_key, "PROGRAM", ["another version"])
    assert not prepared(path, tokenizer).summary["cached"]


def test_a_file_that_changes_while_it_is_read_is_used_once_and_not_kept(
    tmp_path, tokenizer, own_cache
):
    path = write(tmp_path / "a.jsonl")

    def change(*_):
        with path.open("a") as file:
            file.write("\n")

    data = prepare_data(DataConfig(str(path)), tokenizer, 1, execution=Execution(change))
    assert kept(own_cache) == [] and data.train.row(0).documents >= 1


def test_a_source_that_does_not_say_what_it_holds_is_not_kept(tokenizer, monkeypatch, own_cache):
    import datasets

    found = datasets.Dataset.from_list([{"prompt": f"q{i}", "completion": "a"} for i in range(9)])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    assert [prepared("owner/name", tokenizer).summary["cached"] for _ in range(2)] == [False, True]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found.to_iterable_dataset())
    data = [prepared("owner/name", tokenizer) for _ in range(2)]
    assert not data[1].summary["cached"] and len(kept(own_cache)) == 1
    assert data[0].fingerprint == data[1].fingerprint and data[0].train.row(0).documents >= 1


# ---------------------------------------------------------------------- damage


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_killed_writer_leaves_nothing_that_is_read_and_its_rest_goes(
    tmp_path, tokenizer, own_cache
):
    path = write(tmp_path / "a.jsonl")
    code = (
        "import os, sys\n"
        "from engine.config.data_settings import DataConfig\n"
        "from engine.data.batches.loader import prepare_data\n"
        "from tests.support import data_tokenizers as made\n"
        "config = DataConfig(sys.argv[1], max_seq_len=128, eval_fraction=0.1)\n"
        "tokenizer = made.byte_level_tokenizer(made.CHATML)\n"
        "from engine.data.tokens.tokenize import Execution\n"
        "die = Execution(lambda *_: os.kill(os.getpid(), 9))\n"
        "prepare_data(config, tokenizer, 1, execution=die)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(path)], check=False)
    assert ended.returncode == -signal.SIGKILL
    (left,) = (own_cache / "tokens").iterdir()
    data = prepared(path, tokenizer)
    assert (
        not data.summary["cached"] and left.exists()
    )  # it might belong to a writer that has just begun
    os.utime(left, (0, 0))
    again = prepared(path, tokenizer, max_seq_len=64)
    assert not left.exists() and len(kept(own_cache)) == 2
    assert again.fingerprint != data.fingerprint and prepared(path, tokenizer).summary["cached"]


def test_the_folder_of_a_writer_at_work_stays(tmp_path, tokenizer, own_cache):
    path = write(tmp_path / "a.jsonl")
    with token_cache.TokenWriter("b.jsonl"):
        (at_work,) = (own_cache / "tokens").iterdir()
        os.utime(at_work, (0, 0))
        prepared(path, tokenizer)
        assert at_work.exists() and len(kept(own_cache)) == 2
    assert not at_work.exists()


def damages(folder):
    for path in sorted(folder.iterdir()):
        size = path.stat().st_size
        yield path, lambda path=path: path.unlink()
        if size:
            yield path, lambda path=path, size=size: os.truncate(path, size - 1)
            for place in (0, size // 2, size - 1):
                yield path, lambda path=path, place=place: flip(path, place)
    yield folder, lambda: (folder / "manifest.json").write_text("[]")


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


@pytest.mark.slow("it sweeps over many cases")
def test_damaged_tokens_are_made_again(tmp_path, tokenizer, own_cache):
    path = write(tmp_path / "a.jsonl")
    sound = prepared(path, tokenizer)
    (key,) = kept(own_cache)
    done = 0
    for file, damage in damages(own_cache / "tokens" / key):
        assert prepared(path, tokenizer).summary["cached"]
        damage()
        data = prepared(path, tokenizer)
        assert not data.summary["cached"], file
        assert_same(data, sound)
        done += 1
    assert done > 40 and kept(own_cache) == [key]


def test_a_disk_that_takes_no_more_is_one_sentence_and_nothing_is_left(
    tmp_path, tokenizer, own_cache
):
    path = write(tmp_path / "a.jsonl", 400)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(
            DataError, match=r"^The tokens of a\.jsonl cannot be written in .*_CACHE to a"
        ) as caught:
            prepared(path, tokenizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(caught.value) and kept(own_cache) == []
    assert prepared(path, tokenizer).summary["rows_read"] == 400


def test_a_cache_that_cannot_be_made_is_one_sentence(tmp_path, tokenizer, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match=r"cannot be written in .*Not a directory"):
        prepared(write(tmp_path / "a.jsonl"), tokenizer)


@pytest.mark.parametrize("problem", [KeyboardInterrupt, DataError, OSError])
def test_a_preparation_that_is_stopped_leaves_nothing(tmp_path, tokenizer, own_cache, problem):
    def stop(*_):
        raise problem("stop")

    path = write(tmp_path / "a.jsonl")
    with pytest.raises(problem, match="stop"):
        prepare_data(DataConfig(str(path)), tokenizer, 1, execution=Execution(stop))
    assert kept(own_cache) == []
    prepare_data(DataConfig(str(path)), tokenizer, 1)
    with pytest.raises(
        problem, match="stop"
    ):  # stopped during verification, which does not mean that the file is damaged
        prepare_data(DataConfig(str(path)), tokenizer, 1, execution=Execution(stop))
    assert len(kept(own_cache)) == 1


# ---------------------------------------------------------------------- several at once, and bounds


def test_two_that_write_the_same_tokens_at_once_do_no_harm(tmp_path, own_cache):
    path = write(tmp_path / "a.jsonl")
    both, results = threading.Barrier(2, timeout=60), []

    def run():
        found = iter(range(10))
        config = DataConfig(str(path), max_seq_len=128, eval_fraction=0.1)
        results.append(
            prepare_data(
                config,
                made.byte_level_tokenizer(made.CHATML),
                1,
                execution=Execution(lambda *_: both.wait() if next(found) == 0 else None),
            )
        )

    threads = [threading.Thread(target=run) for _ in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert_same(*results)
    assert [data.summary["cached"] for data in results] == [False, False]
    assert len(kept(own_cache)) == 1
    assert prepared(path, made.byte_level_tokenizer(made.CHATML)).summary["cached"]


def test_the_least_recently_used_go_and_what_is_mapped_stays_readable(
    tmp_path, tokenizer, own_cache, monkeypatch
):
    monkeypatch.setattr(token_cache, "_MOST_FOLDERS", 2)
    (own_cache / "tokens").mkdir()
    (own_cache / "tokens" / "mine").mkdir()  # not ours to remove
    (own_cache / "tokens" / "mine" / "manifest.json").write_text("{}")
    paths = [write(tmp_path / f"{i}.jsonl", word=f"word{i}") for i in range(3)]

    def aged(source, age):
        before = set(kept(own_cache))
        data = prepared(source, tokenizer)
        for name in set(kept(own_cache)) - before:
            os.utime(own_cache / "tokens" / name / "manifest.json", (age, age))
        return data

    first = aged(paths[0], 1000)
    expected = [first.train.row(i).input_ids.tolist() for i in range(len(first.train))]
    aged(paths[1], 2000)
    assert prepared(paths[0], tokenizer).summary[
        "cached"
    ]  # used again, so that the second is now the oldest
    aged(paths[2], 3000)
    assert len(kept(own_cache)) == 3 and "mine" in kept(own_cache)
    assert prepared(paths[0], tokenizer).summary["cached"]
    assert not prepared(paths[1], tokenizer).summary["cached"]
    monkeypatch.setattr(token_cache, "_LEAST_BYTES", 0)
    monkeypatch.setattr(token_cache.shutil, "disk_usage", lambda _: type("", (), {"total": 0}))
    mix = prepared(tuple(DataSource(str(path)) for path in paths), tokenizer)
    assert len(kept(own_cache)) == 4  # a mix never removes its own parts
    prepared(paths[2], tokenizer)
    assert len(kept(own_cache)) == 2
    assert [first.train.row(i).input_ids.tolist() for i in range(len(first.train))] == expected
    assert mix.train.row(0).documents >= 1 and len(mix.eval_prompts(3)) == 3


def test_the_cache_is_where_the_user_expects_it(monkeypatch, tmp_path):
    monkeypatch.setenv("RAMSTREAM_CACHE", str(tmp_path / "own"))
    assert token_cache.cache_folder() == tmp_path / "own" / "tokens"
    monkeypatch.delenv("RAMSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert token_cache.cache_folder() == tmp_path / "xdg" / "ramstream" / "tokens"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert token_cache.cache_folder() == tmp_path / ".cache" / "ramstream" / "tokens"


# ---------------------------------------------------------------------- what tokens depend on


def test_a_change_of_any_file_that_makes_tokens_makes_kept_ones_old():
    modules = imported_by(
        "engine.data.tokens.tokenize", "engine.data.tokens.encode", "engine.data.tokens.workers"
    )
    found = packages_of(modules)
    assert {"config", "data/formats", "data/sources", "data/tokens"} <= found
    # How many processes divide the work, and what is said where memory is short, is no matter of
    # what they make.
    assert {each.partition("/")[0] for each in found} - {"machine"} <= set(cache_key.ROOMS)
    assert {name for name in modules if name.startswith("engine.machine.")} == {
        "engine.machine.cgroups",
        "engine.machine.short_memory",
    }


OTHER_VALUES = {
    "format": "text",
    "columns": DataColumns(prompt="other"),
    "max_seq_len": 64,
    "long_texts": "cut",
    "overlap": 3,
    "train_on": "all",
    "dropped_turns": "skip",
    "typed_tokens": "refuse",
    "add_tokens": ("<more>",),
    "roles": ("bot=assistant",),
    "unused_flags": ("good",),
    "eval_fraction": 0.2,
}
OF_THE_SOURCE = {"source", "split"}
"""They are part of the identity of the source."""
AFTERWARDS = {"packing", "shuffle"}
"""They choose among tokens, or put them in rows."""


def test_every_setting_of_data_is_part_of_the_key_or_known_to_change_no_token(tokenizer):
    fields = {field.name for field in dataclasses.fields(DataConfig)}
    assert fields == OTHER_VALUES.keys() | OF_THE_SOURCE | AFTERWARDS

    def key(config):
        return cache_key.key_of(["files"], config, tokenizer)

    plain = DataConfig(source="a.jsonl")
    for name, value in OTHER_VALUES.items():
        assert getattr(plain, name) != value
        other = copy.copy(plain)
        object.__setattr__(other, name, value)  # not every value is valid by itself
        assert key(other) != key(plain), name
    paired = PairedData(**{name: getattr(plain, name) for name in fields})
    assert paired.reads != plain.reads and key(paired) != key(plain)
    for name in AFTERWARDS:
        assert key(dataclasses.replace(plain, **{name: not getattr(plain, name)})) == key(plain)
    columns = {
        key(dataclasses.replace(plain, columns=DataColumns(**{field.name: "mine"})))
        for field in dataclasses.fields(DataColumns)
    }
    assert len(columns | {key(plain)}) == len(dataclasses.fields(DataColumns)) + 1


def test_the_program_is_its_code_its_libraries_and_its_python(monkeypatch):
    before = cache_key._code()
    assert before == cache_key.PROGRAM
    seen = {json.dumps(before)}
    for library in cache_key.LIBRARIES:
        other = {library: "0.1"}
        version = importlib.metadata.version
        monkeypatch.setattr(
            importlib.metadata, "version", lambda name: other.get(name) or version(name)
        )
        seen.add(json.dumps(cache_key._code()))
        monkeypatch.undo()
    monkeypatch.setattr(cache_key, "code_digest", lambda rooms: "of other code")
    seen.add(json.dumps(cache_key._code()))
    assert len(seen) == len(cache_key.LIBRARIES) + 2
