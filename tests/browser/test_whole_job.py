"""A run that overfits, from Start to the model that is exported. What the page says of it, and
what it exports and answers with, is of its best step. In Chromium, on the real server and engine.
"""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import expect

from app.form.settings_form import shown_values
from app.labels import in_loss
from engine.runs.record.following import EVENTS_FILE, replay
from tests.browser.screen import (
    OPENED_RUN,
    ask,
    bar,
    expect_finished,
    open_view,
    open_why,
    run_of,
    verdict,
    wait_for_points,
)
from tests.support.browser import WAIT_MILLISECONDS, answer
from tests.support.exported_answers import transformers_answer
from tests.support.folded import fold
from tests.support.overfitting import by_heart
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

TOKENS = 6
QUESTIONS = ("say after two", "seven seven one five")


def test_an_overfitting_run_takes_home_its_best_and_says_so(blank, server, tmp_path):
    page = blank
    answer(server, "/api/check", {"preset": None, "shown": shown_values(by_heart(tmp_path))})
    page.goto(server.address)
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect(bar(page, "name")).to_have_text("By heart")  # until then it shows the run before
    run_id = run_of(page)
    expect_finished(page)

    # The record alone says which step was best.
    found = fold(replay(server.runs / run_id / EVENTS_FILE))
    losses = dict(zip(found.evals.step, found.evals.loss))
    best = min((step for step in losses if step), key=losses.__getitem__)
    assert best < 60 and found.exported_step == best

    # The verdict, its reasons and the chart name it.
    lowest, last = in_loss(losses[best]), in_loss(losses[60])
    card = verdict(page)
    kept = f"Best at step {best}, worse after; the best weights are kept"
    expect(card.get_by_role("heading")).to_have_text(kept)
    expect(card).to_contain_text(f"Best model: step {best}, exported.")
    number = card.locator("dl > div", has_text="Validation loss")
    expect(number).to_contain_text(lowest)
    expect(number).to_contain_text(f"best (step {best})")
    open_why(page)
    expect(card).to_contain_text(f"→ {last}, best {lowest} at step {best}.")
    open_view(page, "learning")
    wait_for_points(page, least=60)
    names = page.evaluate("document.querySelector('[data-figure=loss]').data.map(t => t.name)")
    assert f"best: step {best}" in names

    # The best answers in Chat as its export does in plain transformers.
    open_view(page, "chat")
    chat = page.locator(".rs-chat")
    expect(chat.get_by_label("Weights")).to_have_value(f"best-{best}")
    chat.get_by_label("Compare with the base model").uncheck()
    page.get_by_text("Sampling:").click()
    chat.get_by_label("Longest answer (tokens)").fill(str(TOKENS))
    chat.get_by_label("Temperature").fill("0")
    for question in QUESTIONS:
        one = ask(page, question).locator(".rs-chat-answer[data-side=tuned]")
        expect(one.locator("strong")).to_have_text(f"By heart, best, step {best}")
        shown = one.locator(".rs-chat-text").inner_text().strip()
        taken = server.runs / run_id / "export"
        assert shown and shown == transformers_answer(taken, question, TOKENS)
        page.get_by_role("button", name="New chat").click()
        expect(one).to_have_count(0)

    # Programs get the same answers, with what the view gives them.
    open_view(page, "export")
    serving = page.locator("[data-part=serve]")
    serving.get_by_role("button", name="Start serving").click()
    expect(serving.get_by_role("button", name="Stop serving")).to_be_focused()
    url, key, model = (
        serving.get_by_label(label, exact=True).inner_text()
        for label in ("Base URL", "API key", "Model")
    )
    asked = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": TOKENS}
    said = httpx.post(
        f"{url}/chat/completions",
        json={"model": model, "temperature": 0} | asked,
        headers={"authorization": f"Bearer {key}"},
        timeout=60,
    ).json()["choices"][0]["message"]["content"]
    assert said.strip() == transformers_answer(taken, QUESTIONS[0], TOKENS)
    expect(serving.get_by_label("curl", exact=True)).to_contain_text(f'"model":"{model}"')
    entry = page.locator(".rs-nav li", has_text=model)
    expect(entry).to_have_count(1)
    open_view(page, "overview")
    entry.get_by_role("link", name="Served").click()
    serving.get_by_role("button", name="Stop serving").click()
    expect(serving.get_by_label("API key")).to_have_count(0)
    expect(entry).to_have_count(1)
    expect(entry.get_by_role("link", name="Served")).to_have_count(0)
