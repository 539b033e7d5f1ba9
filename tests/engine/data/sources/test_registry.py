"""Entries of a dataset_info.json give the same rows as files with the standard column names."""

from __future__ import annotations

import json
import pickle

import pytest

from engine.config.data_settings import DataConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.sources.open_source import notes_on, open_source
from engine.errors import DataError
from engine.paths import lasting_source
from tests.support import references as reference

ENTRIES = {
    "plain": {"file_name": "alpaca.json"},
    "renamed": {
        "file_name": "renamed.json",
        "columns": {"prompt": "q", "query": "more", "response": "a", "system": "s"},
    },
    "history": {"file_name": "history.json", "columns": {"history": "before"}},
    "turns": {
        "file_name": "turns.json",
        "formatting": "sharegpt",
        "columns": {"messages": "talk", "tools": "tools"},
        "tags": {"role_tag": "who", "content_tag": "said", "user_tag": "me", "assistant_tag": "it"},
    },
    "hub": {"hf_hub_url": "owner/name", "subset": "main", "split": "test"},
    "ranked": {"file_name": "alpaca.json", "ranking": True},
    "images": {"file_name": "a.json", "formatting": "llava"},
    "few": {"file_name": "many.jsonl", "num_samples": 3, "columns": {"history": ""}},
    "more": {"file_name": "many.jsonl", "num_samples": 50},
    "called": {"file_name": "called.json", "columns": {"tools": "functions"}},
    "nowhere": {"columns": {}},
    "lost": {"file_name": "lost.json"},
    "odd": {"file_name": "alpaca.json", "tags": ["a"]},
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
    }
]
FILES = {
    "alpaca.json": [{"instruction": "hello", "input": "an", "output": "he", "system": "unused"}],
    "renamed.json": [{"q": "hello", "more": "an", "a": "he", "s": "be", "output": "another thing"}],
    "called.json": [
        {"instruction": "hello", "input": "an", "output": "he", "functions": json.dumps(TOOLS)},
        {"instruction": "no answer", "output": " "},
    ],
    "history.json": [
        {"instruction": "two", "input": "", "output": "he", "before": [["one", "an"]]}
    ],
    "turns.json": [
        {"talk": [{"who": "me", "said": "hello"}, {"who": "it", "said": "he"}], "tools": "[]"}
    ],
}
SYSTEM, ASKED, ANSWER = (
    {"role": "system", "content": "be"},
    {"role": "user", "content": "hello\nan"},
    {"role": "assistant", "content": "he"},
)
EXPECTED = {
    "renamed": [SYSTEM, ASKED, ANSWER],
    "history": [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "an"},
        {"role": "user", "content": "two"},
        ANSWER,
    ],
    "turns": [{"role": "user", "content": "hello"}, ANSWER],
}


@pytest.fixture(scope="module")
def tokenizer():
    return reference.tokenizer("qwen")


@pytest.fixture
def registry(tmp_path):
    for name, rows in FILES.items():
        (tmp_path / name).write_text(json.dumps(rows))
    (tmp_path / "many.jsonl").write_text(
        "".join(json.dumps({"instruction": f"q{i}", "output": "an"}) + "\n" for i in range(9))
    )
    path = tmp_path / "dataset_info.json"
    path.write_text(json.dumps(ENTRIES))
    return path


def config(registry, name) -> DataConfig:
    return DataConfig(source=f"{registry}:{name}", packing=False, eval_fraction=0.0)


@pytest.mark.parametrize("name", EXPECTED)
def test_an_entrys_columns_and_speakers_are_read_under_its_names(registry, tokenizer, name):
    data = prepare_data(config(registry, name), tokenizer, 1)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template(EXPECTED[name])["input_ids"]
    assert preview(config(registry, name), tokenizer)["rows_measured"] == 1


def test_an_entry_without_names_has_alpacas(registry, tokenizer):
    data = prepare_data(config(registry, "plain"), tokenizer, 1)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template([ASKED, ANSWER])["input_ids"]
    assert data.summary["unused_columns"] == ["system"]
    assert data.summary["format"] == "alpaca" and data.summary["source"] == "alpaca.json"


def test_tools_of_an_alpaca_entry_reach_the_template(registry, tokenizer):
    data = prepare_data(config(registry, "called"), tokenizer, 1)
    assert (
        data.train.ids.tolist()
        == tokenizer.apply_chat_template([ASKED, ANSWER], tools=TOOLS)["input_ids"]
    )
    assert data.summary["rows_skipped"] == 1


