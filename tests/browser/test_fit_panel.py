"""The verdict beside Start, on a machine with an H200 that the server is made to believe in: it
follows what is typed, pasted and clicked. How long that takes is printed (`pytest -s`), and never
judged.
"""

from __future__ import annotations

import re
import sys

import pytest
from playwright.sync_api import expect

from app.form.settings_form import shown_values
from app.pages.new.draft import NO_TAB, Drafts
from engine.config.settings import TrainConfig
from tests.browser.screen import open_other_settings
from tests.support.browser import ROOT, WAIT_MILLISECONDS, Server
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

SERVE = """
import sys
# Models of the hub could be downloaded, and have the starter's tokenizer.
import engine.model.build.pretrained_files as files
import engine.training.weights.usable_start as usable_start
load = files.load_tokenizer
files.load_tokenizer = lambda source: load("assets/starter-model")
usable_start.refuse_out_of_reach = lambda *given, **named: None
import app.pages.new.checker
from engine.machine.known_machines import named_machine, with_figures
machine = with_figures(named_machine("H200", 120), disk_gib=2000)
# With a file of this name beside the runs, torch seems to have no CUDA.
from dataclasses import replace
from engine.machine.findings import Check, Effect, Finding
unused = Finding(Check.TORCH, "PyTorch is built without CUDA.", Effect.NO_GPU, "pip install torch")
asking = replace(machine, findings=(unused,))
app.pages.new.checker.MACHINE_SECONDS = 0
app.pages.new.checker.read_machine = (
    lambda folder: asking if (folder / "no-cuda").exists() else machine
)
from app.main import Address, serve
serve(Address(port=int(sys.argv[1])), runs_dir=sys.argv[2], open_browser=False)
"""

MEASURE = """
(wanted) => {
  // From the last keystroke, paste or click to the frame in which the verdict says what is wanted.
  const root = document.querySelector('.rs-fit-panel'), events = ['input', 'click'];
  let began = null;
  window.followed = null;
  const begin = () => { began = performance.now(); };
  const see = () => {
    if (began === null || !wanted.every((part) => root.textContent.includes(part))) return;
    seen.disconnect();
    events.forEach((name) => document.removeEventListener(name, begin, true));
    requestAnimationFrame(() => {
      const painted = new MessageChannel();  // answers when the frame is done
      painted.port1.onmessage = () => { window.followed = performance.now() - began; };
      painted.port2.postMessage(null);
    });
  };
  const seen = new MutationObserver(see);
  seen.observe(root, {subtree: true, childList: true, characterData: true, attributes: true});
  events.forEach((name) => document.addEventListener(name, begin, true));
}
"""
COLORS = """name => ['[data-pool=' + name + '] i', '.rs-fit:has([data-pool=' + name + ']) th i']
  .map((nodes) => [...new Set([...document.querySelectorAll(nodes)]
    .map((node) => getComputedStyle(node).background))].sort())"""
"""The colors of a part's bar, and those of the rows below it."""
MODELS = (
    ("Qwen/Qwen2.5-7B", "7.62B"),
    ("Qwen/Qwen2.5-0.5B", "494M"),
    ("Qwen/Qwen2.5-3B", "3.09B"),
    ("meta-llama/Llama-3.1-8B", "8.03B"),
)
ROWS = (8, 48)
"""Batch sizes, each with a change of model and of length: more of them make the printed figures
steadier.
"""


class H200Server(Server):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", SERVE, str(self.port), str(self.runs)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = H200Server(
        tmp_path_factory.mktemp("app"), free_port(), {"PYTHONPATH": str(ROOT)}, is_plain=True
    )
    server.runs.mkdir()
    config = TrainConfig.from_dict(
        {
            "model": {"source": "Qwen/Qwen2.5-7B"},
            "data": {"source": "assets/starter.jsonl"},
            "train": {"steps": 77},
        }
    )
    Drafts(server.runs).remember(NO_TAB, "starter.yaml", shown_values(config))
    server.start()
    yield server
    server.end()


