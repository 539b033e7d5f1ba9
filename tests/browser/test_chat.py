"""The Chat tab and the answers to sample prompts, in Chromium, against the real server and a run
that it can chat with.
"""

from __future__ import annotations

import pytest
from playwright.sync_api import expect

from engine.training.loop.run import start_run
from tests.browser.screen import (
    address,
    ask,
    more_of,
    open_page,
    open_run,
    open_view,
    recorded_run,
)
from tests.support.browser import WAIT_MILLISECONDS, answer
from tests.support.folders import make_config
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

HOSTILE = '<img src=x onerror="window.hacked=1">'


@pytest.fixture(scope="module")
def run_id(server):
    """A finished run with two checkpoints and the answers to two prompts, one of which would be
    markup.
    """
    run = start_run(
        make_config(
            server.folder,
            **{
                "train.steps": 30,
                "output.checkpoint_every": 15,
                "output.eval_every": 10,
                "output.sample_tokens": 4,
                "output.sample_prompts": ["say after two", f"say {HOSTILE}"],
            },
        ),
        server.runs,
    )
    assert run.execute().state == "finished"
    return run.id


def test_the_base_and_the_tuned_model_answer_side_by_side(context, server, run_id):
    page = context.new_page()
    page.goto(address(server, run_id, "chat"))
    about = page.locator(".rs-chat [data-field=about]")
    expect(page.locator(".rs-chat").get_by_label("Weights").locator("option")).to_have_text(
        ["Best, step 30", "Step 30, the newest", "Step 15"]
    )
    page.get_by_text("Sampling: greedy").click()
    page.locator(".rs-chat").get_by_label("Longest answer").fill("8")
    page.locator(".rs-chat").get_by_label("System message").fill("say one")

    # Two turns, by keyboard; what is typed stays text.
    turns = page.locator(".rs-chat-turn")
    for count, text in enumerate(("say after two", f"say {HOSTILE}"), 1):
        ask(page, text, answers=2)
        expect(turns).to_have_count(count)
        expect(turns.last.locator(".rs-chat-message")).to_contain_text(text)
    expect(turns.first.locator("[data-side=base] strong")).to_contain_text("Base model: ")
    expect(turns.first.locator("[data-side=tuned] strong")).to_have_text("Tiny, best, step 30")
    expect(turns.first.locator("[data-side=tuned]")).to_contain_text("token")
    assert page.locator(".rs-chat img").count() == 0 and page.evaluate("window.hacked") is None

    # The chat outlives the page.
    page.reload()
    expect(turns).to_have_count(2)
    expect(page.locator(".rs-chat [data-field=memory]")).to_contain_text("Model loaded")
    for width in (800, 1440):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width

    # Other weights, alone, begin a new chat.
    page.locator(".rs-chat").get_by_label("Weights").select_option("step-15")
    expect(about).to_contain_text("starts a new chat")
    page.locator(".rs-chat").get_by_label("Compare with the base model").uncheck()
    ask(page, "say after three")
    expect(turns).to_have_count(1)
    expect(turns.locator(".rs-chat-answer strong")).to_have_text(["Tiny, step 15"])
    page.get_by_role("button", name="Unload").click()
    expect(page.locator(".rs-chat [data-field=memory]")).to_be_empty()
    page.get_by_role("button", name="New chat").click()
    expect(turns).to_have_count(0)

    # A folder that is none is one sentence. Chat of a run is of this run alone.
    expect(page.locator(".rs-chat select[name=run]")).to_be_hidden()
    open_page(page, "chat")
    page.locator(".rs-chat select[name=run]").select_option(":folder")
    page.get_by_role("textbox", name="Folder on this machine").fill("/nowhere")
    page.get_by_role("textbox", name="Folder on this machine").press("Tab")
    expect(about).to_contain_text("/nowhere is not a folder on this machine")


