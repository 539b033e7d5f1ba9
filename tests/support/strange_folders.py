"""Run folders of which one file is damaged, or is a link, a pipe, a device, a folder, or far too
large, as a stranger may have made them; and what the program does with such a run.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.pages.chat.chat import Chat
from app.pages.chat.chat_routes import chat_routes
from app.pages.run.run_routes import run_routes
from app.pages.run.timeline_routes import timeline_routes
from app.pages.runs.list_routes import list_routes
from app.session.session import Session
from engine.errors import RamstreamError
from engine.runs.record.control import send_command
from engine.runs.record.run_folder import RunFolder, open_run
from engine.runs.summaries.about import write_about
from engine.runs.summaries.benchmark_results import RESULTS_FILE
from engine.tools.cli.runs import runs_as_text
from engine.training.checkpoints.restore import newest_checkpoint
from engine.training.export.export import export_run
from engine.training.loop.run import resume_run, start_run
from tests.support.folders import make_config
from tests.support.routes import send_all

SECONDS = 5.0
"""Each answer takes at most this long."""
WRITTEN = {
    "about.json": json.dumps({"name": "Named", "note": "", "tags": ["a"]}),
    "control.jsonl": json.dumps({"command": "pause", "time": 1.0, "id": "x"}) + "\n",
    "detached.json": json.dumps({"pid": 999_999, "started": 1.0, "recorded": 0}),
    "session.json": json.dumps({"time": 1e9, "elapsed": 1.0, "earlier_seconds": 1.0}),
    "trackers.json": json.dumps({"tensorboard": {"run": "x", "where": "y", "last": {"loss": 3}}}),
    "events.reserve": "\0" * 1000,
    "events.torn": "torn\n",
    "stdout.txt": "Finished\n",
    "stderr.txt": "ramstream: it said this\n",
    RESULTS_FILE: json.dumps(
        {
            "task": "t",
            "metric": "acc",
            "value": 0.5,
            "error": None,
            "higher_is_better": True,
            "shots": 0,
            "limit": None,
            "samples": 4,
            "weights": "best",
            "step": 6,
            "dtype": "float32",
            "chat": False,
            "time": 1e9,
            "harness": "0.4",
            "task_version": "1",
        }
    )
    + "\n",
}
"""Files that a run has in some of its lives, with something that belongs there."""
SMALL = (
    "config.yaml",
    "events.jsonl",
    "lock",
    *WRITTEN,
    "best/step-6/manifest.json",
    "checkpoints/step-6/manifest.json",
    "checkpoints/step-3/manifest.json",
    "checkpoints/step-6/0000-embed.planes",
    "export/config.json",
    "export/generation_config.json",
    "export/tokenizer.json",
    "export/tokenizer_config.json",
    "export/Modelfile",
    "export/README.md",
    "export/model.safetensors",
)
EXPORTED = ("config.yaml", "events.jsonl", RESULTS_FILE, "best", "checkpoints")
"""An export reads these."""
FOLDERS = ("best", "best/step-6", "checkpoints", "checkpoints/step-6", "export")


# ---------------------------------------------------------------------- what is done to a file


def truncated(path: Path, draw: random.Random, _: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def flipped(path: Path, draw: random.Random, _: Path) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice([1, 1, 4, 64])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def linked_to_a_file(path: Path, _: random.Random, victim: Path) -> None:
    path.unlink()
    path.symlink_to(victim / "notes.txt")


def linked_to_the_same(path: Path, _: random.Random, victim: Path) -> None:
    """To a whole file of its kind elsewhere, which could be read as well as any."""
    shutil.copy2(path, victim / "same")
    path.unlink()
    path.symlink_to(victim / "same")


def linked_to_itself(path: Path, _: random.Random, __: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def hard_linked(path: Path, _: random.Random, victim: Path) -> None:
    shutil.copy2(path, victim / "same")
    path.unlink()
    os.link(victim / "same", path)


def a_pipe(path: Path, _: random.Random, __: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_folder(path: Path, _: random.Random, __: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("x")


def a_device(path: Path, _: random.Random, __: Path) -> None:
    path.unlink()
    try:
        os.mknod(path, 0o20666, os.makedev(1, 5))  # /dev/zero
    except PermissionError:  # only root may
        os.mkfifo(path)


def huge(path: Path, _: random.Random, __: Path) -> None:
    os.truncate(path, 100 << 20)


def zeros(path: Path, _: random.Random, __: Path) -> None:
    path.write_bytes(b"")
    os.truncate(path, 100 << 20)


def deep(path: Path, draw: random.Random, _: Path) -> None:
    opening = draw.choice(["[", '{"a":', '{"kind":"log_line","x":['])
    path.write_text(opening * 100_000)


def odd_values(path: Path, draw: random.Random, _: Path) -> None:
    """The values of JSON, each replaced by one that nobody expects there."""
    lines = path.read_bytes().splitlines() or [b"{}"]
    place = draw.randrange(len(lines))
    with contextlib.suppress(ValueError):
        value = json.loads(lines[place])
        lines[place] = json.dumps(_odd(value, draw)).encode().replace(b"1e+4000", b"1e400")
        path.write_bytes(b"\n".join(lines) + b"\n")
        return
    path.write_bytes(draw.choice(ODD_TEXTS))


ODD_TEXTS = (
    b'{"pid": -1, "started": 1}',
    b'{"pid": 1e400, "started": 1e400}',
    b"1e400",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe\x00",
    b"- a\n- &x [*x, *x]\n",
    b"a: &a [x, x]\nb: &b [*a, *a, *a, *a]\nc: [*b, *b, *b, *b]\n",
)
_ODD = (None, -1, 0, 1, 2**53, -(2**63), 2**70, 1e308, -1e-320, "", "x", [], {}, [[]], True)


def _odd(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice(list(value))
        return value | {name: _odd(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], _odd(value[place], draw), *value[place + 1 :]]
    return draw.choice(_ODD)


def linked_folder(path: Path, _: random.Random, victim: Path) -> None:
    shutil.copytree(path, victim / "copy")
    shutil.rmtree(path)
    path.symlink_to(victim / "copy")


def linked_to_a_folder(path: Path, _: random.Random, victim: Path) -> None:
    shutil.rmtree(path)
    path.symlink_to(victim)


def a_file(path: Path, _: random.Random, __: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def a_pipe_for_a_folder(path: Path, _: random.Random, __: Path) -> None:
    shutil.rmtree(path)
    os.mkfifo(path)


Hurt = Callable[[Path, random.Random, Path], None]
OF_FILES: tuple[Hurt, ...] = (
    truncated,
    flipped,
    odd_values,
    linked_to_a_file,
    linked_to_the_same,
    linked_to_itself,
    hard_linked,
    a_pipe,
    a_folder,
    a_device,
    huge,
    zeros,
    deep,
)
SEEDED: tuple[Hurt, ...] = (truncated, flipped, odd_values, deep)
"""These draw what they do, so there is a case for each seed."""
OF_FOLDERS: tuple[Hurt, ...] = (linked_folder, linked_to_a_folder, a_file, a_pipe_for_a_folder)


@dataclass(frozen=True)
class Case:
    """One file of a run is hurt so."""

    file: str
    hurt: Hurt
    seed: int = 0

    @property
    def is_exported(self) -> bool:
        """An export reads this file."""
        return self.file.split("/")[0] in EXPORTED

    def __str__(self) -> str:
        return f"{self.file}-{self.hurt.__name__}-{self.seed}"


def cases(seeds: int) -> Iterator[Case]:
    for file in SMALL:
        for hurt in OF_FILES:
            for seed in range(seeds if hurt in SEEDED else 1):
                yield Case(file, hurt, seed)
    for folder in FOLDERS:
        for hurt in OF_FOLDERS:
            yield Case(folder, hurt)


# ---------------------------------------------------------------------- the folders


def make_runs(place: Path) -> tuple[Path, str]:
    """A folder of runs with one that has been interrupted and has everything a run can have; and
    the id of that run.
    """
    changes = {
        "train.steps": 6,
        "output.export": True,
        "output.keep_best": "loss",
        "output.timeline_every": 2,
        "output.sample_prompts": ["a"],
    }
    run = start_run(make_config(place, **changes), place / "runs")
    assert run.execute().state == "finished"
    path = run.folder.path
    for name, content in WRITTEN.items():
        (path / name).write_text(content)
    # Without its end it can be resumed.
    lines = (path / "events.jsonl").read_bytes().splitlines(keepends=True)
    (path / "events.jsonl").write_bytes(b"".join(lines[:-1]))
    return place / "runs", run.id


def digest(folder: Path) -> str:
    """Of all names, modes and contents in a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found.update(f"{path.relative_to(folder)} {status.st_mode}".encode())
        if path.is_file() and not path.is_symlink():
            found.update(path.read_bytes())
    return found.hexdigest()


