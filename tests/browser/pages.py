"""Ten people who watch one run for long: `python -m tests.browser.pages [--minutes 30]`.

A run of 100 units is recorded, a step every `--step-seconds` with a timeline of 800 spans every
tenth, while ten pages of one browser context show it: half of them its overview and half, zoomed,
every chart of its machine. Prints what that costs the server, how far behind the pages are, how
long drawing takes and how the pages' memory grows.

test_pages.py does it with fewer pages, and for as many minutes as RAMSTREAM_PAGES_MINUTES says.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import psutil
from msgspec.structs import replace

from engine.config.settings import TrainConfig
from engine.runs.record.events import MemorySampled, StepFinished
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import RunFolder, create_run
from tests.browser.screen import address
from tests.support.browser import FLAGS, Server, chromium_path
from tests.support.ports import free_port
from tests.support.synthetic_run import run_events, step_finished, timeline, unit_norms

PAGES = 10
UNITS = 100
HISTORY = 500
"""Steps that are done when the pages are opened."""
SPAN_BLOCKS = 114
"""Blocks of a made-up step that has 800 spans (7 a block and one wait)."""
IDLE_SECONDS = 20
SETTLE_SECONDS = 15
"""After the pages are open: their first drawing, of everything at once, is no part of watching."""
WARM_UP_SECONDS = 20
"""After the server's start, while it imports what the first Start needs."""
HEAP_EVERY = 30
HEIGHT = 4200
"""px of a window in which every chart of a view is on the screen."""

# Counts what keeps a page busy, and notes when each step was first seen on it.
INSTRUMENTS = """(() => {
  const seen = window.watched = {tasks: [], drawings: [], steps: []};
  const longTasks = (list) => list.getEntries().forEach(({duration}) => seen.tasks.push(duration));
  new PerformanceObserver(longTasks).observe({type: 'longtask'});
  let shown = '';
  new MutationObserver(() => {
    const text = document.querySelector('.rs-bar [data-field=step]')?.textContent ?? '';
    if (text === shown) return;
    shown = text;
    seen.steps.push([parseInt(text.replaceAll(',', '')), Date.now() / 1000]);
  }).observe(document, {subtree: true, childList: true, characterData: true});
  let plotly;
  const timed = (draw) => function (node, ...rest) {
    const begun = performance.now(), result = draw.call(this, node, ...rest);
    seen.drawings.push([node.dataset.figure ?? node.className, performance.now() - begun]);
    return result;
  };
  const drawing = ['react', 'newPlot', 'restyle', 'relayout', 'update'];
  const set = (library) => {
    if (library !== plotly) for (const name of drawing) library[name] = timed(library[name]);
    plotly = library;
  };
  Object.defineProperty(window, 'Plotly', {configurable: true, get: () => plotly, set});
})()"""
ZOOMED = ("throughput", "memory", "step_time", "timeline")
ALL_DRAWN = """() => {
  const shown = [...document.querySelectorAll('.rs-run [data-figure]')]
    .filter((node) => node.offsetParent);
  return shown.length > 2 && shown.every((node) => node._fullLayout);
}"""
RANGES = """(names) => names.map((name) =>
  document.querySelector(`[data-figure=${name}]`)._fullLayout.xaxis.range.map(Number))"""


class Feed(threading.Thread):
    """Records a run that goes on until `over` is set; `written` says when each step was."""

    def __init__(self, folder: RunFolder, step_seconds: float):
        super().__init__(name="feed", daemon=True)
        self.folder, self._every = folder, step_seconds
        self.ready, self.over = threading.Event(), threading.Event()
        self.written: dict[int, float] = {}

    def run(self) -> None:
        with self.folder.lock():
            recorder = RunRecorder(self.folder.path, self.folder.id)
            for event in run_events(
                HISTORY, total=10**6, name="Watched", ended=None, blocks=UNITS - 2
            ):
                recorder.emit(event)
            memory = next(
                event for event in run_events(1, ended=None) if isinstance(event, MemorySampled)
            )
            self.ready.set()
            step = HISTORY
            while not self.over.wait(self._every):
                step += 1
                self.written[step] = time.time()
                recorder.emit(_lasting(step, self._every))
                recorder.emit(replace(memory, step=step))
                if step % 10 == 0:
                    recorder.emit(timeline(step, SPAN_BLOCKS))
                    recorder.emit(unit_norms(step, 10**6, UNITS))
            recorder.close()


