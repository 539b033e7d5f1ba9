"""A preset with a setting or a value under its old name is refused in one sentence that says what
to write.
"""

from __future__ import annotations

import pytest

import launch
from engine.config.renamed_settings import RENAMED
from engine.config.settings import TrainConfig
from engine.config.tree import override
from engine.errors import ConfigError

SOURCES = {"model": {"source": "m"}, "data": {"source": "d.jsonl"}}

OLD_VALUES = [(row, value) for row in RENAMED for value in row.values]
OTHER_VALUES = {
    "data.lost_turns": "refuse",
    "preference.objective": "dpo",
    "engine.save_level": "auto",
    "engine.residency": "3",
    "engine.across_hosts": "auto",
}
"""A value of each setting with another name that is written as before."""
MOVED = [row for row in RENAMED if row.old != row.new]


def refused(*settings: str) -> str:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_dict(SOURCES).with_overrides(settings)
    return str(caught.value)


def written_in(message: str) -> list[str]:
    """The settings that a sentence says to write, as overrides."""
    return [part.replace(": ", "=") for part in message.split("; write ")[1].split("`")[1::2]]


@pytest.mark.parametrize("row", MOVED, ids=lambda row: row.old)
def test_a_renamed_setting_is_refused_with_its_new_name(row):
    value = OTHER_VALUES[row.old]
    message = refused(f"{row.old}={value}")
    assert message == f"{row.old}: this is called {row.new} now; write `{row.new}: {value}`."


@pytest.mark.parametrize(("row", "value"), OLD_VALUES, ids=lambda part: getattr(part, "old", part))
def test_a_renamed_value_is_refused_with_its_new_name(row, value):
    message = refused(f"{row.old}={value}")
    assert message.startswith(f"{row.old}: ")
    assert message.endswith(f"; write `{row.new}: {row.values[value]}`.")


@pytest.mark.parametrize("row", RENAMED, ids=lambda row: row.old)
def test_what_the_sentence_says_is_accepted(row):
    for value in (*row.values, OTHER_VALUES.get(row.old)):
        if value is None:
            continue
        (instead,) = written_in(refused(f"{row.old}={value}"))
        TrainConfig.from_dict(SOURCES).with_overrides([instead])


def test_all_renamed_settings_of_a_preset_are_named():
    message = refused(
        "engine.save_level=boundary_host", "engine.gradients=parked", "data.lost_turns=refuse"
    )
    assert message == (
        "data.lost_turns: this is called data.dropped_turns now, engine.save_level is called "
        "engine.activation_checkpointing now and parked of engine.gradients is called gpu now; "
        "write `data.dropped_turns: refuse`, `engine.activation_checkpointing: offload` and "
        "`engine.gradients: gpu`."
    )


def test_a_value_that_is_no_short_text_is_not_repeated():
    tree = TrainConfig.from_dict(SOURCES).to_dict()
    for value in ("[a, b]", "{a: b}", "x" * 100, '"a\\nb"'):
        override(tree, f"engine.save_level={value}")
        with pytest.raises(ConfigError, match="; write engine.activation_checkpointing.$"):
            TrainConfig.from_dict(tree)


def test_a_preset_with_an_old_name_starts_nothing(tmp_path, capsys):
    (tmp_path / "old.yaml").write_text(
        "model: {source: m}\ndata: {source: d.jsonl}\nengine: {gradients: parked}\n"
    )
    runs = tmp_path / "runs"
    code = launch.main(["train", str(tmp_path / "old.yaml"), "--runs-dir", str(runs)])
    assert code != 0 and not runs.exists()
    found = "engine.gradients: parked is called gpu now; write `engine.gradients: gpu`."
    assert found in capsys.readouterr().err