@pytest.mark.parametrize(("name", "count"), [("few", 3), ("more", 9)])
def test_num_samples_takes_the_first_rows_and_says_so(registry, tokenizer, name, count):
    data = prepare_data(config(registry, name), tokenizer, 1)
    texts = tokenizer.decode(data.train.ids.tolist())
    assert [f"q{i}" in texts for i in range(9)] == [i < count for i in range(9)]
    assert data.summary["rows_read"] == count
    shown = preview(config(registry, name), tokenizer)
    assert shown["rows_measured"] == count
    text = (
        f"No more than the first {ENTRIES[name]['num_samples']} rows of "
        f"{registry.parent / 'many.jsonl'} are read"
    )
    for warnings in (data.summary["warnings"], shown["warnings"]):
        assert sum(warning.startswith(text) for warning in warnings) == 1


WRONG = {
    "kto": (
        {"columns": {"kto_tag": "label"}},
        r"has columns\.kto_tag: it marks answers as good or bad",
    ),
    "pictures": (
        {"columns": {"images": "pictures"}},
        r"has columns\.images: it holds images, but only text is trained on; ",
    ),
    "chosen": (
        {"columns": {"chosen": "better"}},
        r"takes the column better \(columns\.chosen\), which is not in item 1 of alpaca\.json; ",
    ),
    "a column": (
        {"columns": {"respons": "a"}},
        r"has columns\.respons, which is not known there; write response if",
    ),
    "another kind's column": (
        {"formatting": "sharegpt", "columns": {"message": "a"}},
        r"has .* write messages if",
    ),
    "a tag": (
        {"formatting": "sharegpt", "tags": {"user_tags": "a"}},
        r"has tags\.user_tags, .* write user_tag if",
    ),
    "a column for a tag": (
        {"tags": {"kto_tag": "a"}},
        r"has tags\.kto_tag, which is not known there",
    ),
    "a key": ({"formating": "sharegpt"}, r"has formating, which is not known; write formatting if"),
    "a folder": ({"folder": "sub"}, r"has folder, which is not supported"),
    "no text": ({"formatting": ["alpaca"]}, r"has a formatting that is not text"),
    "no count": ({"num_samples": 0}, r"has num_samples 0; write a whole number from 1 on"),
    "half": ({"num_samples": 1.5}, r"has num_samples 1\.5; "),
    "true": ({"num_samples": True}, r"has num_samples true; "),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_an_entry_asks_for_and_is_not_done_is_refused_by_name(registry, tokenizer, name):
    entry, sentence = WRONG[name]
    registry.write_text(
        json.dumps({"a": {"file_name": "alpaca.json", "description": "ours"} | entry})
    )
    for use in (
        lambda found: prepare_data(found, tokenizer, 1),
        lambda found: preview(found, tokenizer),
    ):
        with pytest.raises(DataError, match=rf"^The entry a of dataset_info\.json {sentence}.*\.$"):
            use(config(registry, "a"))


@pytest.mark.parametrize(
    "history",
    [
        ["three four", "on"],
        ["ab"],
        5,
        [5],
        [["a"]],
        [["a", "b", "c"]],
        [["a", 1]],
        [["a", None]],
        "text",
        {"a": "b"},
        [{"a": 1, "b": 2}],
    ],
)
def test_a_history_that_is_no_list_of_pairs_names_the_row(registry, tokenizer, history):
    rows = [*FILES["history.json"], {"instruction": "two", "output": "he", "before": history}]
    (registry.parent / "history.json").write_text(json.dumps(rows))
    with pytest.raises(
        DataError, match=r"^The column before in item 2 of history\.json is not a list of pairs "
    ):
        prepare_data(config(registry, "history"), tokenizer, 1)


@pytest.mark.parametrize("history", [None, [], ""])
def test_a_row_without_history_is_a_conversation_without_it(registry, tokenizer, history):
    row = {"instruction": "hello", "input": "an", "output": "he", "before": history}
    (registry.parent / "history.json").write_text(json.dumps([row]))
    data = prepare_data(config(registry, "history"), tokenizer, 1)
    assert data.train.ids.tolist() == tokenizer.apply_chat_template([ASKED, ANSWER])["input_ids"]


def test_a_question_that_is_no_text_is_refused_with_a_history_too(registry, tokenizer):
    (registry.parent / "history.json").write_text(
        json.dumps([{"instruction": 0, "output": "he", "before": []}])
    )
    with pytest.raises(
        DataError, match=r"column instruction in item 1 of history\.json is a number, not text"
    ):
        prepare_data(config(registry, "history"), tokenizer, 1)


def test_a_hub_entry_gives_id_subset_and_split(registry, tokenizer, monkeypatch):
    import datasets

    asked = []

    def load(name, subset=None, split=None, streaming=False):
        asked.append((name, subset, split))
        return datasets.Dataset.from_list(FILES["alpaca.json"])

    monkeypatch.setattr(datasets, "load_dataset", load)
    prepare_data(config(registry, "hub"), tokenizer, 1)
    assert asked == [("owner/name", "main", "test")]


def test_a_registered_source_is_kept_as_a_whole_path(registry, monkeypatch):
    monkeypatch.chdir(registry.parent)
    assert lasting_source("dataset_info.json:plain") == f"{registry}:plain"


def test_only_bundled_files_are_kept_by_their_short_name(tmp_path, monkeypatch):
    program = tmp_path / "program"
    for folder in ("assets", "mine"):
        (program / folder).mkdir(parents=True)
        (program / folder / "x.jsonl").write_text("{}")
    monkeypatch.setattr("engine.paths.PROGRAM_ROOT", program)
    monkeypatch.chdir(program)
    assert lasting_source("assets/x.jsonl") == "assets/x.jsonl"
    monkeypatch.chdir(program / "mine")
    assert lasting_source("assets/x.jsonl") == "assets/x.jsonl"
    assert lasting_source("x.jsonl") == str(program / "mine" / "x.jsonl")
    assert lasting_source(str(program / "mine" / "x.jsonl")) == str(program / "mine" / "x.jsonl")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "other",
            r"^There is no entry other in dataset_info\.json; it has called, few, history, hub, ",
        ),
        ("ranked", r"^The entry ranked of dataset_info\.json takes the column chosen "),
        ("images", r"has the formatting llava; use alpaca, sharegpt or openai"),
        ("nowhere", r"neither file_name nor hf_hub_url"),
        ("lost", r"names the file lost\.json, which is not beside it"),
        ("odd", r"^The tags of the entry odd .*are not names"),
    ],
)
def test_an_entry_that_cannot_be_used_is_one_sentence(registry, tokenizer, name, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        prepare_data(config(registry, name), tokenizer, 1)
    assert str(caught.value).endswith(".")


def test_a_registry_that_is_not_there_is_a_missing_file(tokenizer):
    with pytest.raises(
        DataError, match=r"^There is no file nowhere/dataset_info\.json:a; check data\.source"
    ):
        prepare_data(config("nowhere/dataset_info.json", "a"), tokenizer, 1)


def with_entry(place, **values):
    """Writes a registry with one entry, as a stranger may have."""
    place.mkdir(exist_ok=True)
    (place / "dataset_info.json").write_text(json.dumps({"it": values}))
    return DataConfig(source=f"{place / 'dataset_info.json'}:it")


@pytest.mark.parametrize("kind", ["relative", "absolute", "link"])
def test_a_file_outside_of_the_registrys_folder_is_told(tmp_path, kind):
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps(FILES["alpaca.json"]))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "link.json").symlink_to(rows)
    names = {"relative": "../rows.json", "absolute": str(rows), "link": "link.json"}
    config = with_entry(tmp_path / "theirs", file_name=names[kind])
    assert len(list(open_source(config).read())) == 1
    found = f"The entry it of dataset_info.json reads {rows}, which is outside of its folder."
    assert found in notes_on(config)
    (tmp_path / "theirs" / "own.json").write_text(rows.read_text())
    assert notes_on(with_entry(tmp_path / "theirs", file_name="own.json")) == []


@pytest.mark.parametrize("reader", ["pandas", "generator", "spark", "sql"])
def test_an_entry_names_no_reader_that_runs_code(tmp_path, reader):
    """A folder of pickles, as `pandas` of datasets 4 reads it."""
    mark = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return open, (str(mark), "w")

    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "train.pkl").write_bytes(pickle.dumps(Evil()))
    config = with_entry(tmp_path / "theirs", hf_hub_url=reader, folder=str(tmp_path / "rows"))
    with pytest.raises(DataError, match=f"^{reader} is a part of datasets that runs "):
        open_source(config, streaming=True)
    assert not mark.exists()


def test_a_registry_is_small(tmp_path, tokenizer):
    config = with_entry(tmp_path, file_name="a.json", more="x" * (9 << 20))
    with pytest.raises(DataError, match="cannot be read as JSON"):
        open_source(config)
