"""A registry that LLaMA-Factory wrote works as it is: each form of entry that it knows is read, or
refused for what it is.
"""

from __future__ import annotations

import json

import pytest

from engine.config.data_settings import DataColumns, DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.formats.example import Conversation, Pair, Text
from engine.data.formats.formats import map_columns
from engine.data.sources.open_source import open_source
from engine.data.sources.registry import registered
from engine.errors import DataError
from tests.support import references as reference

OPENAI = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
}
ASKED, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "an hello"}
SAID = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "an hello"}]
CHOICE = {"chosen": SAID[1], "rejected": {"from": "gpt", "value": "no"}}
PAIR = Pair("hello", "an hello", separator="\n\n")
TALK = Conversation([ASKED, ANSWER])

READ = {
    "plain": ({}, {"instruction": "hello", "input": "", "output": "an hello"}, PAIR),
    "all columns": (
        {
            "columns": {
                "prompt": "q",
                "query": "more",
                "response": "a",
                "system": "s",
                "history": "h",
            }
        },
        {"q": "hello", "more": "there", "a": "an hello", "s": "be", "h": []},
        Pair("hello\nthere", "an hello", "be", "\n\n"),
    ),
    "a query that is not named": (
        {"columns": {"prompt": "instruction", "response": "output"}},
        {"instruction": "hello", "input": "unused", "output": "an hello"},
        PAIR,
    ),
    "text": ({"columns": {"prompt": "text"}}, {"text": "a b", "id": 1}, Text("a b")),
    "content": ({"columns": {"prompt": "raw"}}, {"raw": "a b", "text": "c"}, Text("a b")),
    "sharegpt": ({"formatting": "sharegpt"}, {"conversations": SAID}, TALK),
    "openai turns": (
        {"formatting": "sharegpt", "columns": {"messages": "messages"}, "tags": OPENAI},
        {"messages": [ASKED, ANSWER]},
        TALK,
    ),
    "openai": (
        {"formatting": "openai", "columns": {"messages": "messages"}},
        {"messages": [ASKED, ANSWER | {"weight": 0}]},
        Conversation([ASKED, ANSWER], untrained=frozenset({1})),
    ),
    "ranking": (
        {"ranking": True, "columns": {"prompt": "q", "chosen": "good", "rejected": "bad"}},
        {"q": "hello", "good": "an hello", "bad": "no"},
        Pair("hello", "an hello", separator="\n\n"),
    ),
    "ranking without names": (
        {"ranking": True},
        {"instruction": "hello", "chosen": "an hello", "rejected": "no", "output": "old"},
        Pair("hello", "an hello", separator="\n\n"),
    ),
    "ranking of turns": (
        {
            "ranking": True,
            "formatting": "sharegpt",
            "columns": {"messages": "conversations", "chosen": "chosen", "rejected": "rejected"},
        },
        {"conversations": SAID[:1], **CHOICE},
        Conversation([ASKED, ANSWER], 1),
    ),
}
HUBS = {
    "two hubs": (
        {"hf_hub_url": "a/b", "ms_hub_url": "c/d", "om_hub_url": "e/f"},
        ("a/b", "train", {}),
    ),
    "a subset": (
        {"hf_hub_url": "a/b", "subset": "en", "split": "full"},
        ("a/b:en", "full", {}),
    ),
    "a folder": (
        {"hf_hub_url": "a/b", "folder": "python", "columns": {"prompt": "content"}},
        ("a/b", "train", {"data_dir": "python"}),
    ),
    "a hub beside a script": (
        {"hf_hub_url": "a/b", "script_url": "c", "file_name": "gone.json"},
        ("a/b", "train", {}),
    ),
}
IMAGES = {"formatting": "sharegpt", "columns": {"messages": "messages", "images": "images"}}
REFUSED = {
    "kto": ({"columns": {"kto_tag": "label"}}, r"columns\.kto_tag: it marks answers as good"),
    "images": (IMAGES, r"columns\.images: it holds images, but only text"),
    "videos": ({"columns": {"videos": "v"}}, r"columns\.videos: it holds videos, but only text"),
    "audios": ({"columns": {"audios": "a"}}, r"columns\.audios: it holds sounds, but only text"),
    "ranked images": (IMAGES | {"ranking": True}, r"columns\.images: it holds images"),
    "ModelScope": ({"file_name": None, "ms_hub_url": "a/b"}, r"at ModelScope \(ms_hub_url\), "),
    "a script": ({"file_name": None, "script_url": "a"}, r"with a script \(script_url\)"),
    "a cloud": ({"file_name": None, "cloud_file_name": "s3://a"}, r"\(cloud_file_name\)"),
}


