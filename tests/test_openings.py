"""Nothing but `engine.safe_files` opens, writes, lists or removes what is in folders that others
may have written: run folders, uploads, the queue.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.paths import PROGRAM_ROOT

pytestmark = pytest.mark.slow("it is about how the code is written and not about what it does")

ROOMS = (
    *("engine/runs", "engine/training/export", "engine/training/loop"),
    *("engine/tools/evaluate", "engine/tools/chat", "engine/tools/serve", "engine/tools/cli"),
    *("app/session", "app/pages", "app/shared"),
)
"""The files of these rooms get to know paths of such folders."""

FILES = {
    "training/checkpoints": (
        *("checkpoint", "frozen_files", "manifest", "own_folders", "plane_snapshot", "restore"),
        *("same_model", "saved_on_disk", "unit_files"),
    ),
    "training/weights": ("start_from", "multimodal_weights"),
    "model/hub": ("torch_pickle", "dequantize", "tensor_files"),
    "data/tokens": ("token_cache",),
    "": ("kept_files",),
}
"""So do these of other packages of the engine; their others read a model that a person has named.
"""

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
    "app/pages/run/exported_archive.py": {
        "archive.open": "an entry of the ZIP file that is written, not a file",
    },
    "engine/tools/evaluate/evaluate_run.py": {
        "include.rglob": "a folder of tasks that a person names",
        "file.read_bytes": "a file of that folder",
    },
    "engine/tools/evaluate/task_code.py": {
        "folder.rglob": "a folder of tasks that a person names",
        "path.read_text": "a file of that folder",
    },
    "engine/training/export/export.py": {
        "target.iterdir": "a folder that a person names",
        "folder.parent.mkdir": "the folder in which a person wants the export",
        "parent.rmdir": "it removes an empty folder and no link",
        "partial.mkdir": "it makes a new folder or fails",
        "folder.rglob": "the export that has just been written; only its size is asked",
        "folder.rmdir": "it removes an empty folder and no link",
        "folder.glob": "the names in the new folder of this export",
    },
    "engine/training/export/export_adapter.py": {"folder.mkdir": "the new folder of this export"},
    "engine/training/export/export_parts.py": {
        "part.iterdir": "what a library has just written into the new folder of this export"
    },
    "engine/training/weights/multimodal_weights.py": {
        "self.folder.iterdir": "a model that a person has named",
        "shutil.copyfile": "a file of that model, into the new folder of this export",
        "config.read_text": "a file that a library has just written into that new folder",
    },
    "engine/training/export/weight_files.py": {
        "(self._folder / INDEX).unlink": "it removes a name in the new folder of this export",
        "file.unlink": "it removes a name in that folder",
        "tensor.file.unlink": "it removes a name in that folder",
        "tensor.file.open": "weights that a library has just written into that folder",
        "made.open": "a new name in that folder",
    },
    "engine/model/hub/tensor_files.py": {"folder.iterdir": "a model that a person has named"},
    "engine/tools/cli/streams.py": {
        "os.open": "the null device, in place of a stream that is closed"
    },
    "engine/tools/cli/end_signals.py": {"os.open": "the null device, in place of a terminal"},
    "engine/tools/cli/train.py": {"os.open": "the null device, in place of a terminal"},
    "engine/tools/cli/bench.py": {"Planes.open": "planes in memory"},
    "engine/tools/cli/launched.py": {
        "self._file.parent.rmdir": "it removes an empty folder and no link",
    },
    "engine/data/tokens/token_cache.py": {"root.mkdir": "the folder of the cache is the owner's"},
    "engine/kept_files.py": {"file.parent.mkdir": "the folder of the cache is the owner's"},
    "engine/runs/record/run_folder.py": {"runs.mkdir": "the folder of runs is the owner's"},
    "engine/training/loop/webhook.py": {
        "urllib.request.build_opener(_NoRedirect).open": "an address of the network"
    },
    "app/shared/template.py": {
        "APP.rglob": "files of the program",
        "_templates()[name].read_text": "a file of the program",
    },
    "app/pages/hardware/kept_rows.py": {"file.read_bytes": "files of the program"},
    "app/pages/new/draft.py": {"self._folder.mkdir": "the folder of runs is the owner's"},
    "engine/training/loop/memory_watch.py": {
        "Path('/proc/self/clear_refs').write_text": "the system's own file",
        "Path('/proc/self/status').read_text": "the system's own file",
    },
    "app/session/containers.py": {
        "Path('/proc/1/comm').read_text": "the system's own file",
    },
    "app/session/data_folders.py": {
        "os.scandir": "a folder that the owner has named; it keeps to its own rules about links"
    },
    "app/session/detached.py": {"BOOT_ID.read_text": "the system's own file"},
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
    paths += [
        PROGRAM_ROOT / "engine" / package / f"{name}.py"
        for package, names in FILES.items()
        for name in names
    ]
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
    ("code", "text"),
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
def test_what_is_found(code, text):
    assert list(openings(code)) == text


def test_the_rooms_are_there():
    assert all((PROGRAM_ROOT / room).is_dir() for room in ROOMS)
    assert Path(PROGRAM_ROOT / "engine" / "safe_files.py").exists()
