"""Columns whose names do not say what they contain are named in the settings, guessed, or refused
in one sentence.
"""

from __future__ import annotations

import csv

import pytest

from engine.config.data_settings import DataColumns, DataConfig
from engine.config.settings import TrainConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.data.formats.choose_columns import guessed
from engine.errors import ConfigError, DataError
from tests.support.rows import write_rows

ODD = [
    {"nr": "1", "Frage": "hello", "Wohin": "an hello"},
    {"nr": "2", "Frage": "he", "Wohin": "an he"},
]
NAMED = DataColumns(prompt="Frage", completion="Wohin")


def config(path, **changes):
    return DataConfig(
        **{"source": str(path), "max_seq_len": 128, "eval_fraction": 0.0, "packing": False}
        | changes
    )


def loss_mask(shown):
    return [
        "".join(
            piece["text"] for document in row["documents"] for piece in document if piece["trained"]
        )
        for row in shown["rows"]
    ]


def preset(**data):
    return TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"} | data})


def test_named_columns_train_what_usual_names_would(tmp_path, tokenizer):
    usual = [{"prompt": row["Frage"], "completion": row["Wohin"]} for row in ODD]
    found = prepare_data(
        config(write_rows(tmp_path / "odd.jsonl", ODD), columns=NAMED), tokenizer, 1
    )
    expected = prepare_data(config(write_rows(tmp_path / "usual.jsonl", usual)), tokenizer, 1)
    assert found.train.ids.tolist() == expected.train.ids.tolist()
    assert found.train.loss_mask.tolist() == expected.train.loss_mask.tolist()
    assert found.summary["unused_columns"] == ["nr"] and not found.summary["format_detected"]


def test_other_columns_are_other_tokens_in_the_cache(tmp_path, tokenizer):
    path = write_rows(tmp_path / "odd.jsonl", ODD)
    one = prepare_data(config(path, columns=NAMED), tokenizer, 1)
    turned = prepare_data(
        config(path, columns=DataColumns(prompt="Wohin", completion="Frage")), tokenizer, 1
    )
    assert one.fingerprint != turned.fingerprint


def test_what_is_not_named_is_found_by_its_usual_name_where_it_has_to_be_there(tmp_path, tokenizer):
    rows = [{"Frage": "hello", "answer": "an hello", "system": "be"}]
    shown = preview(
        config(write_rows(tmp_path / "a.jsonl", rows), columns=DataColumns(prompt="Frage")),
        tokenizer,
    )
    assert shown["mapping"]["chosen"] == {"prompt": "Frage", "completion": "answer"}, (
        "and no system turn: it is not named"
    )


def test_a_source_of_a_mix_has_columns_of_its_own(tmp_path, tokenizer):
    first, second = (
        write_rows(tmp_path / "a.jsonl", ODD),
        write_rows(tmp_path / "b.jsonl", [{"prompt": "he", "completion": "an"}]),
    )
    mixed = preset(
        max_seq_len=128,
        source=[
            {"source": str(first), "columns": {"prompt": "Frage", "completion": "Wohin"}},
            {"source": str(second)},
        ],
    )
    assert prepare_data(mixed.data, tokenizer, 1).train.loss_tokens > 0
    mapping = preview(mixed.data, tokenizer)["mapping"]
    assert (mapping["state"], mapping["mix"]["place"], mapping["mix"]["name"]) == (
        "named",
        0,
        "a.jsonl",
    )