# ---------------------------------------------------------------------- what is asked


class Asked:
    """What was asked about a run, and every answer that is none: a fault of the program, or one
    that took too long.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.slowest = 0.0

    def call(self, name: str, work: Callable[[], Any]) -> Any:
        """What `work` returns, or the sentence that it raises."""
        began = time.monotonic()
        try:
            return work()
        except RamstreamError as error:
            if not str(error).strip() or "Traceback" in str(error):
                self.problems.append(f"{name}: no sentence ({error!r})")
            return str(error)
        except BaseException as error:
            self.problems.append(f"{name}: {type(error).__name__}: {error}"[:500])
            return ""
        finally:
            took = time.monotonic() - began
            self.slowest = max(self.slowest, took)
            if took > SECONDS:
                self.problems.append(f"{name}: took {took:.1f} s")


def ask_everything(runs: Path, hurt: str, good: str, place: Path, exports: bool) -> Asked:
    """Asks all that a person can ask of the run `hurt` beside the run `good`."""
    asked = Asked()
    session = asked.call("session", lambda: Session(runs))
    try:
        _ask_the_app(asked, session, hurt, good)
    finally:
        asked.call("close", session.close)
    listed = asked.call("runs", lambda: runs_as_text(runs, False))
    if not (hurt in listed and good in listed):
        asked.problems.append("runs: a run is missing")
    found = asked.call("runs --json", lambda: runs_as_text(runs, True))
    states = {run["id"]: run for run in json.loads(found or "[]")}
    if states.get(good, {}).get("state") == "unreadable" or hurt not in states:
        asked.problems.append("runs --json: a run is missing")
    if states.get(hurt, {}).get("state") == "unreadable" and not states[hurt]["reason"]:
        asked.problems.append("runs --json: no reason")
    folder = RunFolder(runs / hurt)
    asked.call("send", lambda: send_command(folder, "stop"))
    asked.call("describe", lambda: write_about(open_run(runs, hurt), "New name", ""))
    asked.call("checkpoint", lambda: newest_checkpoint(folder.checkpoints_path, True))
    if exports:
        asked.call("export", lambda: export_run(runs, hurt, place / "exported"))
    run = asked.call("resume", lambda: resume_run(runs, hurt))
    if run and not isinstance(run, str):
        asked.call("close run", run.close)
    return asked


def _ask_the_app(asked: Asked, session: Session, hurt: str, good: str) -> None:
    chat = Chat(session)
    routes = [
        *run_routes(session),
        *list_routes(session),
        *timeline_routes(session),
        *chat_routes(chat),
    ]
    paths = [
        "/api/recent",
        f"/api/live/{hurt}",
        f"/api/runs/{hurt}/log",
        f"/api/runs/{hurt}/details",
        f"/api/runs/{hurt}/curves.csv",
        f"/api/runs/{hurt}/timeline",
        f"/api/live/{good}",
        "/api/live",
        "/api/chat/choices",
    ]
    for path in paths:
        _ask(asked, routes, "GET", path)
    answer = _ask(asked, routes, "GET", "/api/runs")
    rows = {row["id"]: row for row in (answer or {}).get("runs", [])}
    if hurt not in rows or rows.get(good, {}).get("state") in (None, "unreadable"):
        asked.problems.append(f"/api/runs: a run is missing of {rows}"[:300])
    for weights in ("newest", "export", "best-6"):
        choice = {"run_id": hurt, "weights": weights}
        _ask(asked, routes, "POST", "/api/chat/about", {"choice": choice})


def _ask(asked: Asked, routes: Any, method: str, path: str, body: Any = None) -> Any:
    """The answer to one request, if it is JSON."""
    answers = asked.call(path, lambda: send_all(routes, (method, path, body)))
    if not answers:
        return None
    if answers[0].status_code >= 500:
        asked.problems.append(f"{path}: {answers[0].status_code} {answers[0].text[:400]}")
    return answers[0].json() if "json" in answers[0].headers["content-type"] else None
