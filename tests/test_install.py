"""The program as it is installed, not run from its sources: everything it needs is there, and
nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT

SOURCES = (
    "app",
    "engine",
    "assets",
    "presets",
    "tests",
    "docs",
    "launch.py",
    "pyproject.toml",
    "README.md",
    "LICENSE",
)
"""Of the source tree, with what must not be installed."""


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder in which the wheel is installed, without what it depends on."""
    place = tmp_path_factory.mktemp("install")
    # A copy: building leaves files in the source tree, and what an earlier build left there would
    # be packed.
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        if (PROGRAM_ROOT / name).is_dir():
            shutil.copytree(
                PROGRAM_ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(PROGRAM_ROOT / name, source / name)
    # Without setuptools here, pip fetches it.
    here = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") is not None else []
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "--no-deps", *here, "--wheel-dir", place, source], check=True)
    (wheel,) = place.glob("*.whl")
    subprocess.run(
        [*pip, "install", "--no-deps", "--no-compile", "--target", place / "installed", wheel],
        check=True,
    )
    shutil.rmtree(source)
    return place / "installed"


def files(root: Path, *folders: str) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.is_relative_to(root / "assets" / "make")
    }


def in_another_folder(installed: Path, folder: Path, *command: str | Path) -> str:
    """What a command prints that finds the installed program and not its sources."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_needed_is_installed_and_nothing_else(installed):
    folders = ("app", "engine", "assets", "presets")
    assert files(installed, *folders) == files(PROGRAM_ROOT, *folders)
    assert {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")} == {
        *folders,
        "launch.py",
        "bin",
    }


def test_the_command_works_from_any_folder(installed, tmp_path):
    command = (sys.executable, installed / "bin" / "ramstream")
    assert "usage: ramstream [-h]" in in_another_folder(installed, tmp_path, *command, "--help")
    told = in_another_folder(
        installed, tmp_path, *command, "check", installed / "presets" / "starter.yaml", "--json"
    )
    assert json.loads(told)["verdict"] in ("fits", "tight")
    assert list(tmp_path.iterdir()) == []


def test_the_app_finds_its_pages_its_presets_and_the_file_that_runs_are_started_with(
    installed, tmp_path
):
    found = json.loads(
        in_another_folder(
            installed,
            tmp_path,
            sys.executable,
            "-c",
            """
import json
from pathlib import Path
from app.form.presets import FIRST_PRESET, read_presets
from app.session.detached import train_command
from app.web.server import BROWSER_FILES, page_files
from engine.paths import resolve_source
from engine.runs.folder import RunFolder

first = read_presets()[FIRST_PRESET].config
print(json.dumps({
    "pages": [str(BROWSER_FILES / name) for name in page_files()],
    "presets": sorted(read_presets()),
    "model": str(resolve_source(first.model.source)),
    "data": str(resolve_source(first.data.source)),
    "started": train_command(RunFolder(Path("runs/x")))[1],
}))
""",
        )
    )
    assert found["presets"] == sorted(path.name for path in (PROGRAM_ROOT / "presets").iterdir())
    assert len(found["pages"]) > 10
    for path in (*found["pages"], found["model"], found["data"], found["started"]):
        assert Path(path).is_relative_to(installed) and Path(path).exists()
