"""Pictures of every state of a run: `python -m tests.browser.states --to FOLDER [STATE ...]` draws
the overview of a made-up run in each state, at three widths, light and dark.

The pictures are to be looked at: FOLDER gets one of each state, width and theme, and a sheet of
all states for each width and theme.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image, ImageDraw
from playwright.sync_api import Page, expect, sync_playwright

from engine.config.settings import TrainConfig
from engine.runs.record.events import (
    DataPrepared,
    EvalFinished,
    Event,
    ExactMatchMeasured,
    JobProgressed,
    PlanBuilt,
    PromptsAnswered,
    RunEnded,
    RunStarted,
    StateChanged,
)
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder, create_run
from engine.runs.summaries.benchmark_results import BenchmarkResult, append_benchmarks
from tests.browser.screen import address, note, open_page
from tests.support.browser import FLAGS, WAIT_MILLISECONDS, Server, answer, chromium_path
from tests.support.measured import SEVERAL
from tests.support.ports import free_port
from tests.support.several_ranks import on_ranks
from tests.support.synthetic_run import GIB, run_events

SIZES = {"1440": (1440, 900), "800": (800, 900), "390": (390, 844)}
SCHEMES = ("light", "dark")
NAME = "Roman numerals"
SETTLE = 1200
"""ms in which a page of another size is drawn anew."""
PREPARING = StateChanged("preparing")
STARTED = RunStarted(
    name=NAME, device="cuda", total_steps=200, parameters=638_000, units=["embed", "head"]
)
READ = DataPrepared({"rows": 1200, "trained_tokens": 34567})
FULL_DISK = StateChanged(
    "paused",
    "The disk is full: a checkpoint takes 91 GiB, and 12 GiB are free in /data/runs. Free 79 GiB; "
    "the run then goes on by itself.",
    "checkpoint",
)
ASKS = (("output", {"eval_every": 40, "exact_match_samples": 50}),)
EVALUATIONS = (EvalFinished, ExactMatchMeasured)
ANSWERS = [
    ("In Roman numerals: 2781?", "MMDCCLXXXI", "MMMDCCCLXXXIII"),
    ("In Roman numerals: 1618?", "MDCXVIII", "The answer is one thousand six hundred and more"),
    ("In Roman numerals: 44?", "XLIV", "4"),
]


@dataclass(frozen=True)
class State:
    """A `State` is what is pictured: a run's record, and what else there is of it."""

    events: tuple[Event, ...] = ()
    is_locked: bool = False
    """A process owns the run while it is pictured."""
    saved: int | None = None
    """A checkpoint of this step is on the disk."""
    resumes: tuple[Event, ...] = ()
    """These events come after those of the first session."""
    damage: bytes = b""
    before: Callable[[Page, Server], None] | None = None
    """Called before the page is opened."""
    after: Callable[[Page, Server], None] | None = None
    """Called on the opened page."""
    settings: tuple[tuple[str, object], ...] = ()
    view: str = "overview"
    benchmarks: tuple[BenchmarkResult, ...] = ()
    """These were measured of its weights."""


def going(steps: int = 80, *more: Event, evaluates: bool = True) -> tuple[Event, ...]:
    """A run that goes on."""
    events = run_events(steps, total=200, name=NAME, ended=None, blocks=4)
    if not evaluates:
        return (*(each for each in events if not isinstance(each, EVALUATIONS)), *more)
    events = [_longer(each) if isinstance(each, ExactMatchMeasured) else each for each in events]
    now = [right if place else "MDCXVII" for place, (_, right, _) in enumerate(ANSWERS)]
    answered = [{"prompt": asked[0], "answer": text} for asked, text in zip(ANSWERS, now)]
    return (*events, PromptsAnswered(steps - steps % 40, answered), *more)


def ended(state: str, reason: str, steps: int = 80) -> tuple[Event, ...]:
    return (*going(steps), StateChanged("saving"), RunEnded(state, reason))


def finished() -> tuple[Event, ...]:
    """With answers that need room."""
    events = run_events(120, name=NAME, blocks=4)
    return tuple(_longer(each) if isinstance(each, ExactMatchMeasured) else each for each in events)


def _longer(match: ExactMatchMeasured) -> ExactMatchMeasured:
    samples = [
        {"prompt": asked, "expected": right, "answer": wrong if match.moment == "before" else right}
        for asked, right, wrong in ANSWERS
    ]
    return ExactMatchMeasured(match.step, match.moment, match.correct, match.total, samples)


def preparing(job: str, done: int, total: int, message: str = "", *before: Event) -> State:
    return State((PREPARING, *before, JobProgressed(job, done, total, message)), is_locked=True)


