"""Nothing but `engine.safe_files` opens, writes, lists or removes what is in folders that others
may have written: run folders, uploads, the queue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT

ROOMS = (
    *("engine/runs", "engine/summaries", "engine/trackers", "engine/train", "engine/benchmarks"),
    *("engine/home", "engine/talk", "engine/cli", "engine/stored"),
    *("app/watch", "app/session", "app/pages"),
)
"""The files of these rooms get to know paths of such folders."""

FILES = (
    *("checkpoint", "frozen_files", "manifest", "own_folders", "plane_snapshot", "restore"),
    *("same_model", "saved_steps", "start_from", "unit_files"),
    *("export", "export_adapter", "export_parts", "untouched_weights", "weight_files"),
)
"""So do these of `engine/checkpoints`; the others read a model that a person has named."""

METHODS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "truncate"),
    *("mkdir", "makedirs", "unlink", "rmdir", "rmtree", "symlink_to", "hardlink_to", "rename"),
    *("iterdir", "glob", "rglob", "scandir", "listdir", "walk", "copyfile", "copytree", "move"),
    *("memmap", "fromfile", "load_file", "safe_open"),
}
"""Calls by these names, of a path or of a module, open what a path leads to."""
OTHERS = {"re", "webbrowser", "contextlib", "safe_files", "ast"}
"""What these modules open is no file."""

ALLOWED: dict[str, dict[str, str]] = {
    "engine/benchmarks/task_code.py": {
        "folder.rglob": "a folder of tasks that a person names",
        "path.read_text": "a file of that folder",
    },
    "engine/checkpoints/export.py": {
        "target.iterdir": "a folder that a person names",
        "folder.parent.mkdir": "the folder in which a person wants the export",
        "parent.rmdir": "it removes an empty folder and no link",
        "partial.mkdir": "it makes a new folder or fails",
        "folder.rglob": "the export that has just been written; only its size is asked",
        "folder.rmdir": "it removes an empty folder and no link",
        "folder.glob": "the names in the new folder of this export",
    },
    "engine/checkpoints/export_adapter.py": {"folder.mkdir": "the new folder of this export"},
    "engine/checkpoints/export_parts.py": {
        "part.iterdir": "what a library has just written into the new folder of this export"
    },
    "engine/checkpoints/untouched_weights.py": {
        "self.folder.iterdir": "a model that a person has named",
        "shutil.copyfile": "a file of that model, into the new folder of this export",
        "config.read_text": "a file that a library has just written into that new folder",
    },
    "engine/checkpoints/weight_files.py": {
        "(self._folder / INDEX).unlink": "it removes a name in the new folder of this export",
        "file.unlink": "it removes a name in that folder",
        "piece.file.unlink": "it removes a name in that folder",
        "piece.file.open": "weights that a library has just written into that folder",
        "made.open": "a new name in that folder",
    },
    "engine/stored/tensor_files.py": {"folder.iterdir": "a model that a person has named"},
    "engine/cli/streams.py": {"os.open": "the null device, in place of a stream that is closed"},
    "engine/cli/end_signals.py": {"os.open": "the null device, in place of a terminal"},
    "engine/cli/train.py": {"os.open": "the null device, in place of a terminal"},
    "engine/cli/bench.py": {"Planes.open": "planes in memory"},
    "engine/cli/launched.py": {
        "Path(f'/proc/{process}/stat').read_text": "the system's own file",
        "self._file.parent.rmdir": "it removes an empty folder and no link",
    },
    "engine/data/token_cache.py": {"root.mkdir": "the folder of the cache is the owner's"},
    "engine/model/kept_shapes.py": {"file.parent.mkdir": "the folder of the cache is the owner's"},
    "engine/runs/folder.py": {"runs.mkdir": "the folder of runs is the owner's"},
    "engine/train/webhook.py": {
        "urllib.request.build_opener(_NoRedirect).open": "an address of the network"
    },
    "app/pages/panels.py": {"(TEMPLATES / f'{name}.html').read_text": "a file of the program"},
    "app/pages/draft.py": {"self._folder.mkdir": "the folder of runs is the owner's"},
    "app/session/containers.py": {
        "Path('/proc/1/comm').read_text": "the system's own file",
        "Path(f'/proc/{process}/cmdline').read_bytes": "the system's own file",
    },
    "app/session/data_folders.py": {
        "os.scandir": "a folder that the owner has named; it keeps to its own rules about links"
    },
    "app/session/detached.py": {
        "BOOT_ID.read_text": "the system's own file",
        "Path(f'/proc/{pid}/stat').read_text": "the system's own file",
    },
    "app/session/queue.py": {"self._path.parent.mkdir": "the folder of runs is the owner's"},
    "app/session/uploads.py": {"self._all.mkdir": "the folder of uploads is the owner's"},
}
"""These calls open something else, for the reason beside them."""


def openings(source: str) -> Iterator[str]:
    """The calls in a file that open what a path leads to."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in ("open", "write_whole"):
            yield called.id
        elif isinstance(called, ast.Attribute) and called.attr in METHODS:
            of = called.value
            if not (isinstance(of, ast.Name) and of.id in OTHERS):
                yield ast.unparse(called)


def found() -> set[tuple[str, str]]:
    paths = [path for room in ROOMS for path in (PROGRAM_ROOT / room).rglob("*.py")]
    paths += [PROGRAM_ROOT / "engine" / "checkpoints" / f"{name}.py" for name in FILES]
    caches = ("model/kept_shapes.py", "data/token_cache.py")
    paths += [PROGRAM_ROOT / "engine" / name for name in caches]
    return {
        (str(path.relative_to(PROGRAM_ROOT)), call)
        for path in paths
        for call in openings(path.read_text(encoding="utf-8"))
    }


def test_nothing_else_opens_what_is_in_such_folders():
    reasons = {(file, call) for file, calls in ALLOWED.items() for call in calls}
    assert sorted(found() - reasons) == []


def test_no_reason_outlives_its_call():
    needed = found()
    reasons = {(file, call) for file, calls in ALLOWED.items() for call in calls}
    assert sorted(reasons - needed) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("open(path)", ["open"]),
        ("with (folder / 'x').open('rb') as file: pass", ["(folder / 'x').open"]),
        ("os.open(path, os.O_RDONLY)", ["os.open"]),
        ("shutil.rmtree(folder.path)", ["shutil.rmtree"]),
        ("path.read_text()", ["path.read_text"]),
        ("safe_files.open_to_read(path, runs)", []),
        ("re.compile(x).match(y)", []),
    ],
)
def test_what_is_found(code, said):
    assert list(openings(code)) == said


def test_the_rooms_are_there():
    assert all((PROGRAM_ROOT / room).is_dir() for room in ROOMS)
    assert Path(PROGRAM_ROOT / "engine" / "safe_files.py").exists()
