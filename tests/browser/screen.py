"""Where things are on the screen: how tests find, open and press them. A change of the frame is a
change of this file.
"""

from __future__ import annotations

import re

from playwright.sync_api import Locator, Page, expect

from app.verdict.outcome import CANNOT_TELL, WRONG
from engine.config.settings import TrainConfig
from engine.runs.record.recorder import RunRecorder
from engine.runs.record.run_folder import create_run
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.synthetic_run import run_events

PAGES = ("new", "runs", "chat", "hardware")
VIEWS = ("overview", "learning", "machine", "chat", "evaluate", "settings", "log", "export")
OPENED_RUN = re.compile(r"run=[\w-]+&view=overview")
"""The address of a page after Start."""
NEW_FORM = re.compile(r"(show=new|tab=train)")
"""The address of a page that shows the form with a run's settings."""
MENUS = {"stop": "stop", "discard": "stop", "save": "more", "change": "more"}
"""The menus that have these requests to a run."""
POINTS = "name => document.querySelector(`[data-figure=${name}]`)?.data?.[0]?.x.length ?? 0"


# ---------------------------------------------------------------- where to


def address(server: Server, run_id: str, view: str = "overview") -> str:
    return f"{server.address}/?run={run_id}&view={view}"


def page_link(name: str) -> str:
    return f".rs-nav > a[data-page={name}]"


def view_link(name: str) -> str:
    return f".rs-views a[data-view={name}]"


def open_page(page: Page, name: str) -> None:
    page.locator(page_link(name)).click()


def open_view(page: Page, name: str) -> None:
    page.locator(view_link(name)).click()
    expect(page.locator(view_link(name))).to_have_attribute("aria-current", "page")


def open_run(page: Page, run_id: str) -> None:
    """Opens a run by the sidebar."""
    page.locator(f".rs-nav a[data-run='{run_id}']").click()
    expect(bar(page, "word")).to_be_visible()


def run_of(page: Page) -> str:
    return re.search(r"run=([^&]+)", page.url).group(1)


# ---------------------------------------------------------------- the chat


def ask(page: Page, text: str, answers: int = 1) -> Locator:
    """Asks in Chat, waits until so many answers are complete, and returns the turn with them. The
    chat may have other turns, which are complete as well.
    """
    message = page.get_by_label("Message", exact=True)
    message.fill(text)
    message.press("Enter")
    asked = page.locator(".rs-chat-message", has_text=text)
    turn = page.locator(".rs-chat-turn").filter(has=asked).last
    expect(turn.locator("[data-state=done]")).to_have_count(answers)
    return turn


# ---------------------------------------------------------------- the line over a run


def bar(page: Page, name: str):
    return page.locator(f".rs-bar [data-field={name}]")


def state(page: Page):
    return page.locator(".rs-bar .rs-state")


def expect_finished(page: Page, timeout: float = WAIT_MILLISECONDS) -> None:
    """Waits until the line over the run says that it has finished, or its outcome."""
    words = "|".join(["Finished", "Learned", CANNOT_TELL, *WRONG.values()])
    expect(state(page)).to_have_text(re.compile(f"^({words})$"), timeout=timeout)


def verdict(page: Page) -> Locator:
    """The head of a run's page."""
    return page.get_by_role("region", name="Verdict")


def open_why(page: Page) -> None:
    """Opens the reasons for the verdict."""
    verdict(page).get_by_role("button", name=re.compile("^Why")).click()


def note(page: Page):
    return bar(page, "note")


def press(page: Page, command: str) -> None:
    if command in MENUS:
        open_menu(page, MENUS[command]).locator(f"[data-act={command}]").click()
    else:
        page.locator(f".rs-actions [data-command={command}]").click()


def open_menu(page: Page, name: str) -> Locator:
    """Opens a menu of the line over a run, and returns it."""
    page.locator(f".rs-actions [data-menu={name}]").click()
    return page.locator(".rs-bar .rs-menu:popover-open")


def row_of(page: Page, run_id: str):
    """The row of a run in Runs."""
    return page.locator(f".rs-runs [data-part=rows] tr[data-run='{run_id}']")


def more_of(page: Page, run_id: str):
    """The menu of a run in Runs, which is open."""
    row_of(page, run_id).locator("[data-act=more]").click()
    return page.locator(".rs-runs .rs-menu:popover-open")


# ---------------------------------------------------------------- the form


def box(page: Page, field: str):
    return page.locator(f"#field-{field.replace('.', '-')} :is(input, textarea)")


def fill(page: Page, field: str, text: str) -> None:
    """Fills the box of a setting, which it opens the folded section for, and chooses the unit of
    the length for.
    """
    where = box(page, field)
    if field in ("train.steps", "train.epochs"):
        page.locator(f".rs-run-length [data-length={field.removeprefix('train.')}]").click()
        expect(where).to_be_visible()
    elif not where.is_visible() and page.locator(FOLDED).is_visible():
        open_other_settings(page)
    expect(page.locator("[inert]").filter(has=where)).to_have_count(0)  # its values have arrived
    where.fill("")
    where.press_sequentially(text)
    expect(where).to_have_value(text)
    where.press("Tab")


FOLDED = ".rs-rest > button"


def open_other_settings(page: Page) -> None:
    """Opens the folded section, whose boxes Gradio makes only then, and fills a moment later, and
    the sections in it.
    """
    if not page.locator(f"{FOLDED}.open").count():
        page.get_by_role("button", name="Advanced settings").click()
        expect(box(page, "data.eval_fraction")).to_have_value(re.compile("."))
    page.locator(".rs-fold[aria-expanded=false]").evaluate_all("all => all.map(b => b.click())")


def start_short_run(page: Page, name: str, steps: int = 60) -> str:
    """A run of the starter that is over in seconds; returns its id."""
    open_other_settings(page)
    for field, text in (
        ("name", name),
        ("train.steps", str(steps)),
        ("output.exact_match_samples", "3"),
        ("output.eval_every", "20"),
        ("output.checkpoint_every", "0"),
        ("output.timeline_every", "5"),
    ):
        fill(page, field, text)
    page.wait_for_timeout(500)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text(name)
    return run_of(page)


# ---------------------------------------------------------------- runs and their figures


def recorded_run(server: Server, steps: int, name: str = "Shown", **how):
    """The folder of a run that is over, without having run."""
    folder = create_run(
        server.runs,
        TrainConfig.from_dict({"name": name, "model": {"source": name}, "data": {"source": name}}),
    )
    recorder = RunRecorder(folder.path, folder.id)
    for event in run_events(steps, name=name, **how):
        recorder.emit(event)
    recorder.close()
    return folder


def wait_for_points(page: Page, figure: str = "loss", least: int = 5) -> None:
    page.locator(
        f"[data-figure={figure}]"
    ).scroll_into_view_if_needed()  # what nobody can see is not drawn
    page.wait_for_function(f"({POINTS})('{figure}') >= {least}")
