"""The programs that tasks of a person's folder run are found before any of them runs."""

from __future__ import annotations

import pytest

from engine.errors import DataError
from engine.tools.evaluate.task_code import programs_of, programs_text

KNOWN = {"acc", "exact_match"}


def programs(folder, *names):
    return programs_of(folder, names or ("mine",), KNOWN)


def write(folder, **files):
    for name, text in files.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def test_a_task_without_programs_says_nothing(tmp_path):
    write(
        tmp_path,
        mine="task: mine\ndataset_path: json\nmetric_list: [{metric: acc}]\ndoc_to_text: '{{a}}'\n",
        other="task: other\nprocess_docs: !function utils.f\n",
    )
    assert programs(tmp_path) == []
    assert programs(tmp_path, "arc_easy") == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("process_docs: !function utils.f", "utils.f"),
        ("class: !function task.Mine", "task.Mine"),
        ("metric_list:\n  - metric: !function utils.score", "utils.score"),
        ("filter_list:\n  - filter:\n      - filter_fn: !function utils.g", "utils.g"),
        ("a: &x\n  b: !function os.system\nc: *x", "os.system"),
        ("? !function utils.key\n: 1", "utils.key"),
        ("a: !function [1]", "a function"),
        ("metric_list:\n  - metric: ./evil", "the metric ./evil of evaluate"),
        ("metric_list:\n  - metric: acc\n    hf_evaluate: true", "the metric acc of evaluate"),
        ("dataset_path: pandas", "pickles of pandas"),
    ],
)
def test_what_a_task_runs_is_found_wherever_it_is_named(tmp_path, text, found):
    write(tmp_path, mine=f"task: mine\n{text}\n")
    assert programs(tmp_path) == [f"{found} (mine.yaml)"]


def test_what_a_task_includes_belongs_to_it(tmp_path):
    (tmp_path / "tasks").mkdir()
    write(tmp_path, base="a: !function base.f\n")
    folder = write(
        tmp_path / "tasks",
        mine="task: mine\ninclude: between.yaml\n",
        between="include: ../base.yaml\nb: !function between.g\n",
    )
    assert programs(folder) == ["between.g (between.yaml)", "base.f (base.yaml)"]


@pytest.mark.parametrize(
    "group",
    [
        "group: all\ntask: [mine]\n",
        "group: all\ntask:\n  - task: mine\n    weight: 1\n",
        "group: all\ntask:\n  - group: inner\n    task: [mine]\n",
    ],
)
def test_what_the_tasks_of_a_group_run_belongs_to_it(tmp_path, group):
    write(tmp_path, all=group, mine="task: mine\na: !function utils.f\n", zero="task: zero\n")
    assert programs(tmp_path, "all") == ["utils.f (mine.yaml)"]
    assert programs(tmp_path, "zero") == []


def test_what_the_tasks_of_a_tag_run_belongs_to_it(tmp_path):
    write(tmp_path, mine="task: mine\ntag: [some, more]\na: !function utils.f\n")
    assert programs(tmp_path, "more") == ["utils.f (mine.yaml)"]


@pytest.mark.parametrize(
    "text",
    [
        "task: [",
        "a: !!python/object/apply:os.system ['true']",
        "[" * 5000,
        "task: &a [{task: *a}]",
        "\0",
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path, text):
    write(tmp_path, mine=text)
    with pytest.raises(DataError, match=r"^The task file .*mine\.yaml cannot be read \("):
        programs(tmp_path)


def test_many_programs_are_told_by_their_first():
    assert programs_text(["a", "b"]) == "a, b"
    assert programs_text([str(number) for number in range(10)]).endswith("6, 7 and 2 more")