def test_of_a_mix_the_sources_are_asked_for_that_a_run_would_refuse(tmp_path, tokenizer):
    paths = [
        write_rows(tmp_path / f"{name}.jsonl", rows)
        for name, rows in (
            ("usual", [{"prompt": "he", "completion": "an"}]),
            ("odd", ODD),
            ("none", [{"a": 1, "b": 2}]),
        )
    ]
    sources = [{"source": str(path), "weight": 2} for path in paths]
    shown = preview(preset(source=sources).data, tokenizer)
    assert (
        "none.jsonl (a, b) fit no known format" in shown["error"]
        and shown["mapping"]["mix"]["place"] == 1
    ), "one by one"
    found = [
        *sources[:1],
        sources[1] | {"columns": {"prompt": "Frage", "completion": "Wohin"}},
        sources[2],
    ]
    shown = preview(preset(source=found).data, tokenizer)
    assert "none.jsonl" in shown["error"]
    assert (shown["mapping"]["state"], shown["mapping"]["mix"]["place"]) == ("none", 2)
    half = [sources[0], sources[1] | {"columns": {"prompt": "Frage"}}]
    shown = preview(preset(source=half).data, tokenizer)
    assert "error" in shown
    assert shown["mapping"]["state"] == "named"
    assert shown["mapping"]["refused"]

    shown = preview(preset(source=sources[:2]).data, tokenizer)
    mapping = shown["mapping"]
    assert mapping["state"] == "guess" and mapping["refused"]
    assert mapping["chosen"] == {"prompt": "Frage", "completion": "Wohin"}
    assert mapping["mix"] == {
        "sources": sources[:2],
        "place": 1,
        "name": "odd.jsonl",
        "format": "auto",
    }
    assert any("an hello" in text for text in loss_mask(shown))

    found = [sources[0], sources[1] | {"columns": mapping["chosen"]}]
    mapping = preview(preset(source=found).data, tokenizer)["mapping"]
    assert mapping["state"] == "named"
    assert not mapping["refused"]
    assert mapping["mix"]["sources"] == found
    assert preview(preset(source=sources[:1] * 2).data, tokenizer)["mapping"] is None, (
        "nothing to be told"
    )


# ---------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (
            {"columns": {"promt": "a"}},
            "data.columns.promt: there is no such setting; did you mean prompt.",
        ),
        (
            {"columns": {"prompt": "a", "text": "b"}},
            "data.columns.text: no example has both prompt and text; set one ",
        ),
        (
            {"columns": {"prompt": "a", "completion": "a"}},
            "data.columns.prompt: the column a is also named as the completion",
        ),
        ({"columns": {"text": "a", "tools": "b"}}, "data.columns.text: no"),
        ({"columns": {"text": ""}}, "data.columns.text: this names no column"),
        (
            {"format": "messages", "columns": {"text": "a"}},
            "data.columns.text: data.format is messages, which has messages, ",
        ),
        ({"columns": "a"}, "data.columns: expected a mapping of settings"),
        (
            {"source": [{"source": "a", "columns": {"speech": "b"}}]},
            "data.source[0].columns.speech: there is no such setting",
        ),
    ],
)
def test_wrong_columns_are_refused_in_a_sentence(data, text):
    with pytest.raises(ConfigError) as caught:
        preset(**data)
    assert str(caught.value).startswith(text) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("columns", "text"),
    [
        (
            {"prompt": "Frag", "completion": "Wohin"},
            "data.columns.prompt is Frag, but odd.jsonl has the columns nr, Frage, Wohin",
        ),
        (
            {"prompt": "Frage"},
            "In data.columns, only prompt is named, and odd.jsonl (nr, Frage, Wohin) has no "
            "column with a usual name for the rest; set data.columns.completion too.",
        ),
        (
            {"messages": "Frage"},
            "The column Frage in line 1 of odd.jsonl is text, not a list of turns",
        ),
    ],
)
def test_columns_that_the_data_do_not_have_are_refused_in_a_sentence(
    tmp_path, tokenizer, columns, text
):
    path = write_rows(tmp_path / "odd.jsonl", ODD)
    with pytest.raises(DataError) as caught:
        prepare_data(config(path, columns=DataColumns(**columns)), tokenizer, 1)
    assert text in str(caught.value) and "\n" not in str(caught.value)


def test_columns_can_be_set_on_the_command_line(tmp_path):
    path = tmp_path / "preset.yaml"
    path.write_text(
        "model: {source: m}\ndata: {source: d, columns: {prompt: Frage}}\n", encoding="utf-8"
    )
    found = TrainConfig.load(path, ["data.columns.completion=Wohin"])
    assert found.data.columns == NAMED
    found.save(path)
    assert TrainConfig.load(path) == found


# ---------------------------------------------------------------------- what a person is shown