def test_the_chat_with_one_run_is_not_shown_as_that_of_another(context, server, run_id):
    page, turns = context.new_page(), ".rs-chat-turn"
    other = recorded_run(server, 20, "Never asked")
    (other.checkpoints_path / "step-10").mkdir(parents=True)
    page.goto(address(server, run_id, "chat"))
    expect(page.locator(".rs-chat").get_by_label("Weights").locator("option")).to_have_count(3)
    page.locator(".rs-chat").get_by_label("Compare with the base model").uncheck()
    ask(page, "say after two")
    open_page(page, "runs")
    open_run(page, other.id)
    open_view(page, "chat")
    expect(page.locator(".rs-chat-nothing")).to_be_visible()
    expect(page.locator(turns)).to_be_hidden()
    # On the page of all runs, too, the chat goes with the run that is chosen.
    open_page(page, "chat")
    page.locator(".rs-chat select[name=run]").select_option(run_id)
    expect(page.locator(turns)).to_be_visible()


def test_a_row_of_runs_opens_chat_with_its_best_weights(context, server, run_id):
    page = context.new_page()
    page.goto(address(server, run_id, "chat"))
    page.locator(".rs-chat").get_by_label("Weights").select_option("step-15")
    open_page(page, "runs")
    more_of(page, run_id).get_by_role("menuitem", name="Chat").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".rs-chat").get_by_label("Weights")).to_have_value("best-30")
    expect(page.get_by_label("Message", exact=True)).to_be_focused()
    assert page.url == address(server, run_id, "chat")


def test_the_answers_to_sample_prompts_are_read_step_by_step(context, server, run_id):
    page = context.new_page()
    page.goto(address(server, run_id, "learning"))
    card = page.locator(".rs-prompts")
    expect(card.locator("tbody tr")).to_have_count(2)
    expect(card.locator("[data-field=caption]")).to_have_text("Step 30, 4 of 4")
    expect(card.locator("thead th")).to_have_text(["Prompt", "Before training", "Step 30"])
    expect(card.locator("tbody tr").last.locator("td").first).to_have_text(f"say {HOSTILE}")
    card.get_by_label("Evaluation to show").focus()
    page.keyboard.press("ArrowLeft")
    expect(card.locator("[data-field=caption]")).to_have_text("Step 20, 3 of 4")
    assert page.evaluate("window.hacked") is None


def test_what_is_chosen_outlives_a_late_answer_for_another_view(context, server, run_id):
    page, held = context.new_page(), []
    page.goto(address(server, run_id, "chat"))
    chat = page.locator(".rs-chat")
    expect(chat.get_by_label("Weights").locator("option")).not_to_have_count(0)

    # A read of the view begins, and its answer is late.
    page.route("**/api/chat/choices", lambda route: held.append(route), times=1)  # noqa: PLW0108
    while not held:
        page.wait_for_timeout(50)
    page.route("**/api/live/**", lambda route: None)  # no poll tells Chat of the new view
    open_page(page, "chat")
    chat.locator("select[name=run]").select_option(":folder")
    with page.expect_response("**/api/chat/choices"):
        held[0].continue_()
    page.wait_for_timeout(300)
    expect(chat.locator("select[name=run]")).to_have_value(":folder")
    expect(page.get_by_role("textbox", name="Folder on this machine")).to_be_visible()


def test_a_complete_answer_stays_when_an_older_state_of_the_chat_comes_late(
    context, server, run_id
):
    page, given = context.new_page(), []
    answer(server, "/api/chat/new", {})
    page.goto(address(server, run_id, "chat"))
    chat = page.locator(".rs-chat")
    expect(chat.get_by_label("Weights").locator("option")).not_to_have_count(0)
    chat.get_by_label("Compare with the base model").uncheck()
    ask(page, "say after two")
    done = chat.locator(".rs-chat-answer[data-state=done]")
    expect(done).to_have_count(1)

    def read(route):
        """A read that was sent last may reach the server first: then its state is the older one."""
        if given:
            route.abort()
            return
        before = route.fetch(url=f"{server.address}/api/chat?since=0").json()
        before["version"] -= 1
        before["turns"][-1]["answers"]["tuned"] |= {"state": "waiting", "text": ""}
        route.fulfill(json=before)
        given.append(before)

    page.route("**/api/chat?since=*", read)
    while not given:
        page.wait_for_timeout(50)
    page.wait_for_timeout(500)  # the page has read that answer
    assert done.count() == 1