# ------------------------------------------------------------------ what is done to a page


def hold_answers(page: Page, _server: Server) -> None:
    """The record is read for long."""
    page.route("**/api/live/**", lambda route: None)


def cut_connection(page: Page, _server: Server) -> None:
    page.context.set_offline(True)
    expect(note(page)).to_contain_text("Connection lost")


def queue_two(page: Page, _server: Server) -> None:
    """Two runs of the form."""
    open_page(page, "new")
    for _ in range(2):
        page.locator("#add-to-queue:not([disabled])").click()
        expect(page.locator(".rs-queued")).to_contain_text("in line")
        page.wait_for_timeout(500)
    open_page(page, "runs")
    expect(page.locator("[data-part=queue-rows] li").first).to_be_visible()


def ask_to_pause(_page: Page, server: Server) -> None:
    run_id = answer(server, "/api/live")["active"]
    answer(server, f"/api/runs/{run_id}/control", {"command": "pause"})


def see_all_ranks(page: Page, _server: Server) -> None:
    page.get_by_label("Rank", exact=True).select_option("all")
    page.locator(".rs-timeline").scroll_into_view_if_needed()
    expect(page.locator("[data-caption=timeline]")).to_contain_text("on 2 ranks")


FAILED = "The loss of step 81 is not a number: lower the learning rate and resume."
BROKEN = "Line 4 of data.jsonl is not valid JSON; mend it and start anew."
KEPT = "Stopped at step 80; the checkpoint of step 80 can be resumed."
STATES = {
    "no-runs": State(),
    "loading-record": State(going(), before=hold_answers),
    "reading-data": preparing("tokenize", 310, 1200),
    "downloading": preparing("download", 4 * GIB, 15 * GIB, "4 of 15.2 GiB of Qwen/Qwen2.5-7B"),
    "queued": State(going(), True, after=queue_two),
    "preparing": preparing("load_model", 1, 4, "", READ),
    "compiling": State(
        (PREPARING, READ, PlanBuilt({"compiled": True}), STARTED, StateChanged("running")), True
    ),
    "dry-run": replace(preparing("dry_run", 0, 0, "", READ, STARTED), settings=ASKS),
    "running-without": State(
        going(evaluates=False), True, settings=(("output", {"eval_every": 0}),)
    ),
    "running": State(going(), True),
    "pausing": State(going(80, StateChanged("pausing")), True),
    "pause-asked": State(going(), True, after=ask_to_pause),
    "paused": State(going(80, StateChanged("paused")), True, saved=80),
    "paused-disk": State(going(80, FULL_DISK), True, saved=40),
    "reconnecting": State(going(), True, after=cut_connection),
    "resumed": State(
        ended("stopped", KEPT),
        True,
        saved=80,
        resumes=(
            PREPARING,
            RunStarted(name=NAME, device="cuda", total_steps=200, resumed_step=80),
            StateChanged("running"),
            *[e for e in going(120) if getattr(e, "step", 0) > 80],
        ),
    ),
    "failed-early": State((PREPARING, RunEnded("failed", BROKEN, "DataError"))),
    "failed-saved": State(ended("failed", FAILED), saved=80),
    "failed-unsaved": State(ended("failed", FAILED, 30)),
    "interrupted": State(going(), saved=80),
    "interrupted-unsaved": State(going(30)),
    "stopped": State(ended("stopped", KEPT), saved=80),
    "discarded": State(ended("discarded", "")),
    "finished": State(finished(), saved=120),
    "finished-without": State(
        tuple(
            each
            for each in run_events(120, name=NAME, blocks=4)
            if not isinstance(each, EVALUATIONS)
        ),
        saved=120,
    ),
    "damaged": State(going(), damage=b'{"kind":"step_finished","run_id":"x"\n\xff\xfe\n'),
    "unknown": State(),
    "hardware": State(),
    "runs": State(
        finished(), saved=120, view="overview", after=lambda page, _: open_page(page, "runs")
    ),
    "new": State(),
    "learning": State(finished(), saved=120, view="learning"),
    "machine": State(going(), True, view="machine"),
    "ranks": State(tuple(on_ranks(going())), True, view="machine"),
    "all-ranks": State(tuple(on_ranks(going())), True, view="machine", after=see_all_ranks),
    "settings": State(finished(), saved=120, view="settings"),
    "log": State(finished(), saved=120, view="log"),
    "evaluate": State(finished(), saved=120, view="evaluate", benchmarks=SEVERAL),
    "export": State(finished(), saved=120, view="export"),
    "chat": State(finished(), saved=120, view="chat"),
}
"""The states of a run, and the places of the app."""
WITHOUT_A_RUN = {
    "no-runs": "?view=overview",
    "unknown": "?run=20260101-000000-lost&view=overview",
    "hardware": "?show=hardware",
    "new": "?show=new",
}