def _lasting(step: int, seconds: float) -> StepFinished:
    event = step_finished(step, 10**6)
    return replace(event, seconds=seconds, tokens_per_second=event.tokens / seconds)


@dataclass
class Figures:
    """What was measured, over all pages."""

    idle: float = 0.0
    """Of a core, the server's time with no page open."""
    watched: float = 0.0
    """Of a core, with all pages open."""
    seconds: float = 0.0
    late: list[list[float]] = field(default_factory=list)
    """For each page, of each step the seconds from its record until it, or a later one, was shown.
    """
    tasks: list[float] = field(default_factory=list)
    """ms of tasks over 50 ms of the pages' main threads."""
    drawings: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """ms of each drawing, by chart."""
    heaps: list[list[int]] = field(default_factory=list)
    """For each page, bytes of JavaScript's memory after a collection, twice a minute."""
    zooms_lost: int = 0

    @property
    def heap_growth(self) -> list[float]:
        """For each page, the most since half a minute after the first sample over the greater of
        these two, less one: by then what is drawn again and again has been compiled. That a browser
        lets go of compiled code at times, up to 6 MiB at once, and compiles it anew is no growth.
        """
        return [max(samples[1:]) / max(samples[:2]) - 1 for samples in self.heaps]

    def told(self) -> str:
        late, busy = sorted(chain.from_iterable(self.late)), sorted(self.tasks)
        lines = [
            f"{len(self.heaps)} pages for {self.seconds / 60:.1f} minutes",
            f"server: {100 * self.idle:.2f} % of a core idle, {100 * self.watched:.2f} % watched, "
            f"{100 * (self.watched - self.idle):+.2f} %",
            f"behind: median {statistics.median(late):.2f} s, 99 % "
            f"{late[int(0.99 * len(late))]:.2f} s, most {late[-1]:.2f} s of {len(late)} steps "
            "shown",
            f"tasks over 50 ms: {len(busy)}" + (f", the longest {busy[-1]:.0f} ms" if busy else ""),
            *(
                f"drawing {name}: median {statistics.median(times):.1f} ms, 95 % "
                f"{sorted(times)[int(0.95 * len(times))]:.1f} ms, most {max(times):.1f} ms of "
                f"{len(times)}"
                for name, times in sorted(self.drawings.items())
            ),
            "heap: "
            + ", ".join(
                f"{samples[0] / 2**20:.1f} to {samples[-1] / 2**20:.1f} MiB"
                for samples in self.heaps
            )
            + "; growth "
            + ", ".join(f"{100 * growth:+.1f} %" for growth in self.heap_growth),
            f"zooms lost: {self.zooms_lost}",
        ]
        return "\n".join(lines)


@contextmanager
def feeding(server: Server, step_seconds: float) -> Iterator[Feed]:
    config = {"name": "Watched", "model": {"source": "model"}, "data": {"source": "data"}}
    feed = Feed(create_run(server.runs, TrainConfig.from_dict(config)), step_seconds)
    feed.start()
    feed.ready.wait()
    try:
        yield feed
    finally:
        feed.over.set()
        feed.join()


