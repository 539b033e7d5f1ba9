"""The program as it is installed, not run from its sources: everything it needs is there, and
nothing else.
"""

from __future__ import annotations

import email.parser
import json
import os
import shutil
import signal
import site
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
import venv
from dataclasses import dataclass
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
    "MANIFEST.in",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
)
"""Of the source tree, with what must not be installed."""
PACKED = ("app", "engine", "assets", "presets")
"""Folders of the source tree that are installed."""
BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""
"""Program that builds a distribution as pip does, without fetching what builds it."""


@dataclass(frozen=True)
class Installed:
    """An environment in which the wheel is installed and nothing else, beside what it needs."""

    place: Path
    sdist: frozenset[str]
    """Files of the source distribution, from which the wheel was built."""

    @property
    def python(self) -> Path:
        return self.place / "environment" / "bin" / "python"

    @property
    def command(self) -> Path:
        return self.place / "environment" / "bin" / "ramstream"

    @property
    def packages(self) -> Path:
        (found,) = self.place.glob("environment/lib/python*/site-packages")
        return found

    @property
    def program(self) -> Path:
        return self.packages / "ramstream"


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Installed:
    """The wheel that is built from the source distribution, installed."""
    place = tmp_path_factory.mktemp("install")
    # A copy: building leaves files in the source tree, and what an earlier build left there would
    # be packed.
    source = place / "source"
    source.mkdir()
    for name in SOURCES:
        if (PROGRAM_ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(PROGRAM_ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(PROGRAM_ROOT / name, source / name)
    packed = built("build_sdist", source)
    with tarfile.open(packed) as archive:
        archive.extractall(place, filter="data")
        sdist = frozenset(
            name.partition("/")[2] for name in archive.getnames() if not name.endswith("/")
        )
    wheel = built("build_wheel", place / packed.name.removesuffix(".tar.gz"))

    venv.create(place / "environment", with_pip=False)
    found = Installed(place, sdist)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run(
        [*pip, "--python", found.python, "install", "--no-deps", "--no-compile", wheel],
        env=os.environ | {"PYTHONPATH": ""},
        check=True,
    )
    # What the program needs is that of this environment; of a path that such a file names, no
    # further files of this kind are read, so an editable installation is not seen.
    needed = [*site.getsitepackages(), site.getusersitepackages()]
    (found.packages / "needed.pth").write_text("\n".join(needed))
    shutil.rmtree(source)
    return found


def built(hook: str, source: Path) -> Path:
    """Returns the distribution that a hook of the build backend has made of a source tree."""
    folder = source / "built"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(folder)],
        cwd=source,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / done.stdout.splitlines()[-1]


def files(root: Path, *folders: str) -> set[str]:
    return {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*")
        if path.is_file()
        and "__pycache__" not in path.parts
        and not path.is_relative_to(root / "assets" / "make")
    }


def in_another_folder(folder: Path, *command: str | Path) -> str:
    """What a command prints that finds the installed program and not its sources."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_is_needed_is_installed_under_one_name_and_nothing_else(installed):
    assert files(installed.program, *PACKED) == files(PROGRAM_ROOT, *PACKED)
    assert {path.name for path in installed.program.iterdir()} == {*PACKED, "launch.py"}
    others = {path.name for path in installed.packages.iterdir()} - {"needed.pth"}
    assert {name.removesuffix(".dist-info").split("-")[0] for name in others} == {"ramstream"}


def test_a_source_distribution_has_the_program_and_its_docs_and_no_tests(installed):
    assert files(PROGRAM_ROOT, *PACKED, "docs") <= installed.sdist
    assert {"launch.py", "README.md", "CHANGELOG.md", "LICENSE"} <= installed.sdist
    assert [name for name in installed.sdist if name.startswith("tests")] == []


def test_the_metadata_is_complete(installed, tmp_path):
    project = tomllib.loads((PROGRAM_ROOT / "pyproject.toml").read_text())["project"]
    (place,) = installed.packages.glob("*.dist-info")
    metadata = email.parser.Parser().parsestr((place / "METADATA").read_text(encoding="utf-8"))
    assert metadata["Version"] == project["version"]
    told = in_another_folder(tmp_path, installed.command, "--version")
    assert told == f"ramstream {project['version']}\n"
    assert metadata["License-Expression"] == project["license"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert {"app/py.typed", "engine/py.typed"} <= files(installed.program, *PACKED)
    assert {path.name for path in place.rglob("LICENSE")} == {"LICENSE"}
    assert len(metadata.get_all("License-File", [])) == 2


def test_the_command_works_from_any_folder(installed, tmp_path):
    preset = installed.program / "presets" / "starter.yaml"
    found = in_another_folder(tmp_path, installed.command, "check", preset, "--json")
    assert json.loads(found)["verdict"] in ("fits", "tight")
    found = in_another_folder(tmp_path, installed.command, "check", "presets/starter.yaml")
    assert "% of the tokens of the first" in found
    assert list(tmp_path.iterdir()) == []


def test_a_run_and_a_detached_run_and_a_helper_of_the_installed_program(installed, tmp_path):
    few = ("--set", "train.steps=2")
    found = in_another_folder(tmp_path, installed.command, "train", "presets/starter.yaml", *few)
    assert "Finished all 2 steps." in found
    found = in_another_folder(
        tmp_path,
        installed.python,
        "-c",
        """
import contextlib, threading
from pathlib import Path
import ramstream.launch
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
    assert Path(found.strip()).is_relative_to(installed.program)
    found = in_another_folder(tmp_path, installed.command, "runs", "--json")
    assert {run["name"]: run["state"] for run in json.loads(found)} == {
        "Starter": "finished",
        "Apart": "finished",
    }


def test_the_installed_app_serves_its_page(installed, tmp_path):
    port = free_port()
    server = subprocess.Popen(
        [installed.command, "--no-browser", "--port", str(port)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": ""},
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
            tmp_path,
            installed.python,
            "-c",
            """
import json
from pathlib import Path
import ramstream.launch
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
        assert Path(path).is_relative_to(installed.program) and Path(path).exists()