# ------------------------------------------------------------------ a run in a state


def made(server: Server, state: State) -> RunFolder:
    """The folder of a run in this state."""
    settings = {
        "name": NAME,
        "model": {"source": "Qwen/Qwen2.5-7B"},
        "data": {"source": "roman.jsonl"},
        **dict(state.settings),
    }
    folder = create_run(server.runs, TrainConfig.from_dict(settings))
    for session in (state.events, state.resumes):
        if session:
            recorder = RunRecorder(folder.path, folder.id)
            for event in session:
                recorder.emit(event)
            recorder.close()
    if state.damage:
        lines = folder.events_path.read_bytes().splitlines(keepends=True)
        folder.events_path.write_bytes(b"".join([*lines[:60], state.damage, *lines[60:]]))
    if state.benchmarks:
        append_benchmarks(folder.path, state.benchmarks)
    if state.saved is not None:
        (folder.checkpoints_path / f"step-{state.saved}").mkdir(parents=True)
    return folder


@contextlib.contextmanager
def shown(context, server: Server, name: str) -> Iterator[Page]:
    """The page of a run in the state of this name."""
    state = STATES[name]
    page = context.new_page()
    with contextlib.ExitStack() as stack:
        where = f"{server.address}/{WITHOUT_A_RUN.get(name, '')}"
        if state.events:
            folder = made(server, state)
            where = address(server, folder.id, state.view)
            if state.is_locked:
                stack.enter_context(folder.lock())
        if state.before:
            state.before(page, server)
        page.goto(where)
        page.locator(".rs-bar [data-field=word]:not(:text-is('…'))").or_(
            page.locator("[data-part=waiting]:visible")
        ).first.wait_for(state="attached")
        page.wait_for_timeout(2 * SETTLE)
        if state.after:
            state.after(page, server)
        yield page
        context.set_offline(False)
        for queued in answer(server, "/api/runs")["queue"]["rows"]:
            answer(server, f"/api/queue/{queued['id']}/remove", {})
    page.close()


def sheet(pictures: dict[str, Path], path: Path, columns: int) -> None:
    """All pictures on one, each with its name."""
    images = {name: Image.open(each) for name, each in pictures.items()}
    width, height = next(iter(images.values())).size
    scale = min(1.0, 640 / width)
    width, height = round(width * scale), round(height * scale)
    rows = -(-len(images) // columns)
    whole = Image.new("RGB", (columns * (width + 8), rows * (height + 24)), "#888888")
    draw = ImageDraw.Draw(whole)
    for place, (name, image) in enumerate(images.items()):
        left, top = place % columns * (width + 8), place // columns * (height + 24)
        draw.text((left + 4, top + 5), name, fill="#ffffff")
        whole.paste(image.resize((width, height)), (left, top + 24))
    whole.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--whole", action="store_true", help="the whole page, not the window alone")
    parser.add_argument("states", nargs="*", metavar="STATE")
    arguments = parser.parse_args()
    arguments.to.mkdir(parents=True, exist_ok=True)
    taken: dict[tuple[str, str], dict[str, Path]] = {}
    with tempfile.TemporaryDirectory(prefix="ramstream-") as place, sync_playwright() as playwright:
        server = Server(Path(place), free_port())
        server.start()
        browser = playwright.chromium.launch(
            executable_path=chromium_path(), args=FLAGS, ignore_default_args=["--hide-scrollbars"]
        )
        context = browser.new_context(reduced_motion="reduce")
        context.set_default_timeout(WAIT_MILLISECONDS)
        for name in [each for each in STATES if each in (arguments.states or STATES)]:
            with shown(context, server, name) as page:
                for scheme in SCHEMES:
                    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
                    for label, (width, height) in SIZES.items():
                        page.set_viewport_size({"width": width, "height": height})
                        page.wait_for_timeout(SETTLE)
                        path = arguments.to / f"{name}-{label}-{scheme}.png"
                        page.screenshot(path=path, full_page=arguments.whole)
                        taken.setdefault((label, scheme), {})[name] = path
            print(name, flush=True)
        browser.close()
        server.end()
    for (label, scheme), pictures in taken.items():
        sheet(pictures, arguments.to / f"all-{label}-{scheme}.png", 5 if label == "390" else 3)


if __name__ == "__main__":
    main()
