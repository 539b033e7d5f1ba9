"""The curves of a run and the diagnosis above them, in Chromium, against the real server."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from playwright.sync_api import expect

from engine.config.settings import TrainConfig
from engine.runs.record.events import RunStarted, StateChanged, StepFinished
from engine.runs.record.run_folder import create_run
from tests.browser.screen import address, open_other_settings, open_view, open_why, verdict
from tests.support.browser import ROOT, WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS
from tests.support.synthetic_run import records, run_events, step_finished, write_events

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

CONFIG = TrainConfig.from_dict(
    {
        "name": "Curves",
        "model": {
            "source": str(ROOT / "assets/starter-model"),
            "init": "random",
            "dtype": "float32",
        },
        "data": {"source": str(ROOT / "assets/starter.jsonl")},
        "train": {"steps": 400, "batch_size": 16},
    }
)
LEARNING = ("loss", "accuracy", "optimizer")
MACHINE = ("throughput", "memory", "step_time", "power", "norms")
AXIS = "([name, axis]) => document.querySelector(`[data-figure=${name}]`)._fullLayout?.[axis]"
RANGE = f"(wanted) => ({AXIS})(wanted).range.map(Number)"
TICKS = """async ([low, high, length]) =>
  (await import('/ramstream/shared/charts/log_ticks.js')).logTicks(low, high, length).ticktext"""
DRAWN = "name => document.querySelector(`[data-figure=${name}]`)?.data?.[0]?.x.length ?? 0"

# Notes when each turn began and ended, by one clock for all pages.
TURNS = """(() => {
  const request = navigator.locks.request.bind(navigator.locks);
  const now = () => performance.timeOrigin + performance.now();
  window.turns = [];
  window.asked = 0;
  navigator.locks.request = (name, options, draw) => {
    asked += 1;
    return request(name, options, async () => {
      const begun = now();
      try { return await draw(); } finally { turns.push([begun, now()]); }
    });
  };
})()"""


def recorded(server, events, config=CONFIG):
    folder = create_run(server.runs, config)
    write_events(folder.events_path, records(events, folder.id))
    return folder


def chart(page, name):
    return page.locator(f"[data-figure={name}]")


@pytest.fixture
def live(context, server):
    """A page with a view of all charts, and how to open a run in it."""
    page = context.new_page()
    page.set_viewport_size({"width": 1440, "height": 2600})

    def open_run(folder, drawn="norms", view="machine"):
        page.goto(address(server, folder.id, view))
        page.wait_for_function(f"({DRAWN})('{drawn}') > 0")
        return page

    return open_run


def test_every_curve_is_drawn_on_each_axis_and_a_zoom_outlives_updates(live, server):
    folder = recorded(server, run_events(200, total=300, blocks=4, ended=None))
    page = live(folder)
    for view, names in (("learning", LEARNING), ("machine", MACHINE)):
        open_view(page, view)
        for name in names:
            page.wait_for_function(f"({DRAWN})('{name}') > 0")
            expect(page.locator(f"[data-caption={name}]")).not_to_be_empty()
    units = page.evaluate("document.querySelector('[data-figure=norms]').data[0].y")
    assert units == ["embed", *(f"block {k}" for k in range(4)), "head"]
    # Zoom one, and all follow, in other views too; what is recorded meanwhile does not undo it.
    page.evaluate(
        "Plotly.relayout(document.querySelector('[data-figure=throughput]'), "
        "{'xaxis.range[0]': 50, 'xaxis.range[1]': 90})"
    )
    for view, names in (("machine", MACHINE), ("learning", LEARNING)):
        open_view(page, view)
        for name in names:
            page.wait_for_function(f"Math.abs(({RANGE})(['{name}', 'xaxis'])[1] - 90) < 0.01")
    shown = page.evaluate(DRAWN, "loss")
    write_events(
        folder.events_path,
        records([step_finished(step, 300) for step in range(201, 206)], folder.id, first_seq=9000),
    )
    page.wait_for_function(f"({DRAWN})('loss') > {shown}")
    assert all(
        page.evaluate(RANGE, [name, "xaxis"]) == pytest.approx([50, 90]) for name in LEARNING
    )
    page.get_by_role("button", name="Show everything").click()
    page.wait_for_function(f"({RANGE})(['optimizer', 'xaxis'])[1] > 150")

    page.get_by_role("button", name="Tokens", exact=True).click()
    page.wait_for_function(
        "document.querySelector('[data-figure=loss]')._fullLayout.xaxis.title.text"
        " === 'tokens so far'"
    )
    open_view(page, "machine")
    page.wait_for_function(f"({RANGE})(['norms', 'xaxis'])[1] > 200 * 4096 * 0.9")


def test_pages_of_one_browser_draw_in_turn_but_wait_for_none_that_stands_still(context, server):
    folder = recorded(server, run_events(50, total=300, blocks=2, ended=None))
    pages = []
    for _ in range(2):
        page = context.new_page()
        page.add_init_script(TURNS)
        page.set_viewport_size({"width": 1440, "height": 2600})
        page.goto(address(server, folder.id, "machine"))
        pages.append(page)
    for page in pages:
        page.wait_for_function(f"({DRAWN})('throughput') > 0")
    for step in range(51, 57):
        write_events(
            folder.events_path,
            records([step_finished(step, 300)], folder.id, first_seq=9000 + step),
        )
        for page in pages:
            page.wait_for_function(f"({DRAWN})('throughput') >= {step}")
    turns = sorted(turn for page in pages for turn in page.evaluate("turns"))
    assert turns and all(page.evaluate("asked") >= 3 + 6 for page in pages)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(turns))

    # One that is in a debugger, in the middle of a drawing.
    pages[0].evaluate(
        "() => new Promise((held) => navigator.locks.request('ramstream-drawing', "
        "{}, () => { held(); return new Promise(() => {}); }))"
    )
    write_events(folder.events_path, records([step_finished(57, 300)], folder.id, first_seq=9100))
    pages[1].wait_for_function(f"({DRAWN})('throughput') >= 57")


def test_only_what_nobody_would_see_is_drawn_later(live, server):
    page = live(recorded(server, run_events(20, blocks=2)), "loss", "overview")

    def waits(drawn, newer, shown=(0, 1000), **layout):
        """ms for curves of [(x, y) ...], 500 px wide."""
        figures = [
            {
                "data": [{"type": "scatter", "name": "loss", "x": x, "y": y} for x, y in curves],
                "layout": {},
            }
            for curves in (drawn, newer)
        ]
        figures[1]["layout"] = layout
        return page.evaluate(
            """async ([drawn, newer, shown]) =>
          (await import('/ramstream/shared/charts/patience.js'))
            .patience(drawn, newer, shown, 500)""",
            [*figures, list(shown)],
        )

    curve = ([0, 500, 1000], [9.0, 4.0, 2.0])
    a_pixel, less = ([0, 500, 1002], [9.0, 4.0, 2.0]), ([0, 500, 1001], [9.0, 4.0, 2.0])
    assert waits([curve], [less]) > 0 and waits([curve], [a_pixel]) == 0
    assert waits([curve], [a_pixel], (0, 500)) > waits([curve], [less])  # beyond a zoom
    assert waits([curve], [a_pixel], (600, 1001)) == 0
    for changed in (
        ([0, 500, 1001], [9.0, 4.0, 1.9]),
        ([0, 500, 1001], [9.0, 9.1, 2.0]),
        ([0, 500, 1001], [9.0, None, 1.0]),
    ):
        assert waits([curve], [changed]) == 0
        assert waits([curve], [changed], (0, 500)) == 0  # the axis of its heights changes
    assert waits([curve], [curve, curve]) == 0 and waits([curve], [less], title="Another") == 0
    assert waits([curve, curve], [less, a_pixel]) == 0 and waits([([], [])], [([1000], [2.0])]) == 0


def test_loss_and_norm_have_a_log_scale_that_the_keyboard_switches(live, server):
    page = live(recorded(server, run_events(100, blocks=2)), "loss", "learning")
    toggle = page.get_by_role("button", name="Log scale")
    expect(toggle).to_have_attribute("aria-pressed", "true")
    page.wait_for_function(
        f"({AXIS})(['loss', 'yaxis'])?.type === 'log'"
        f" && ({AXIS})(['optimizer', 'yaxis2'])?.type === 'log'"
    )
    assert page.evaluate(f"({AXIS})(['optimizer', 'yaxis']).type") == "linear"
    # Of the log axis itself: losses lie between 0.05 and 5.
    low, high = page.evaluate(RANGE, ["loss", "yaxis"])
    assert -2 < low < high < 1
    expect(chart(page, "loss").locator(".ytick")).to_have_text(["0.1", "0.2", "0.5", "1", "2"])
    assert page.evaluate(TICKS, [0.41, 0.97, 90]) == ["0.4", "0.6", "0.8", "1.0"]
    assert page.evaluate(TICKS, [2e-7, 9.0, 90]) == ["1×10⁻⁶", "0.0001", "0.01", "1"]
    # A stretch of heights has ticks of its own.
    page.evaluate(
        "Plotly.relayout(document.querySelector('[data-figure=loss]'), "
        "{'yaxis.range[0]': Math.log10(0.21), 'yaxis.range[1]': Math.log10(0.39)})"
    )
    expect(chart(page, "loss").locator(".ytick").first).to_have_text("0.25")
    # Labels have the format of all other numbers.
    page.evaluate("Plotly.Fx.hover(document.querySelector('[data-figure=optimizer]'), {xval: 99})")
    label = chart(page, "optimizer").locator(".hoverlayer")
    expect(label).to_have_text(re.compile(r"learning rate : [\d.]+×10⁻⁵"))
    toggle.focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"({AXIS})(['loss', 'yaxis']).type === 'linear'")


def test_charts_of_a_run_without_a_gpu_fit_at_every_width(live, server):
    page = live(recorded(server, run_events(60, gpu=False, blocks=2)))
    expect(chart(page, "power")).to_be_hidden()
    for width in (1440, 800, 390):
        page.set_viewport_size({"width": width, "height": 5200})
        page.wait_for_function(
            "[...document.querySelectorAll('.rs-charts figure .rs-plot')]"
            ".filter((plot) => plot.offsetParent).every("
            "(plot) => Math.abs(plot._fullLayout?.width - plot.clientWidth) < 2)"
        )
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_diagnosis_opens_a_corrected_draft(live, server):
    waiting = [
        RunStarted(name="Curves", device="cuda", total_steps=400, units=["embed"]),
        StateChanged("running"),
        *(
            StepFinished(
                step=step,
                seconds=1.0,
                loss=1.0,
                tokens=10,
                tokens_per_second=10.0,
                tflops=1.0,
                exposed={"optimizer": 0.3},
            )
            for step in range(1, 31)
        ),
    ]
    folder = recorded(server, waiting)
    page = live(folder, "loss", "overview")
    open_why(page)
    card = verdict(page)
    expect(card).to_contain_text("The GPU waits 30 % of the time for the CPU optimizer.")
    offer = card.get_by_role("button", name="Try 32 rows a step")
    expect(offer).to_have_attribute(
        "title", "32 rows a step instead of 16, 200 steps instead of 400"
    )
    offer.focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/?show=new")
    open_other_settings(page)
    for field, value in (
        ("train-batch_size", "32"),
        ("train-steps", "200"),
        ("model-source", CONFIG.model.source),
    ):
        expect(page.locator(f"#field-{field} :is(input, textarea)")).to_have_value(value)
    page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])")
    expect(page.locator("#preset input")).to_have_value("")
    # A run whose settings do not load is told in the card.
    page = live(folder, "loss", "overview")
    (folder.path / "config.yaml").unlink()
    open_why(page)
    page.get_by_role("button", name="Try 32 rows a step").click()
    expect(verdict(page).get_by_role("alert")).to_contain_text("cannot be used by this version")