def written(folder, entry, row=None) -> str:
    (folder / "rows.json").write_text(json.dumps([row or {"text": "a"}]))
    path = folder / "dataset_info.json"
    path.write_text(json.dumps({"a": {"file_name": "rows.json"} | entry}))
    return f"{path}:a"


@pytest.mark.parametrize("name", READ)
def test_every_form_of_an_entry_is_read(tmp_path, name):
    entry, row, expected = READ[name]
    source = open_source(DataConfig(source=written(tmp_path, entry, row)))
    ((number, found),) = source.read()
    columns = map_columns("auto", [found], source, DataColumns())
    assert columns.example(found, source.where(number)) == expected
    assert columns.known_columns() == set(row)


@pytest.mark.parametrize("name", HUBS)
def test_an_entry_of_the_hub_is_accepted_without_a_network(tmp_path, name):
    entry, expected = HUBS[name]
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({"a": entry}))
    found = registered(DataConfig(source=f"{path}:a"))
    assert (found.config.source, found.config.split, found.hub) == expected


def test_the_folder_of_an_entry_reaches_the_hub(tmp_path, monkeypatch):
    import datasets

    asked = []

    def load(name, subset=None, **named):
        asked.append((name, subset, named))
        return datasets.Dataset.from_list([{"content": "a b"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    entry = HUBS["a folder"][0]
    source = open_source(DataConfig(source=written(tmp_path, entry | {"file_name": None})))
    assert [row for _, row in source.read()] == [{"content": "a b"}]
    assert asked == [
        ("a/b", None, {"split": "train", "streaming": False, "data_dir": "python"}),
    ]


@pytest.mark.parametrize("name", REFUSED)
def test_an_entry_that_is_not_trained_is_named_for_what_it_is(tmp_path, name):
    entry, shown = REFUSED[name]
    with pytest.raises(DataError, match=rf"^The entry a of dataset_info\.json .*{shown}.*\.$"):
        registered(DataConfig(source=written(tmp_path, entry)))


def test_a_registry_without_a_name_lists_its_entries(tmp_path):
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps({f"set{i:03}": {"hf_hub_url": "a/b"} for i in range(104)}))
    with pytest.raises(DataError, match=r"is a registry of data sets.*:set000 to.* and 84 more"):
        open_source(DataConfig(source=str(path)))
    with pytest.raises(DataError, match=r"no entry x in .* and 84 more\.$"):
        open_source(DataConfig(source=f"{path}:x"))


def test_another_json_file_is_no_registry(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"text": {"file_name": 1}, "other": 2}))
    assert registered(DataConfig(source=str(path))) is None


FAULTS = {
    "a mark": ({"label": False}, r"^The column label of rows\.json marks answers as good or bad"),
    "a weight": ({"weight": 0.5}, r"^The column weight in item 1 of rows\.json is 0\.5, but rows"),
    "no text": ({"q": 5}, r"^The column q in item 1 of rows\.json is a number, not text"),
    "an image": ({"image": "a.png"}, r"^The column image in item 1 of rows\.json holds an image"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_columns_have_the_files_own_names_in_errors(tmp_path, name):
    more, shown = FAULTS[name]
    entry = {"columns": {"prompt": "q", "response": "a"}}
    source = written(tmp_path, entry, {"q": "hello", "a": "an he"} | more)
    with pytest.raises(DataError, match=shown):
        prepare_data(DataConfig(source=source, eval_fraction=0.0), reference.tokenizer("qwen"), 1)