def measure(context, server: Server, feed: Feed, minutes: float, count: int = PAGES) -> Figures:
    """Opens `count` pages in `context` and watches them for so many minutes; then the run stands
    still, and all have to show its last step.
    """
    figures, process = Figures(), psutil.Process(server.process.pid)
    figures.idle = _used(process, IDLE_SECONDS) / IDLE_SECONDS
    context.add_init_script(INSTRUMENTS)
    views = ["machine", "overview"] * (count // 2)
    pages = [_opened(context, address(server, feed.folder.id, view)) for view in views]
    for page in pages[::2]:
        for name in ("step_time", "timeline"):
            _zoom(page, name)
    time.sleep(SETTLE_SECONDS)
    zoomed = [page.evaluate(RANGES, ZOOMED) for page in pages[::2]]
    sessions = [context.new_cdp_session(page) for page in pages]
    for page, session in zip(pages, sessions):
        session.send("Performance.enable")
        figures.heaps.append([_heap(session)])
        page.evaluate("() => { for (const list of Object.values(watched)) list.length = 0; }")
    shown: list[list[tuple[int, float]]] = [[] for _ in pages]
    used, begun, first = 0.0, time.monotonic(), max(feed.written)
    while (left := 60 * minutes - figures.seconds) > 1:
        used += _used(process, min(left, HEAP_EVERY))
        figures.zooms_lost += sum(
            page.evaluate(RANGES, ZOOMED) != before for page, before in zip(pages[::2], zoomed)
        )
        for page, session, samples, own in zip(pages, sessions, figures.heaps, shown):
            own.extend(_collect(page, figures))
            samples.append(_heap(session))
            # The collection of memory that was asked for is no task of the page.
            page.evaluate("() => { watched.tasks.length = 0; }")
        figures.seconds = time.monotonic() - begun
        figures.watched = used / figures.seconds
    feed.over.set()
    feed.join()
    figures.late = [
        _late(own, {step: at for step, at in feed.written.items() if step > first}) for own in shown
    ]
    for page in pages:
        page.locator(".rs-bar [data-field=step]", has_text=f"{max(feed.written):,} of").wait_for()
    return figures


def _opened(context, where: str):
    page = context.new_page()
    page.set_viewport_size({"width": 1440, "height": HEIGHT})
    page.goto(where)
    page.wait_for_function(ALL_DRAWN)
    return page


def _zoom(page, name: str) -> None:
    """As a person does, with the mouse."""
    box = page.locator(f"[data-figure={name}]").bounding_box()
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 0.5 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.7 * box["width"], box["y"] + 0.52 * box["height"], steps=4)
    page.mouse.up()


def _used(process: psutil.Process, seconds: float) -> float:
    """Seconds of CPU that the process takes in the next `seconds`."""
    before = process.cpu_times()
    time.sleep(seconds)
    after = process.cpu_times()
    return after.user + after.system - before.user - before.system


def _collect(page, figures: Figures) -> list[tuple[int, float]]:
    """Adds what the page has noted since it was last asked to `figures`; returns the steps that it
    showed, and when.
    """
    found = page.evaluate(
        "() => Object.fromEntries("
        "Object.entries(watched).map(([name, list]) => [name, list.splice(0)]))"
    )
    figures.tasks += found["tasks"]
    for name, milliseconds in found["drawings"]:
        figures.drawings[name].append(milliseconds)
    return found["steps"]


def _late(shown: list[tuple[int, float]], written: dict[int, float]) -> list[float]:
    late, k = [], 0
    for step, at in sorted(written.items()):
        while k < len(shown) and shown[k][0] < step:
            k += 1
        if k == len(shown):
            break
        late.append(shown[k][1] - at)
    return late


def _heap(session) -> int:
    """Bytes in use after collections, the least of three: what a drawing under way holds, or a
    finalizer has yet to let go of, is garbage a moment later. What leaks is still there each time.
    """
    found = []
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
        metrics = session.send("Performance.getMetrics")["metrics"]
        found.append(
            int(next(metric["value"] for metric in metrics if metric["name"] == "JSHeapUsedSize"))
        )
    return min(found)


def main() -> None:
    from playwright.sync_api import sync_playwright

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--step-seconds", type=float, default=2)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        server = Server(Path(place), free_port())
        server.start()
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=FLAGS)
        try:
            time.sleep(WARM_UP_SECONDS)
            with feeding(server, arguments.step_seconds) as feed:
                print(
                    measure(browser.new_context(), server, feed, arguments.minutes).told(),
                    flush=True,
                )
        finally:
            browser.close()
            server.end()


if __name__ == "__main__":
    main()
