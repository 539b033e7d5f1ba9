"""Several sources are mixed with weights: which rows an epoch visits, which are for validation, and
that the preset and the form describe the same mix.
"""

from __future__ import annotations

from collections import Counter

import pytest
import yaml

from app.form.settings_form import read_config, shown_values
from engine.config.data_settings import DataConfig
from engine.config.settings import TrainConfig
from engine.data.batches.loader import prepare_data
from engine.data.batches.preview import preview
from engine.errors import ConfigError, DataError
from engine.paths import lasting_sources
from tests.support.rows import write_rows

TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "an"}]


@pytest.fixture
def files(tmp_path):
    rows = {
        "a": [{"prompt": f"a{i}.", "completion": "x"} for i in range(20)],
        "b": [{"instruction": f"b{i}.", "output": "y"} for i in range(10)],
        "c": [{"messages": TURNS}] * 10,
    }
    for name, written in rows.items():
        write_rows(tmp_path / f"{name}.jsonl", written)
    return {name: str(tmp_path / f"{name}.jsonl") for name in rows}


def config(parts, **data) -> TrainConfig:
    return TrainConfig.from_dict(
        {"model": {"source": "m"}, "data": {"source": parts, "max_seq_len": 64, **data}}
    )


def asked(rows, tokenizer) -> Counter[str]:
    return Counter(
        tokenizer.decode(rows.ids[a:b].tolist()).split("user\n")[1].split("<")[0]
        for a, b in zip(rows.starts, rows.starts[1:])
    )


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_weights_are_visits_an_epoch_and_validation_rows_are_never_repeated(files, tokenizer):
    mix = config(
        [{"source": files["a"], "weight": 0.5}, {"source": files["b"], "weight": 2.5}, files["c"]],
        eval_fraction=0.2,
    ).data
    data = prepare_data(mix, tokenizer, 1)
    visits, validation = asked(data.train, tokenizer), asked(data.eval, tokenizer)
    by_source = {
        name: Counter({text: n for text, n in visits.items() if text.startswith(name)})
        for name in "abh"
    }
    assert by_source["a"].total() == 8 and set(by_source["a"].values()) == {1}
    assert by_source["b"].total() == 20 and sorted(by_source["b"].values()) == [2] * 4 + [3] * 4
    assert visits["hello"] == 8
    assert not set(validation) & set(visits) - {"hello"} and set(validation.values()) <= {1, 2}
    assert [
        (
            part["train_examples"],
            part["eval_examples"],
            part["rows_read"],
            part["weight"],
            part["format"],
        )
        for part in data.summary["sources"]
    ] == [
        (8, 4, 20, 0.5, "prompt_completion"),
        (20, 2, 10, 2.5, "alpaca"),
        (8, 2, 10, 1.0, "messages"),
    ]
    assert data.summary["train_examples"] == 36 and data.summary["rows_read"] == 40
    assert [prompt.prompt_text[0] for prompt in data.eval_prompts(6)] == [
        "a",
        "b",
        "h",
        "a",
        "b",
        "h",
    ]


def test_a_mix_is_the_same_data_each_time_and_its_order_follows_the_seed(files, tokenizer):
    mix = config([{"source": files["a"], "weight": 0.5}, {"source": files["b"]}]).data
    first, again, other = (prepare_data(mix, tokenizer, seed) for seed in (1, 1, 2))
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert asked(first.train, tokenizer) == asked(other.train, tokenizer)
    heavier = config([{"source": files["a"], "weight": 0.6}, {"source": files["b"]}]).data
    assert prepare_data(heavier, tokenizer, 1).fingerprint != first.fingerprint


def test_one_source_in_a_list_is_that_source(files, tokenizer):
    alone = prepare_data(config(files["a"]).data, tokenizer, 1)
    listed = prepare_data(config([files["a"]]).data, tokenizer, 1)
    assert alone.fingerprint == listed.fingerprint and "sources" not in listed.summary


def test_a_preview_shows_every_source(files, tokenizer):
    shown = preview(config([files["a"], files["b"]]).data, tokenizer, rows=4)
    assert [row["where"].split(" of ")[1] for row in shown["rows"]] == ["a.jsonl"] * 2 + [
        "b.jsonl"
    ] * 2
    assert shown["rows_measured"] == 30 and shown["format"] == "prompt_completion, alpaca"


def test_an_error_in_one_source_names_it(files, tmp_path, tokenizer):
    with pytest.raises(
        DataError, match=r"data\.format is text, which needs a column text, but b\.jsonl has"
    ):
        prepare_data(
            config([files["a"], {"source": files["b"], "format": "text"}]).data, tokenizer, 1
        )


def test_a_mix_goes_through_preset_form_and_overrides(files, tmp_path):
    parts = [{"source": files["a"], "weight": 2, "split": "test"}, files["b"]]
    given = config(parts)
    given.save(tmp_path / "preset.yaml")
    assert (
        TrainConfig.load(tmp_path / "preset.yaml")
        == given
        == given.with_values({"train.steps": None})
    )
    assert read_config(shown_values(given)) == given
    assert (
        given.with_overrides([f"data.source={yaml.safe_dump(parts, default_flow_style=True)}"])
        == given
    )
    assert given.data.title == f"2 x {files['a']} + {files['b']}" and hash(given.data)
    assert [part["source"] for part in lasting_sources(given.data.source)] == [
        files["a"],
        files["b"],
    ]
    one = config(files["a"])
    assert read_config(shown_values(one)) == one and isinstance(one.data, DataConfig)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ([{"source": "a", "weight": 0}], "the weight 0 of a is outside 0 to 1000"),
        (
            [{"source": "a", "wieght": 1}],
            r"data\.source\[0\]\.wieght: there is no such setting; did you mean weight",
        ),
        ([{"source": "a", "weight": "much"}], r"data\.source\[0\]\.weight: 'much' is not a number"),
        ([{"weight": 1}], "no data set is given"),
        ([], r"data\.source: \[\] is not text or a list of"),
        ([3.5, ["a"]], r"data\.source\[0\]: expected a mapping"),
        ({"source": "a"}, "is not text or a list of"),
    ],
)
def test_a_wrong_mix_is_one_plain_sentence(parts, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config(parts)