@pytest.fixture(scope="module")
def window(browser, server):
    """One window for the tests of this file; nothing may have gone wrong in it."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    errors = []
    context.on("weberror", lambda error: errors.append(str(error.error)))
    page = context.new_page()
    page.goto(server.address)
    page.wait_for_selector(".rs-fit-panel:not([data-tone=calm])")
    open_other_settings(page)
    yield page
    context.close()
    assert not errors


@pytest.fixture
def page(window):
    """The app with the 7B model and 32 rows of 1,024 tokens, whatever the test before has typed."""
    page = window
    for field, value in (
        ("model.source", "Qwen/Qwen2.5-7B"),
        ("data.source", "assets/starter.jsonl"),
        ("data.max_seq_len", "1024"),
        ("train.batch_size", "32"),
    ):
        expect(box(page, field)).to_have_value(re.compile("."))
        paste(page, field, value)
    expect(page.locator(".rs-fit-panel [data-field=size]")).to_have_text(
        re.compile("7.62B.*up to 32,768 tokens")
    )
    expect(page.locator("[data-pool=disk] i")).not_to_have_count(0)
    return page


def box(page, field):
    return page.locator(f"#field-{field.replace('.', '-')} :is(input, textarea)")


def select(page, field):
    box(page, field).click()
    box(page, field).evaluate("node => node.select()")


def paste(page, field, text):
    select(page, field)
    page.keyboard.insert_text(text)


def typed(page, field, text):
    select(page, field)
    page.keyboard.type(text, delay=60)


def typed_at_once(page, field, text):
    select(page, field)
    page.keyboard.type(text)


def open_memory(page):
    if page.locator(".rs-memory").get_attribute("open") is None:
        page.locator(".rs-memory summary").click()


def follow(page, act, *wanted):
    """Milliseconds until the verdict says all that is `wanted`."""
    page.evaluate(MEASURE, list(wanted))
    act()
    return page.wait_for_function("window.followed").json_value()


def test_the_verdict_follows_every_change_and_the_last_one_wins(page):
    times, length = [], 1024
    for number, rows in enumerate(ROWS):
        times.append(
            follow(
                page,
                lambda: typed(page, "train.batch_size", str(rows)),
                f"up to {rows * length:,} tokens",
            )
        )
        model, size = MODELS[(number + 1) % len(MODELS)]
        times.append(follow(page, lambda: paste(page, "model.source", model), f"{size} parameters"))
        length = (1024, 512)[number % 2 == 0]
        times.append(
            follow(
                page,
                lambda: typed(page, "data.max_seq_len", str(length)),
                f"up to {rows * length:,} tokens",
            )
        )
    # Faster than anything can answer: what stands there in the end is what was typed in the end.
    for rows in (7, 70, 9, 90, 3):
        typed_at_once(page, "train.batch_size", str(rows))
    times.append(
        follow(
            page,
            lambda: typed_at_once(page, "train.batch_size", "64"),
            f"up to {64 * length:,} tokens",
        )
    )
    page.wait_for_timeout(300)
    expect(page.locator(".rs-fit-panel")).to_contain_text(f"up to {64 * length:,} tokens")
    times.sort()
    middle, most = times[len(times) // 2], times[round(0.95 * len(times)) - 1]
    print(
        f"\n{len(times)} changes: {middle:.0f} ms in the middle, {most:.0f} at the 95th "
        f"percentile, {times[-1]:.0f} at most"
    )


def test_the_pool_says_which_units_live_where_and_what_that_costs(page):
    verdict = page.locator(".rs-fit-panel")
    open_memory(page)
    lives = verdict.locator("[data-field=lives]")
    split = re.compile(
        r"^Embed and blocks 0 to (\d+) live on the GPU, blocks \d+ to 27 and head in"
    )
    expect(lives).to_have_text(split)
    last = split.match(lives.inner_text()).group(1)
    labels = [page.locator(f"[data-pool={name}] [data-held=model]") for name in ("gpu", "host")]
    expect(labels[0].get_by_text(f"embed, blocks 0–{last}")).to_be_visible()
    expect(labels[1].get_by_text(f"blocks {int(last) + 1}–27, head")).to_be_visible()
    part = {name: page.locator(f".rs-fit:has([data-pool={name}])") for name in ("gpu", "host")}
    expect(part["gpu"].locator("[data-caption=cost]")).to_contain_text("these units are not moved")
    expect(part["host"].locator("[data-caption=cost]")).to_contain_text("copies over the bus")
    # The border moves with the settings.
    paste(page, "model.source", "Qwen/Qwen2.5-0.5B")
    expect(lives).to_have_text("The whole model lives on the GPU.")
    expect(labels[1]).to_have_count(0)
    widths = page.locator("[data-pool=gpu]").evaluate(
        "bar => [...bar.children].map((each) => each.getBoundingClientRect().width)"
    )
    whole = page.locator("[data-pool=gpu]").bounding_box()["width"]
    assert sum(widths) == pytest.approx(whole, abs=len(widths))


def test_each_item_is_told_once_with_its_color_in_the_bar(page):
    open_memory(page)
    for name, label in (("host", "RAM"), ("gpu", "GPU memory"), ("disk", "Disk")):
        part = page.locator(f".rs-fit:has([data-pool={name}])")
        drawn, listed = page.evaluate(COLORS, name)
        assert drawn == listed and len(listed) >= 2
        assert part.locator(".rs-pool-bar").get_attribute("aria-label").startswith(f"{label}: ")
        expect(part.locator("tbody tr").last).to_contain_text(re.compile(r"Free.*\d"))
    # What was unfolded stays so, while the rows follow.
    weights = page.locator(".rs-fit tr").filter(has_text="Units that live on the GPU")
    before = weights.inner_text()
    paste(page, "model.source", "Qwen/Qwen2.5-0.5B")
    expect(page.locator(".rs-fit-panel")).to_contain_text("494M parameters")
    expect(weights).not_to_have_text(before)
    expect(page.locator(".rs-memory")).to_have_attribute("open", "")
    expect(page.locator(".rs-fit-panel dl")).to_contain_text("tokens/s")
    expect(page.locator(".rs-fit-panel dl")).to_contain_text(
        "estimated from the card's specification"
    )


def test_one_click_on_a_suggestion_makes_it_fit(page):
    # What RAM lacks of a smaller model finds room on the card.
    paste(page, "model.source", "mistralai/Mistral-Small-24B-Base-2501")
    verdict = page.locator(".rs-fit-panel")
    expect(verdict.locator("h3")).to_have_text("Does not fit")
    expect(verdict.locator("[data-need=host]")).to_contain_text("· only ")
    expect(page.locator("#start")).to_be_disabled()
    suggestion = page.locator(".rs-suggestion:visible", has_text="AdamW's moments in 8 bits")
    expect(suggestion).to_contain_text("Results change slightly.")
    expect(suggestion).to_contain_text(re.compile("About .* s a step"))  # which follows the verdict
    for each in page.locator(".rs-suggestion:visible").all():  # Start, which is closed, covers none
        each.scroll_into_view_if_needed()
        each.click(trial=True, position={"x": 20, "y": 12})
    took = follow(page, suggestion.click, "23.6B parameters", "Fits")
    expect(verdict.locator("h3")).not_to_have_text("Fits, but only just")  # not one more to click
    expect(verdict).not_to_have_attribute("data-tone", "bad")
    expect(page.locator("#start")).to_be_enabled()
    print(f"\na remedy: {took:.0f} ms")


def test_a_model_is_found_by_words_in_any_order(page):
    typed(page, "model.source", "14 qwen")
    options = page.get_by_role("listbox", name="Known models").get_by_role("option")
    expect(options.first).to_be_visible()
    assert all("14" in text and "Qwen" in text for text in options.all_inner_texts())
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    chosen = box(page, "model.source")
    expect(chosen).to_have_value("Qwen/Qwen2.5-14B")
    expect(options.first).to_be_hidden()
    expect(page.locator(".rs-fit-panel")).to_contain_text("14.8B parameters")
    # What was filled in by script is what is started: it survives a reload.
    page.reload()
    expect(chosen).to_have_value("Qwen/Qwen2.5-14B")
    expect(page.locator(".rs-fit-panel")).to_contain_text("14.8B parameters")
    open_other_settings(page)


def answered(page, asked):
    """Until nothing has been asked for longer than the page waits for a Gradio that is slow to take
    over what was typed.
    """
    before = -1
    while len(asked) != before:
        before = len(asked)
        page.wait_for_timeout(1000)


def test_a_source_is_asked_for_once_it_is_entered_or_left(page):
    asked = []

    def note(request):
        # What follows a verdict, when it stands, asks for its times.
        if request.url.endswith("/api/check") and not request.post_data_json.get("timed"):
            asked.append(request.post_data_json)

    page.on("request", note)
    answered(page, asked)
    asked.clear()
    for name, leave in (("first", lambda: page.keyboard.press("Enter")), ("second", lambda: None)):
        typed(page, "data.source", f"assets/{name}.jsonl")
        page.wait_for_timeout(300)
        assert not asked
        leave()
        select(page, "train.batch_size")
        answered(page, asked)
        # Again where Gradio is slow to take over what was typed, but never with the beginning of a
        # name.
        assert {form["shown"]["data.source"] for form in asked} == {f"assets/{name}.jsonl"}
        last = asked[-1]
        asked.clear()
    for field in ("model.source", "data.source", "train.batch_size"):
        select(page, field)
    answered(page, asked)
    assert all(form == last for form in asked), "nothing has changed"


def test_an_answer_that_comes_late_is_not_drawn(page):
    late = []
    # Playwright sets an attribute of the function, which a built-in method does not take.
    page.route("**/api/check", lambda route: late.append(route), times=1)  # noqa: PLW0108
    typed(page, "train.batch_size", "16")
    page.wait_for_timeout(500)
    paste(page, "train.batch_size", "24")
    expect(page.locator(".rs-fit-panel")).to_contain_text("up to 24,576 tokens")
    late[0].continue_()
    page.wait_for_timeout(500)
    expect(page.locator(".rs-fit-panel")).to_contain_text("up to 24,576 tokens")


def test_a_server_that_does_not_answer_is_told_and_asked_again(page):
    page.route("**/api/check", lambda route: route.abort())
    paste(page, "train.batch_size", "16")
    expect(page.locator(".rs-fit-panel h3")).to_have_text("Cannot be checked now")
    expect(page.locator("#start")).to_be_disabled()
    page.unroute("**/api/check")
    expect(page.locator("#start")).to_be_enabled()
    length = int(box(page, "data.max_seq_len").input_value())
    expect(page.locator(".rs-fit-panel")).to_contain_text(f"up to {16 * length:,} tokens")

    # Nobody types, and other programs take memory: Summary and cards are made anew together.
    less = {"free": "0 0", "headline": "Fits, but only just"}
    page.route("**/api/check", lambda route: route.fulfill(json=route.fetch().json() | less))
    cards = []
    page.on("request", lambda each: cards.append(each.url) if "/api/models" in each.url else None)
    page.clock.install()
    select(page, "train.batch_size")
    paste(page, "name", "Another name")
    expect(page.locator(".rs-fit-panel h3")).to_have_text("Fits, but only just")
    less.clear()  # the route stays: one that ends while it answers fails
    page.clock.fast_forward(15_000)
    expect(page.locator(".rs-fit-panel h3")).not_to_have_text("Fits, but only just")
    page.clock.fast_forward(15_000)
    for _ in range(WAIT_MILLISECONDS // 100):
        if cards:
            break
        page.wait_for_timeout(100)
    assert cards
    page.unroute_all(behavior="wait")


COUNTED = """async () => {
  const { withFinding } = await import('/ramstream/pages/new/finding.js');
  const fixes = { slow: { label: 'Compute in float32', changes: { 'model.dtype': 'float32' } } };
  const again = { label: 'Try again', changes: {} };
  const panel = { headline: 'Fits', tone: 'good', can_start: true, reasons: ['none', 'slow'] };
  const finding = { text: 'Which column is which?', blocks: true, asks: true };
  return [{ none: again }, { none: again, ...fixes }].map(
    (each) => withFinding({ ...panel, fixes: each }, finding).headline);
}"""
"""Headlines beside a question on the data, without and with a warning that a change answers."""


def test_the_cpu_is_taken_only_once_a_person_says_so(page, server):
    # What can only be tried again is nothing to confirm.
    assert page.evaluate(COUNTED) == ["1 thing to confirm", "2 things to confirm"]
    paste(page, "data.source", "assets/starter.jsonl")
    paste(page, "model.source", "Qwen/Qwen2.5-0.5B")
    summary, start = page.locator(".rs-fit-panel"), page.locator("#start")
    expect(start).to_be_enabled()
    (server.runs / "no-cuda").touch()
    try:
        paste(page, "train.batch_size", "16")
        expect(summary.locator("h3")).to_have_text("1 thing to confirm")
        asked = summary.locator("li", has_text="PyTorch is built without CUDA.")
        expect(asked.locator("code")).to_have_text("pip install torch")
        expect(start).to_be_disabled()
        asked.get_by_role("button", name="Train on the CPU").click()
        expect(start).to_be_enabled()
        expect(asked).to_have_count(0)
        expect(page.locator("#field-engine-device input")).to_have_value("cpu")
    finally:
        (server.runs / "no-cuda").unlink()
