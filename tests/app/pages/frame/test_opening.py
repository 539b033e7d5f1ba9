"""When a page is opened, its head names the files that its scripts load, and the run to show has
already been read.
"""

from __future__ import annotations

import asyncio
import re

import httpx
import pytest

from app.pages.frame.opening import read_ahead
from app.server.page_files import (
    APP,
    FIRST_SCRIPTS,
    FOREVER,
    SCRIPT,
    STYLE,
    files_version,
    first_script,
    page_address,
    page_files,
)
from app.server.plotly_js import plotly_address
from engine.config.settings import TrainConfig
from engine.runs.record.run_folder import create_run
from tests.support.served import ADDRESS, served
from tests.support.synthetic_run import records, run_events, write_events


@pytest.fixture(scope="module")
def app(tmp_path_factory):
    return served(tmp_path_factory.mktemp("runs"))


def get(app, path: str) -> httpx.Response:
    async def ask():
        transport = httpx.ASGITransport(app.app)
        async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
            answer = await client.get(path)
            while any(task.get_coro().__qualname__ == "read_ahead" for task in asyncio.all_tasks()):
                await asyncio.sleep(0.01)
            return answer

    return asyncio.run(ask())


def recorded(runs, name: str):
    folder = create_run(
        runs,
        TrainConfig.from_dict(
            {"name": name, "model": {"source": "model"}, "data": {"source": "data"}}
        ),
    )
    write_events(folder.events_path, records(run_events(5, name=name), folder.id))
    return folder


def test_the_page_names_the_files_that_it_loads_first_and_they_are_all_of_ours(app):
    links = dict(re.findall(r"<([^>]+)>; rel=([^,]+)", get(app, "/").headers["link"]))
    assert links == {
        page_address(SCRIPT): "modulepreload",
        page_address(STYLE): "preload; as=style",
    }
    texts = {}
    for address in links:
        answer = get(app, address)
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == FOREVER
        texts[address[-3:]] = answer.text
    for name in page_files():
        text = (APP / name).read_text()
        if name.endswith(".css"):
            assert text in texts["css"]
        elif name not in FIRST_SCRIPTS:
            assert f"\n// {name}\n" in f"\n{texts['.js']}", "no script imports it"


@pytest.mark.parametrize(
    ("address", "is_named"),
    [
        ("/", False),
        ("/?show=new", False),
        ("/?show=runs", False),
        ("/?show=runs&compare=a,b", True),
        ("/?run=a", True),
        ("/?run=a&view=machine", True),
        ("/?run=a&view=log", False),
        ("/?view=learning", True),
        ("/?tab=live", True),
        ("/?tab=train", False),
    ],
)
def test_plotly_is_named_if_the_page_opens_with_a_chart(app, address, is_named):
    links = get(app, address).headers["link"]
    assert (f"<{plotly_address()}>; rel=preload; as=script" in links) == is_named
    assert get(app, plotly_address()).headers["cache-control"] == FOREVER


def test_the_page_and_long_answers_are_compressed(app):
    page = get(app, "/")
    assert page.headers["content-encoding"] == "gzip"
    assert int(page.headers["content-length"]) < len(page.content) / 5
    assert get(app, page_address(STYLE)).headers["content-encoding"] == "gzip"
    assert "content-encoding" not in get(app, "/api/jobs").headers


def test_one_script_of_ours_runs_before_all_others(app):
    page = get(app, "/")
    before, ours, others = page.text.partition(f"<script>\n{first_script()}</script>")
    assert ours
    assert "<script" not in before
    assert "<script" in others
    assert page.text.endswith("</html>")


def test_a_browser_may_keep_what_changes_its_address_with_its_content_and_nothing_else(app):
    page = get(app, "/")
    assert "cache-control" not in page.headers
    assert page_address(SCRIPT) in page.text
    assert get(app, "/api/runs").headers["cache-control"] == "no-store"
    of_gradio = re.search(r"[./]*(/assets/index-[\w-]+\.js)", page.text).group(1)
    assert get(app, of_gradio).headers["cache-control"] == FOREVER
    assert "cache-control" not in get(app, "/assets/nothing-of-the-kind.js").headers
    # A page that was opened before an update gets the new file, but does not keep it.
    for before in ("", "v-0123456789ab/"):
        answer = get(app, f"/ramstream/{before}{SCRIPT}")
        assert answer.status_code == 200
        assert answer.headers["cache-control"] == "no-cache"
    for none in ("v-0123456789ab", f"{files_version()}/nothing.js", "v-/../main.py"):
        assert get(app, f"/ramstream/{none}").status_code == 404


def test_the_run_that_is_going_to_be_shown_is_read_before_it_is_asked_for(tmp_path):
    app = served(tmp_path)
    one = recorded(app.session.runs_dir, "One")
    assert get(app, "/").status_code == 200  # which opens the latest run
    assert app.session.follow(one.id).snapshot.name == "One"
    two = recorded(app.session.runs_dir, "Two")
    assert get(app, f"/?run={two.id}&tab=live").status_code == 200
    assert app.session.follow(two.id).snapshot.name == "Two"


def test_a_server_that_starts_reads_the_run_that_it_would_show(tmp_path):
    asyncio.run(read_ahead(served(tmp_path / "none").session))
    session = served(tmp_path / "two").session
    for name in ("One", "Two"):
        recorded(session.runs_dir, name)
    asyncio.run(read_ahead(session))
    assert list(session._followed) == [session.run_to_open()]
    assert session.follow(session.run_to_open()).snapshot.step == 5


@pytest.mark.parametrize("run", ["none", "..%2F..%2Fetc", "%00", "%ff"])
def test_a_run_that_is_not_there_is_no_error_of_the_page(app, run):
    assert get(app, f"/?run={run}").status_code == 200


def test_warming_up_waits_for_a_page(tmp_path):
    app = served(tmp_path)
    assert not app.session.was_opened.is_set()
    get(app, "/api/live")
    assert not app.session.was_opened.is_set()
    get(app, "/")
    assert app.session.was_opened.is_set()
