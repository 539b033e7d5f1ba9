"""A model of a hub in the page: how far its download is, Stop in the middle of it, Resume from
there, and Cancel in Chat.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.request

import pytest
from playwright.sync_api import expect

from app.form.settings_form import shown_values
from tests.browser.screen import (
    OPENED_RUN,
    address,
    ask,
    bar,
    expect_finished,
    press,
    run_of,
    verdict,
)
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.fake_hub import FakeHub, serve
from tests.support.folders import make_config, make_model
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

NAME = "acme/tiny"


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    model = make_model(
        tmp_path_factory.mktemp("wide") / "model", hidden_size=256, intermediate_size=512
    )
    with serve(FakeHub({NAME: model}, pause=0.5)) as hub:
        yield hub


@pytest.fixture(scope="module")
def server(tmp_path_factory, hub):
    folder = tmp_path_factory.mktemp("hub")
    server = Server(folder, free_port(), hub.variables(folder / "cache"), is_plain=True)
    server.start()
    yield server
    server.end()


def test_a_download_is_shown_stopped_and_gone_on_with(context, server, hub):
    config = make_config(
        server.folder, **{"model.source": NAME, "train.steps": 6, "name": "From the hub"}
    )
    draft = {"preset": "starter.yaml", "shown": shown_values(config)}
    request = urllib.request.Request(
        f"{server.address}/api/check",
        json.dumps(draft).encode(),
        {"content-type": "application/json"},
    )
    urllib.request.urlopen(request, timeout=60).close()
    page = context.new_page()
    page.goto(server.address)
    expect(page.locator("#field-model-source :is(input, textarea)")).to_have_value(NAME)
    headline = page.locator(".rs-fit-panel[data-tone=warn] [data-field=headline]")
    expect(headline).to_have_text(re.compile(r"Fits · .+B to download"))
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    word, stage = bar(page, "word"), verdict(page)
    expect(stage).to_contain_text(re.compile(r"5 of 6 files, about .+ left\."))
    expect(stage.locator("[aria-current=step]")).to_contain_text("Download model: under way")
    expect(stage.get_by_role("progressbar")).to_be_visible()
    expect(page.locator("[data-figure=loss]")).to_contain_text("Appears with the first step.")
    assert hub.sent < hub.size(NAME)
    press(page, "stop")
    expect(word).to_have_text("Stopped")
    expect(stage).to_contain_text("Stopped before the first step")
    assert hub.weights_asked() == [""] and hub.sent < hub.size(NAME)

    hub.pause = 0
    press(page, "resume")
    expect_finished(page)
    assert len(hub.weights_asked()) == 2 and hub.weights_asked()[1].startswith("bytes=")

    # The base model of a chat comes from the hub as well: here, the cache was emptied meanwhile.
    shutil.rmtree(server.folder / "cache")
    hub.pause = 0.5
    page.goto(address(server, run_of(page), "chat"))
    expect(page.locator(".rs-chat select[name=weights] option")).not_to_have_count(0)
    page.get_by_label("Message", exact=True).fill("say after two")
    page.get_by_label("Message", exact=True).press("Enter")
    loading = page.locator(".rs-chat [data-part=loading]")
    expect(loading).to_contain_text(re.compile(r"Downloading acme/tiny · \d+ % · about .+ left"))
    loading.get_by_role("button", name="Cancel").click()
    expect(loading).to_be_hidden()
    expect(page.locator(".rs-chat-turn [data-state=stopped]")).to_have_count(2)
    assert hub.sent < 2 * hub.size(NAME)
    hub.pause = 0
    ask(page, "say after three", answers=2)