def test_a_guess_is_shown_with_its_tokens_and_what_a_run_would_say(tmp_path, tokenizer):
    path = tmp_path / "odd.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, ["nr", "Frage", "Wohin"])
        table.writeheader()
        table.writerows(ODD)
    shown = preview(config(path), tokenizer)
    mapping = shown["mapping"]
    assert (mapping["state"], mapping["kind"]) == ("guess", "pair")
    assert mapping["chosen"] == {"prompt": "Frage", "completion": "Wohin"}
    assert mapping["why"] == "", "nothing was asked for"
    other = preview(config(path, columns=DataColumns(text="body")), tokenizer)["mapping"]
    assert other["state"] == "guess"
    assert other["why"].startswith("data.columns.text is body, but odd.csv has the columns nr, ")
    assert mapping["columns"][1] == {"name": "Frage", "example": "hello"}
    assert "an hello" in loss_mask(shown)[0]
    assert "hello" not in loss_mask(shown)[0].replace("an hello", "")
    with pytest.raises(DataError, match="fit no known format"):
        prepare_data(config(path), tokenizer, 1)


@pytest.mark.parametrize(
    ("row", "changes", "state"),
    [
        ({"prompt": "he", "completion": "an"}, {}, "found"),
        ({"prompt": "he", "completion": "an", "text": "he an"}, {}, "several"),
        ({"prompt": "he", "completion": "an", "answer": "hello"}, {}, "several"),
        (
            {"prompt": "he", "completion": "an", "text": "he an"},
            {"format": "prompt_completion"},
            "found",
        ),
        (
            {"prompt": "he", "completion": "an", "text": "he an"},
            {"columns": DataColumns(text="text")},
            "named",
        ),
        ({"a": 1, "b": 2}, {}, "none"),
        ({"prompt": "he", "completion": "an"}, {"columns": NAMED}, "guess"),
        ({"prompt": "he", "completion": 3}, {}, "found"),
    ],
)
def test_how_sure_it_is_is_said(tmp_path, tokenizer, row, changes, state):
    shown = preview(config(write_rows(tmp_path / "a.jsonl", [row]), **changes), tokenizer)
    assert shown["mapping"]["state"] == state
    assert ("error" in shown) == (state == "none" or row.get("completion") == 3)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"userQuestion": "a", "model_reply": "b"},
            {"prompt": "userQuestion", "completion": "model_reply"},
        ),
        (
            {"Reply": "b", "System prompt": "c", "Query": "a"},
            {"prompt": "Query", "completion": "Reply", "system": "System prompt"},
        ),
        ({"id": "1", "body": "a b"}, {"text": "body"}),
        ({"talk": [{"role": "user", "content": "a"}], "topic": "x"}, {"messages": "talk"}),
        (
            {"short": "a", "first": "aaaa", "second": "bbb"},
            {"prompt": "first", "completion": "second"},
        ),
        ({"n": 1}, {}),
    ],
)
def test_guesses_go_by_names_then_by_values(row, expected):
    assert guessed([row]) == expected


def test_examples_are_one_short_line(tmp_path, tokenizer):
    row = {
        "prompt": "a\n" * 500,
        "completion": "an",
        "meta": {"k": [1, 2]},
        "<img src=x onerror=alert(1)>": None,
    }
    columns = {
        column["name"]: column["example"]
        for column in preview(config(write_rows(tmp_path / "a.jsonl", [row])), tokenizer)[
            "mapping"
        ]["columns"]
    }
    assert "\n" not in columns["prompt"] and len(columns["prompt"]) < 100
    assert columns["meta"] == '{"k": [1, 2]}' and columns["<img src=x onerror=alert(1)>"] == ""


def test_a_column_without_a_name_is_no_guess_and_no_fault(tmp_path, tokenizer):
    path = tmp_path / "a.tsv"
    path.write_text("\tthis one\tand this\nx y z\tthe first\tthe second\nx\tso\tthen\n")
    shown = preview(DataConfig(source=str(path)), tokenizer)
    assert set(shown["mapping"]["chosen"].values()) == {"this one", "and this"}
    path.write_text("\tid\nx y z\t1\nx\t2\n")
    shown = preview(DataConfig(source=str(path)), tokenizer)
    assert shown["mapping"]["chosen"] == {"text": ""} and shown["rows_measured"] == 2
