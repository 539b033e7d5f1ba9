"""The program as it is installed, not run from its sources: everything it needs is there, and
nothing else.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT
from tests.support.ports import free_port

pytestmark = pytest.mark.slow("it starts processes and waits for them, for five seconds or more")

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
    found = in_another_folder(
        installed, tmp_path, *command, "check", installed / "presets" / "starter.yaml", "--json"
    )
    assert json.loads(found)["verdict"] in ("fits", "tight")
    found = in_another_folder(installed, tmp_path, *command, "check", "presets/starter.yaml")
    assert "% of the tokens of the first" in found
    assert list(tmp_path.iterdir()) == []


def test_a_run_and_a_detached_run_and_a_helper_of_the_installed_program(installed, tmp_path):
    command = (sys.executable, installed / "bin" / "ramstream")
    few = ("--set", "train.steps=2")
    found = in_another_folder(installed, tmp_path, *command, "train", "presets/starter.yaml", *few)
    assert "Finished all 2 steps." in found
    found = in_another_folder(
        installed,
        tmp_path,
        sys.executable,
        "-c",
        """
import contextlib, threading
from pathlib import Path
from app.form.presets import FIRST_PRESET, read_presets
from app.session.detached import DetachedRuns
from engine.helper_process import HelperProcess

over = threading.Event()
config = read_presets()[FIRST_PRESET].config.with_values({"train.steps": 2, "name": "Apart"})
DetachedRuns().start(config, Path("runs"), over.set)
program = "import engine, json; print(json.dumps({'from': engine.__file__}), flush=True)"
with contextlib.closing(HelperProcess(program, {})) as helper:
    print(helper.next_line(60)["from"])
assert over.wait(120)
""",
    )
    assert Path(found.strip()).is_relative_to(installed)
    found = in_another_folder(installed, tmp_path, *command, "runs", "--json")
    assert {run["name"]: run["state"] for run in json.loads(found)} == {
        "Starter": "finished",
        "Apart": "finished",
    }


def test_the_installed_app_serves_its_page(installed, tmp_path):
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, installed / "bin" / "ramstream", "--no-browser", "--port", str(port)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout.readline() == (
            f"Ramstream is at http://127.0.0.1:{port}/ (Ctrl-C stops it)\n"
        )
        for path, part in (
            ("", b"Ramstream"),
            ("ramstream/pages/frame/main.js", b"import"),
            ("api/runs", b""),
        ):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}", timeout=60) as answer:
                assert part in answer.read()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


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
from app.server.page_files import APP, page_files
from engine.paths import resolve_source
from engine.runs.record.run_folder import RunFolder

first = read_presets()[FIRST_PRESET].config
print(json.dumps({
    "pages": [str(APP / name) for name in page_files()],
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
