"""Logging in and out in Chromium, beside the cookies of other programs and of a second server."""

from __future__ import annotations

import http.server
import re
import threading

import pytest
from playwright.sync_api import expect

from tests.browser.screen import address
from tests.support.axe import AXE, look
from tests.support.browser import WAIT_MILLISECONDS, Server
from tests.support.ports import free_port
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

COOKIES = [
    b'prefs={"theme":"dark"}',
    b"filter[x]=1",
    b"x=hello world",
    b'broken="never closed',
    b"name=\xe9\xff",
    *(b"pair%d=%s" % (number, b"v" * 1000) for number in range(100)),
]
LOGGED_IN = {"RAMSTREAM_LOGIN": "ada:open sesame"}


class OtherProgram(http.server.BaseHTTPRequestHandler):
    """Another program on this host, which sets cookies of its own."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def send_head_lines(self):
        for cookie in COOKIES:
            self.wfile.write(b"Set-Cookie: " + cookie + b"\r\n")

    def end_headers(self):
        self.flush_headers()
        self.send_head_lines()
        super().end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def other_program():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), OtherProgram) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Two servers with a login, on two ports of one host."""
    both = [Server(tmp_path_factory.mktemp("app"), free_port(), LOGGED_IN) for _ in range(2)]
    for server in both:
        server.start()
    yield both
    for server in both:
        server.end()


@pytest.fixture
def window(browser, other_program):
    """A window whose cookies are those of another program."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    page.goto(other_program)
    # Chromium takes what it is sent, and drops some of the longest.
    names = {cookie["name"] for cookie in context.cookies()}
    assert {"prefs", "filter[x]", "x", "broken", "name"} <= names and len(names) > 50
    yield context
    context.close()


def log_in(page, server, path="/"):
    page.goto(f"{server.address}{path}")
    page.get_by_label("User").fill("ada")
    page.get_by_label("Password").fill("open sesame")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("button", name="Log out")).to_be_visible()


def rows(page):
    return page.locator(".rs-sessions li")


def open_sessions(page):
    page.get_by_role("button", name="Sessions").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    expect(rows(page).first).to_be_visible()


def test_a_login_beside_foreign_cookies_its_sessions_and_logging_out(browser, window, servers):
    server = servers[0]
    page = window.new_page()
    page.goto(server.address)
    page.get_by_label("User").fill("ada")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("wrong")
    log_in(page, server)
    elsewhere = browser.new_context(user_agent="Mozilla/5.0 (iPhone) Safari/600")
    elsewhere.set_default_timeout(WAIT_MILLISECONDS)
    other = elsewhere.new_page()
    log_in(other, server, "/?run=some-run&view=log")
    expect(other).to_have_url(address(server, "some-run", "log"))

    open_sessions(page)
    expect(page.get_by_role("dialog")).to_contain_text("logged in as ada")
    expect(rows(page)).to_have_count(2)
    expect(rows(page).nth(0)).to_contain_text("This browser")
    expect(rows(page).nth(0).get_by_role("button")).to_have_count(0)
    expect(rows(page).nth(1)).to_contain_text("Safari on iPhone")
    expect(rows(page).nth(1)).to_contain_text("127.0.0.1")
    expect(rows(page).nth(1)).to_contain_text(re.compile(r"logged in \d+ \w+.* · seen just now"))
    rows(page).nth(1).get_by_role("button", name="End").click()
    expect(rows(page)).to_have_count(1)
    expect(page.get_by_role("button", name="End all others")).to_be_hidden()
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    expect(other.locator(".rs-bar [data-field=note]")).to_contain_text("You are logged out.")
    elsewhere.close()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()

    page.get_by_role("button", name="Log out").click()
    expect(page).to_have_url(re.compile("/login$"))
    expect(page.get_by_label("Password")).to_be_visible()
    ours = [cookie for cookie in window.cookies() if cookie["name"].startswith("ramstream")]
    assert not ours
    page.goto(server.address)
    expect(page).to_have_url(re.compile("/login"))
    assert "Traceback" not in server.log()


def test_the_buttons_and_the_list_have_no_serious_finding(browser, window, servers):
    page = window.new_page()
    log_in(page, servers[0])
    page.evaluate(AXE)
    findings = []
    look(page, "header", ".rs-account", findings)
    open_sessions(page)
    look(page, "sessions", "dialog[data-part=sessions-list]", findings)
    assert not findings, "\n".join(findings)


def test_logged_in_at_two_servers_at_once(window, servers):
    pages = [window.new_page() for _ in servers]
    for page, server in zip(pages, servers):
        log_in(page, server)
    names = {cookie["name"] for cookie in window.cookies()}
    assert {f"ramstream_login_{server.port}" for server in servers} <= names
    for page in pages:
        page.reload()
        expect(page.get_by_role("button", name="Log out")).to_be_visible()
    pages[0].get_by_role("button", name="Log out").click()
    expect(pages[0]).to_have_url(re.compile("/login$"))
    pages[1].reload()
    expect(pages[1].get_by_role("button", name="Log out")).to_be_visible()
