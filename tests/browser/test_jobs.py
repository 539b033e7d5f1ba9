"""Long work in the page: how far it is, Cancel by keyboard, and that it goes on without the page
that started it. The server takes its time at each step of the work, so that there is something to
see.
"""

from __future__ import annotations

import re
import sys

import pytest
from playwright.sync_api import expect

from engine.training.loop.run import start_run
from tests.browser.screen import address, expect_finished, more_of, open_page, open_view
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.folders import make_config
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

SERVE = """
import sys, time
from app.session.jobs import Job
progress = Job.progress
def slowly(job, *given):
    time.sleep(1)
    progress(job, *given)
Job.progress = slowly
from app.main import Address, serve
serve(Address(port=int(sys.argv[1])), runs_dir=sys.argv[2], open_browser=False)
"""


# How far the bar stood at most from the percentage that was told, over two changes of it.
BAR_BEHIND = """bar => new Promise((resolve) => {
    const told = new Set();
    let most = 0;
    const look = () => {
        if (told.size === 3 || !bar.hasAttribute('aria-valuenow')) return resolve(most);
        told.add(bar.ariaValueNow);
        const drawn = bar.firstElementChild.getBoundingClientRect().width;
        const share = 100 * drawn / bar.getBoundingClientRect().width;
        most = Math.max(most, Math.abs(share - bar.ariaValueNow));
        requestAnimationFrame(look);
    };
    look();
})"""


class SlowServer(Server):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", SERVE, str(self.port), str(self.runs)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    from tests.support.browser import ROOT

    server = SlowServer(
        tmp_path_factory.mktemp("jobs"), free_port(), {"PYTHONPATH": str(ROOT)}, is_plain=True
    )
    server.start()
    yield server
    server.end()


@pytest.fixture(scope="module")
def run_id(server):
    run = start_run(make_config(server.folder), server.runs)
    assert run.execute().state == "finished"
    return run.id


def test_nothing_can_be_exported_or_pushed_before_the_page_knows_of_which_run(
    context, server, run_id
):
    """A click while the page still waits for its answer would be lost."""
    page = context.new_page()
    page.goto(address(server, run_id))
    expect_finished(page)
    page.route("**/api/live/**", lambda route: None)  # there is no answer
    open_view(page, "export")
    cards = [page.locator(f"[data-part={name}]") for name in ("export", "push")]
    expect(cards[0]).to_be_visible()
    for card in cards:
        expect(card.locator("form")).to_be_hidden()
    page.unroute("**/api/live/**")
    open_view(page, "overview")
    open_view(page, "export")  # it asks again
    expect(cards[0].locator("form")).to_be_visible()
    expect(page.locator("[data-field=exported-about]")).to_contain_text("You can upload it")
    expect(cards[1]).to_be_hidden()

    # A form that this model cannot have is not offered, and why is said.
    form = cards[0].get_by_label("Format")
    expect(form.locator("option:enabled")).to_have_text(["Folder (transformers)"])
    expect(form.locator("option[value=gguf]")).to_have_text("GGUF file (not for this model)")
    expect(cards[0].locator("[data-field=no-gguf]")).to_contain_text("needs a BPE tokenizer")
    page.close()


def test_an_export_is_cancelled_where_it_was_started_and_from_another_page(context, server, run_id):
    page, target = context.new_page(), server.folder / "new" / "model"
    page.goto(f"{server.address}/?show=runs")
    more_of(page, run_id).get_by_role("menuitem", name="Export").click()
    card = page.locator("[data-part=export]")
    card.get_by_label("Folder on this machine").fill(str(target))
    card.get_by_role("button", name="Export", exact=True).click()
    bar = card.get_by_role("progressbar", name="Progress: The export of Tiny")
    expect(bar).to_have_attribute("aria-valuenow", re.compile(r"^\d+$"))
    expect(card).to_contain_text(re.compile(r"Reading the checkpoint · .+ of .+iB · about .+ left"))
    expect(page.locator(".rs-jobs > li")).to_be_hidden()
    # What the bar shows is what is said beside it, at every moment.
    page.emulate_media(reduced_motion="no-preference")
    assert bar.evaluate(BAR_BEHIND) <= 1
    card.get_by_role("button", name="Cancel").press("Enter")
    expect(page.locator("[data-field=export-caption]")).to_have_text(
        "The export of Tiny was cancelled."
    )
    expect(bar).to_be_hidden()
    assert not target.parent.exists()

    # It is the server's: on another page, and in another tab after this one was closed, it lies
    # over all else, and moves nothing.
    card.get_by_role("button", name="Export", exact=True).click()
    expect(bar).to_be_visible()
    open_page(page, "new")
    strip = page.get_by_role("list", name="Tasks")
    expect(strip.get_by_role("progressbar")).to_be_visible()
    page.close()
    page = context.new_page()
    page.goto(f"{server.address}/?show=hardware")
    strip = page.get_by_role("list", name="Tasks")
    expect(strip).to_contain_text("The export of Tiny")
    title = page.get_by_role("heading", name="Hardware", exact=True)
    place = title.bounding_box()
    expect(strip).to_be_in_viewport()
    strip.get_by_role("button", name="Cancel").click()
    expect(strip).to_contain_text("was cancelled")
    strip.evaluate("list => list.replaceChildren()")
    assert title.bounding_box() == place
    assert not target.parent.exists()


def test_weights_that_are_being_loaded_to_chat_with_are_given_up(context, server, run_id):
    page = context.new_page()
    page.goto(address(server, run_id, "chat"))
    expect(page.locator(".rs-chat select[name=weights] option")).not_to_have_count(0)
    message = page.get_by_label("Message", exact=True)
    message.fill("say after two")
    message.press("Enter")
    loading = page.locator("[data-part=loading]")
    expect(loading).to_contain_text("Loading the weights: ")
    expect(loading.get_by_role("progressbar")).to_have_attribute(
        "aria-valuenow", re.compile(r"^\d+$")
    )
    expect(page.locator(".rs-jobs > li")).to_be_hidden()
    loading.get_by_role("button", name="Cancel").click()
    expect(page.locator(".rs-chat-answer").first).to_contain_text("(no answer)")
    expect(loading).to_be_hidden()
    expect(page.locator(".rs-chat [data-field=memory]")).to_have_text("")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
