"""Each new run has a name of its own."""

from __future__ import annotations

import pytest

from engine.config.settings import TrainConfig
from engine.runs.record.run_folder import CONFIG_FILE
from engine.runs.summaries.about import write_about
from engine.runs.summaries.names import names_of_runs, new_run, own_name, shown_name

CONFIG = TrainConfig.from_dict({"model": {"source": "m"}, "data": {"source": "d"}})


@pytest.mark.parametrize(
    "name, taken, own",
    [
        ("Starter", [], "Starter"),
        ("Starter", ["Starter"], "Starter 2"),
        ("Starter", ["starter", "Starter 2", "Starter 4"], "Starter 3"),
        ("Starter 2", ["Starter", "Starter 2"], "Starter 3"),
        ("Starter 2", ["Starter"], "Starter 2"),
        ("Qwen 3", ["Qwen 3"], "Qwen 3 2"),  # the 3 numbers no repeat
        ("2", ["2"], "2 2"),
    ],
)
def test_a_name_that_is_taken_gets_the_next_number(name, taken, own):
    assert own_name(name, taken) == own


def test_repeats_of_a_run_are_numbered_and_keep_their_numbers(tmp_path):
    named = CONFIG.with_values({"name": "Capitals: a long name " + "with many words " * 6})
    first, second, third = (new_run(tmp_path, named) for _ in range(3))
    names = [shown_name(folder) for folder in (first, second, third)]
    assert names == [named.name, f"{named.name} 2", f"{named.name} 3"]
    assert sorted(names_of_runs(tmp_path)) == sorted(names)
    # What a person calls a run is its name, and its former one is free again.
    write_about(second, "Best so far", "")
    assert shown_name(second) == "Best so far" in names_of_runs(tmp_path)
    assert shown_name(new_run(tmp_path, named)) == names[1]
    assert shown_name(new_run(tmp_path, CONFIG.with_values({"name": "Best so far"}))) == (
        "Best so far 2"
    )


def test_a_run_whose_settings_cannot_be_read_is_shown_by_its_id(tmp_path):
    folder = new_run(tmp_path, CONFIG)
    (folder.path / CONFIG_FILE).unlink()
    assert shown_name(folder) == folder.id and names_of_runs(tmp_path) == [folder.id]
    assert shown_name(new_run(tmp_path, CONFIG)) == CONFIG.name
