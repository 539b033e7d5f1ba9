"""The changes of `tests.support.changes` still apply, their table is up to date, and the tool tells
what is caught from what is not. That a change is caught takes a run of the tool.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from tests.support.changes.copies import BROKEN, CAUGHT, LIKELY, SURVIVED, Copy, Outcome
from tests.support.changes.record import Change, DoesNotApply
from tests.support.changes.records import AREAS, CHANGES, REVIEWED
from tests.support.changes.table import PAGE, page

LEAST = 60
"""There are at least this many changes."""
SUM = "def total(values):\n    return sum(values)\n"
TEST = "from code_under_test import total\n\n\ndef test_total():\n    assert total([1, 2]) == 3\n"


def test_every_change_applies_and_its_tests_are_there():
    """All are checked at once: as cases of their own, some would be left out of most runs."""
    problems = []
    for change in CHANGES:
        text = (PROGRAM_ROOT / change.file).read_text(encoding="utf-8")
        try:
            if change.applied(text) == text:
                problems.append(f"{change.name} changes nothing")
        except DoesNotApply as error:
            problems.append(str(error))
        for test in change.tests:
            file, _, name = test.partition("::")
            source = (PROGRAM_ROOT / file).read_text(encoding="utf-8")
            if f"def {name}" not in source:
                problems.append(f"{change.name}: {test} is not there")
    assert not problems


def test_there_are_enough_and_their_names_differ():
    names = [change.name for change in CHANGES]
    assert len(set(names)) == len(names) >= LEAST
    assert set(REVIEWED) <= set(names) and all(AREAS.values())
    assert not any(change.survives for change in CHANGES if change.name in REVIEWED)


def test_the_page_has_a_row_for_every_change():
    lines = (PROGRAM_ROOT / PAGE).read_text(encoding="utf-8").splitlines()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in lines if line.startswith("| ")}
    assert {change.name for change in CHANGES} == rows - {"change"}


def test_a_change_that_does_not_fit_is_refused():
    wrong = Change("x", "a.py", "sum(values)", "sum(", "", ())
    with pytest.raises(DoesNotApply, match="x: a.py does not compile"):
        wrong.applied(SUM)
    with pytest.raises(DoesNotApply, match="stands 0 times in a.py"):
        wrong.applied("")
    with pytest.raises(DoesNotApply, match="stands 2 times in a.py"):
        wrong.applied(SUM * 2)


@pytest.fixture
def copy(tmp_path) -> Iterator[Copy]:
    """Yields a copy of a tree with one function and one test."""
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code_under_test.py").write_text(SUM, encoding="utf-8")
    (tree / "test_it.py").write_text(TEST, encoding="utf-8")
    (tree / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    made = Copy(tmp_path / "copy", tree, libraries=("pytest",))
    yield made
    made.close()


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "new, verdict",
    [("max(values)", CAUGHT), ("sum(values[:])", SURVIVED), ("sum(values)\n\n\nx = y", BROKEN)],
)
def test_what_became_of_a_change_is_told(copy: Copy, new, verdict):
    change = Change("x", "code_under_test.py", "sum(values)", new, "", ("test_it.py",))
    outcome = copy.try_change(change, LIKELY)
    assert outcome.verdict == verdict, outcome
    assert outcome.test == "test_it.py::test_total" or verdict != CAUGHT
    assert (copy.folder / change.file).read_text(encoding="utf-8") == SUM
    assert copy.try_change(Change("y", change.file, "sum", "max", "", change.tests), LIKELY).test


def test_the_page_tells_survivors_with_their_reasons():
    changes = [Change(name, "a.py", "", "", "It is wrong.", ()) for name in ("one", "two")]
    changes.append(Change("three", "a.py", "", "", "It is odd.", (), survives="It is the same."))
    outcomes = {
        "one": Outcome("one", CAUGHT, "tests/test_a.py::test_b", LIKELY, 2.0, "abc", ""),
        "two": Outcome("two", SURVIVED, "", LIKELY, 2.0, "abc", ""),
        "three": Outcome("three", SURVIVED, "", LIKELY, 2.0, "abc", ""),
    }
    changes.append(Change("four", "a.py", "", "", "It is new.", ()))
    text = page({"Area": changes}, outcomes)
    assert "1 more were not made yet" in text
    assert "| four | `a.py` | It is new. | not made yet |" in text
    assert "**3 changes were made, 1 were caught, 2 survived**" in text
    assert "| one | `a.py` | It is wrong. | `tests/test_a.py::test_b` |" in text
    assert "| two | It is wrong. | **a test is missing** | likely tests |" in text
    assert "| three | It is odd. | It is the same. | likely tests |" in text


def test_the_copy_has_what_git_would_take(copy: Copy):
    names = {path.relative_to(copy.folder).as_posix() for path in Path(copy.folder).rglob("*.*")}
    assert names == {"code_under_test.py", "test_it.py", "pyproject.toml"}
