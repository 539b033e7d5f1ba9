"""The three sets of the tests: what a plain run has, and how the others are asked for."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from engine.paths import PROGRAM_ROOT
from tests.support.tiny import MOST_USED

FP32 = "tests/engine/runtime/test_parity.py::test_streamed_training_equals_plain_training"
BF16 = f"{FP32.replace('parity.py', 'parity_in_bf16.py')}_in_bf16"
TESTS = PROGRAM_ROOT / "tests"
STARTER = "tests/engine/training/loop/test_starter.py::test_the_starter_learns_roman_numerals"
COLLECTS = "it collects all tests, for ten seconds or more"
TWO_TESTS = """
import pytest

def test_plain():
    pass

@pytest.mark.slow("it is long")
@pytest.mark.parametrize("size", [1, 2])
def test_long(size):
    pass
"""


def told(folder: Path, *arguments: str) -> list[str]:
    """Returns the lines that pytest prints in `folder`."""
    of_this_run = ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_ADDOPTS")
    environment = {name: value for name, value in os.environ.items() if name not in of_this_run}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr  # 5: nothing was left to run
    return done.stdout.splitlines()


# --------------------------------------------------------------------- what a plain run has


@pytest.fixture(scope="module")
def plain(request, collected) -> set[str]:
    """Returns the names of the tests of a plain run. They are collected in another process only
    where this run has not collected them all.
    """
    config = request.config
    if config.args == config.getini("testpaths") and not config.getoption("ignore"):
        return collected["plain"]
    return {line for line in told(PROGRAM_ROOT, "--collect-only") if "::" in line}


@pytest.fixture(scope="module")
def everything(request, collected) -> set[str]:
    """Returns the names of all tests, as `plain` does those of a plain run."""
    config = request.config
    if config.args == config.getini("testpaths") and not config.getoption("ignore"):
        return collected["all"]
    return {line for line in told(PROGRAM_ROOT, "--collect-only", "--everything") if "::" in line}


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_plain_run_has_tests_of_every_folder(plain):
    folders = {file.parent.relative_to(TESTS) for file in TESTS.rglob("test_*.py")}
    for folder in sorted(path.as_posix() for path in folders - {Path("."), Path("real_files")}):
        assert any(name.startswith(f"tests/{folder}/") for name in plain), folder


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_plain_run_trains_eight_families_in_both_precisions(plain):
    assert len(set(MOST_USED)) == 8
    for family in MOST_USED:
        for tie in ("tied", "untied"):
            assert {f"{FP32}[{family}-{tie}]", f"{BF16}[{family}-{tie}]"} <= plain


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_a_plain_run_has_flows_in_a_browser_and_the_starter(plain):
    assert sum(name.startswith("tests/browser/") for name in plain) >= 2
    assert f"{STARTER}[short]" in plain and f"{STARTER}[whole]" not in plain


@pytest.mark.slow(COLLECTS)
def test_the_cases_that_represent_a_sweep_are_there(everything):
    for test, chosen in sweeps().items():
        assert set(chosen) <= {"plain", "ci"}, test
        named = [name for name in everything if name.partition("[")[0] == test]
        assert named, f"{test} is not collected"
        cases = {name.partition("[")[2][:-1] for name in named}
        for word, some in chosen.items():
            missing = [] if some == "all" else sorted(set(some) - cases)
            assert not missing, f"{test} has no case {missing} for `{word}`"


def test_the_sweeps_are_of_tests_that_are_there():
    files = {*map(_file_of, sweeps())}
    code = {file: (PROGRAM_ROOT / file).read_text(encoding="utf-8") for file in files}
    for test in sweeps():
        assert f"def {test.partition('::')[2]}(" in code[_file_of(test)], test


def sweeps() -> dict[str, dict]:
    """Returns the cases that are chosen of each sweep, by the name of its test."""
    files = yaml.safe_load((TESTS / "sweeps.yaml").read_text(encoding="utf-8"))
    return {
        f"tests/{file}::{test}": chosen
        for file, tests in files.items()
        for test, chosen in tests.items()
    }


def _file_of(test: str) -> str:
    return test.partition("::")[0]


# --------------------------------------------------------------------- how the others are asked for


@pytest.fixture
def project(tmp_path) -> Path:
    """Returns a folder with the settings of this project, a plain test, and a slow one of which CI
    has one case.
    """
    (tmp_path / "tests").mkdir()
    shutil.copy(PROGRAM_ROOT / "pyproject.toml", tmp_path)
    shutil.copy(PROGRAM_ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_two.py").write_text(TWO_TESTS, encoding="utf-8")
    chosen = "test_two.py:\n  test_long: {ci: ['2']}\n"
    (tmp_path / "tests" / "sweeps.yaml").write_text(chosen, encoding="utf-8")
    return tmp_path


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
@pytest.mark.parametrize(
    "arguments, passed",
    [
        ("-n 0", 1),
        ("-n 2", 1),
        ("tests/test_two.py", 1),
        ("-n 2 --everything", 3),
        ("-n 2 --ci", 2),
        ("-m slow -n 0", 2),
        ("tests/test_two.py::test_long", 2),
        ("tests/test_two.py::test_long[2]", 1),
        ("-k long -n 0", 0),
    ],
)
def test_slow_tests_run_when_they_are_asked_for(project, arguments, passed):
    lines = told(project, *arguments.split())
    tests = f"{passed} passed" if passed else "3 deselected"
    assert any(tests in line for line in lines), lines
    has_all = any(word in arguments for word in ("--everything", "slow", "::"))
    tests, them = ("1 test was", "it") if "--ci" in arguments else ("2 tests were", "them")
    last_line = f"{tests} left out; `pytest --everything` runs {them} too."
    assert (lines[-1] == last_line) != has_all, lines
    assert sum("left out" in line for line in lines) == (not has_all)


@pytest.mark.slow("it starts processes and waits for them, for five seconds or more")
def test_the_tests_of_a_file_share_a_process(project):
    folder = project / "tests"
    shutil.copy(folder / "test_two.py", folder / "test_three.py")
    lines = told(project, "-n", "2", "--everything", "-vv")
    for file in ("test_two.py", "test_three.py"):
        passed = [line for line in lines if "PASSED" in line and f"tests/{file}::" in line]
        assert len(passed) == 3 and len({line.split()[0] for line in passed}) == 1, lines


def test_a_test_is_left_out_for_a_reason(project):
    file = project / "tests" / "test_two.py"
    file.write_text(TWO_TESTS.replace('("it is long")', ""), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "0"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_long[1] is marked `slow` without a reason" in done.stderr
