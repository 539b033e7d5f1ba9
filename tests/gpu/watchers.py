"""What watching costs a run: `python -m tests.gpu.watchers [MODEL ROWS TOKENS PAIRS SECONDS]`.

One run in the app's own process, as Start starts it, and beside it a process with ten watchers,
each of which asks the server for what a page with the run page open asks for, as often as a page
does. Periods with the watchers and without them take turns (which comes first takes turns too);
prints steps/s of each pair, and the mean difference with its 95 % interval over the pairs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree

from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.record.events import StepFinished
from engine.runs.record.following import replay
from tests.gpu.forecasts import folder_of
from tests.support.ports import free_port

WATCHERS = 10
FOLLOWING_SECONDS = 1.0
"""FOLLOWING of app/pages/run/run_page.js."""
WARM_UP_SECONDS = 40
SETTLE_SECONDS = 0.5
"""After each change of hands: the answers under way come to an end."""
STUDENT_T = {19: 2.093, 23: 2.069, 29: 2.045}
"""Two-sided 95 %, by degrees of freedom; 2.1 is more than all above 18."""


@dataclass(frozen=True)
class Period:
    watched: bool
    start: float
    end: float


def page(address: str, on: threading.Event) -> None:
    """One watcher: reads as app/pages/run/run_page.js does, at the same pauses."""
    seq = 0
    while on.wait():
        with urllib.request.urlopen(f"{address}?since={seq}&axis=step") as response:
            answer = json.loads(response.read())
        seq = answer["seq"]
        time.sleep(FOLLOWING_SECONDS)


def watch(address: str) -> None:
    """Ten watchers; lines `on` and `off` on the standard input switch them."""
    on = threading.Event()
    for _ in range(WATCHERS):
        threading.Thread(target=page, args=(address, on), daemon=True).start()
    for line in sys.stdin:
        (on.set if line.strip() == "on" else on.clear)()


def start_app(runs: Path, port: int):
    """The app on a thread of this process, and its session."""
    import uvicorn

    from app.application import build_app
    from app.pages.frame.page import build_page
    from app.pages.new.checker import Checker
    from app.server.guard import GuardPolicy
    from app.session.session import Session
    from app.shared.theme import css_variables, make_theme

    session = Session(runs)
    checker = Checker(session)
    app = build_app(
        session,
        checker,
        build_page(session, checker),
        GuardPolicy.for_bind("127.0.0.1", None),
        theme=make_theme(),
        css=css_variables(),
    )
    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", access_log=False)
    )
    threading.Thread(target=server.run, daemon=True).start()
    return session


def start_run(session, model: str, rows: int, tokens: int, place: Path) -> str:
    line = (PROGRAM_ROOT / "assets" / "starter.jsonl").read_text().splitlines()[0]
    data = place / "data.jsonl"
    data.write_text(f"{line}\n" * 100 * rows)  # all alike, so that every step is the same work
    return session.start(
        TrainConfig.from_dict(
            {
                "name": "Watched",
                "model": {"source": str(folder_of(model, place / "model")), "init": "random"},
                "data": {"source": str(data), "max_seq_len": tokens, "eval_fraction": 0.0},
                "train": {"steps": 10**6, "batch_size": rows, "learning_rate": 1e-6},
                "output": {
                    "export": False,
                    "eval_every": 0,
                    "checkpoint_every": 0,
                    "exact_match_samples": 0,
                },
            }
        )
    )


def wait_for_step(session, run_id: str, step: int) -> None:
    while True:
        snapshot = session.active_run and session.active_run.recorder.snapshot
        if snapshot is None:
            raise SystemExit(f"The run has ended: see {session.runs_dir / run_id}.")
        if snapshot.step >= step:
            return
        time.sleep(0.2)


def measure(watchers: subprocess.Popen, pairs: int, seconds: float) -> list[tuple[Period, Period]]:
    """For each pair, its period without and its period with watchers."""
    found = []
    for number in range(pairs):
        pair = {}
        for watched in (False, True) if number % 2 == 0 else (True, False):
            watchers.stdin.write("on\n" if watched else "off\n")
            watchers.stdin.flush()
            time.sleep(SETTLE_SECONDS)
            start = time.time()
            time.sleep(seconds)
            pair[watched] = Period(watched, start, time.time())
        found.append((pair[False], pair[True]))
    return found


def rate(times: list[float], period: Period) -> float | None:
    """Steps/s between the first and the last step that ended within the period; None where fewer
    than two did.
    """
    within = [moment for moment in times if period.start <= moment <= period.end]
    return (len(within) - 1) / (within[-1] - within[0]) if len(within) > 1 else None


def main(asked: list[str]) -> None:
    if asked[:1] == ["--watch"]:
        watch(asked[1])
        return
    model = asked[0] if asked else "Qwen/Qwen2.5-0.5B"
    rows, tokens, pairs = (
        int(asked[index]) if len(asked) > index else default
        for index, default in ((1, 16), (2, 512), (3, 24))
    )
    seconds = float(asked[4]) if len(asked) > 4 else 5.0
    place = Path(tempfile.mkdtemp())
    port = free_port()
    session = start_app(place / "runs", port)
    run_id = start_run(session, model, rows, tokens, place)
    wait_for_step(session, run_id, 1)
    time.sleep(WARM_UP_SECONDS)
    watchers = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.gpu.watchers",
            "--watch",
            f"http://127.0.0.1:{port}/api/live/{run_id}",
        ],
        stdin=subprocess.PIPE,
        text=True,
    )
    try:
        periods = measure(watchers, pairs, seconds)
    finally:
        watchers.kill()
    folder = session.active_run.folder
    session.request(run_id, "discard")
    while session.active_id is not None:
        time.sleep(0.2)
    times = [
        record.time
        for record in replay(folder.events_path)
        if isinstance(record.event, StepFinished)
    ]
    found = [(rate(times, without), rate(times, watched)) for without, watched in periods]
    rates = [pair for pair in found if None not in pair]
    if len(rates) < len(periods):
        print(
            f"{len(periods) - len(rates)} pairs are left out: fewer than two steps ended in one of "
            "their periods"
        )
    rmtree(place)
    print(f"{model}, {rows} x {tokens}: steps/s without and with {WATCHERS} watchers")
    for without, watched in rates:
        print(f"  {without:8.4f} {watched:8.4f}  {100 * (watched / without - 1):+6.2f} %")
    differences = [100 * (watched / without - 1) for without, watched in rates]
    spread = (
        statistics.stdev(differences)
        / len(differences) ** 0.5
        * STUDENT_T.get(len(differences) - 1, 2.1)
    )
    print(
        f"mean difference {statistics.mean(differences):+.2f} % +- {spread:.2f} % (95 %), over "
        f"{len(rates)} pairs of {seconds:g} s",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
