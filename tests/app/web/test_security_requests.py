"""Requests that no page of ours would send: paths that lead elsewhere, bodies of every wrong kind.
Each is answered by a sentence, nothing outside is read or written, and the app goes on answering.
"""

from __future__ import annotations

import asyncio
import copy
import json

import httpx
import pytest

from app.form.presets import FIRST_PRESET
from app.form.settings_form import shown_values
from app.web.gradio_calls import CALLS
from engine.config.settings import TrainConfig
from engine.paths import PROGRAM_ROOT
from engine.runs.folder import create_run
from tests.support.served import ADDRESS, served

RUN = "20260101-000000-run"
SECRET = "what nobody may read"

SHOWN = shown_values(TrainConfig.load(PROGRAM_ROOT / "presets" / FIRST_PRESET))
TABLE = {"rows": 32, "tokens": 1024, "dtype": "bfloat16"}
CHOICE = {"run_id": RUN, "weights": "newest"}
BODIES = {
    "/api/check": {"preset": None, "shown": SHOWN, "keep": False},
    "/api/hardware/column": {"machine": "This machine", "timed": False, "settings": TABLE},
    "/api/hardware/csv": {"machines": ["This machine"], "models": ["x"], "settings": TABLE},
    "/api/hardware/largest": {"settings": TABLE},
    "/api/hardware/offers": {"model": "no model", "settings": TABLE},
    "/api/hardware/measure": {},
    "/api/jobs/{number}/cancel": {},
    "/api/talk/about": {"choice": CHOICE},
    "/api/talk/say": {
        "choice": CHOICE,
        "message": "",
        "system": "",
        "compare": False,
        "max_new_tokens": 16,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    },
    "/api/talk/stop": {},
    "/api/talk/new": {},
    "/api/talk/unload": {},
    "/api/runs/{run_id}/control": {"command": "no command"},
    "/api/runs/{run_id}/describe": {"name": "A name", "note": "A note"},
    "/api/runs/{run_id}/change": {"values": {"train.learning_rate": 1e-4}},
    "/api/runs/{run_id}/draft": {"changes": {"train.learning_rate": 1e-4}},
    "/api/runs/{run_id}/export": {"folder": ""},
    "/api/runs/{run_id}/delete": {},
    "/api/queue/continue": {},
    "/api/queue/{queued}/remove": {},
    "/api/queue/{queued}/up": {},
    "/api/queue/{queued}/detached": {"detached": True},
}
"""A body for every route that takes one; none starts long work."""
HUGE = 10**400
WRONG = [
    None,
    True,
    -1,
    0.5,
    HUGE,
    "",
    "x" * 200_000,
    "\x00",
    "../../etc/passwd",
    "~nobody/x",
    "/" + "x" * 300,
    [],
    [[]],
    [None],
    {},
    {"a": {"b": {}}},
    {"__proto__": 1},
    {"": None},
    ["x"] * 5000,
]
RAW = [
    b"",
    b"null",
    b"[]",
    b'"text"',
    b"1",
    b"{",
    b'{"a":}',
    b"\xff\xfe",
    b'{"a": NaN}',
    b'{"a": -Infinity}',
    b'{"a": 1e999}',
    b'{"a": "\\ud800"}',
    b'{"a": "\xed\xa0\x80"}',
    b"[" * 50_000,
    b'{"a":' * 50_000,
    b'{"a":' * 500 + b"1" + b"}" * 500,
    b'{"a": ' + b"9" * 5000 + b"}",
    b'{"a": 1}{"b": 2}',
    "\ufeff{}".encode(),
    b'{"a": "\\u0000"}',
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def app(folder):
    """With a run, and a secret beside the folder of runs."""
    (folder / "secret").mkdir()
    for name in ("config.yaml", "events.jsonl", "secret.txt"):
        (folder / "secret" / name).write_text(SECRET)
    made = create_run(
        folder / "runs",
        TrainConfig.from_dict(
            {
                "name": "run",
                "model": {"source": "no/such-model"},
                "data": {"source": "no/such-data"},
            }
        ),
    )
    made.path.rename(folder / "runs" / RUN)
    app = served(folder / "runs")
    yield app.app
    app.session.close()


@pytest.fixture
def ask(app):
    """Many requests at once; none may be answered by a fault. Returns the answers."""

    def ask(requests):
        async def go():
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=ADDRESS) as client:
                answers = []
                for method, path, content in requests:
                    answers.append(
                        await client.request(
                            method,
                            path,
                            content=content,
                            headers={"content-type": "application/json"}
                            if method == "POST"
                            else {},
                        )
                    )
                answers.append(await client.get("/api/runs"))
                return answers

        *answers, alive = asyncio.run(go())
        assert alive.status_code == 200, "the app answers no more"
        for (method, path, content), answer in zip(requests, answers):
            what = (method, path[:80], str(content)[:80], answer.text[:300])
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, what
            if answer.status_code != 200:
                said = answer.json()
                sentence = said.get("error") or said["detail"]  # of Gradio's files
                assert (
                    0 < len(sentence) <= 2000
                    and "Traceback" not in sentence
                    and "Error(" not in sentence
                ), what
        return answers

    return ask


def filled(path, run=RUN):
    return path.replace("{run_id}", run).replace("{queued}", "abc").replace("{number}", "99")


def places(value, path=()):
    """Paths of keys to everything in a body but the body itself."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            if name != "shown":  # every one of its values is asked for alike: one will do
                yield from places(inner, (*path, name))
    if path and path[-1] == "shown":
        yield (*path, "train.steps")
        yield (*path, "data.source")
        yield (*path, "model.source")


def changed(body, place, value=None, remove=False):
    body = copy.deepcopy(body)
    inner = body
    for name in place[:-1]:
        inner = inner[name]
    if remove:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return body


def test_every_route_that_is_posted_to_has_a_body_here(app):
    posted = {
        route.path for route in app.routes if "POST" in (getattr(route, "methods", None) or ())
    }
    assert posted == {*BODIES, "/api/{rest:path}", "/ramstream/{rest:path}"}


@pytest.mark.parametrize("path", [path for path in BODIES if not path.endswith("/delete")])
def test_wrong_bodies_are_told_in_a_sentence(ask, path):
    body, wrong = (
        BODIES[path],
        list(RAW[:-2] if path.endswith("/measure") else RAW),
    )  # the last two are good
    for place in places(body):
        wrong.append(json.dumps(changed(body, place, remove=True)).encode())
        wrong += [json.dumps(changed(body, place, value)).encode() for value in WRONG]
    answers = ask([("POST", filled(path), content) for content in wrong])
    for content, answer in zip(RAW, answers):
        if content not in RAW[-2:]:
            assert answer.status_code == 409 and "not a JSON object" in answer.json()["error"], (
                content[:40]
            )


@pytest.fixture(scope="module")
def calls(app):
    """Returns a call of every function of the page that runs here, with nothing in its form, by its
    name.
    """

    async def ask():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=ADDRESS
        ) as client:
            return (await client.get("/config")).json()["dependencies"]

    return {
        function["api_name"]: {
            "data": [None] * len(function["inputs"]),
            "event_data": None,
            "fn_index": function["id"],
            "trigger_id": None,
            "session_hash": "abcdef",
        }
        for function in asyncio.run(ask())
        if function["backend_fn"]
    }


@pytest.mark.parametrize("path", CALLS)
def test_wrong_calls_of_the_pages_functions_are_told_in_a_sentence(ask, calls, path):
    """Gradio takes them."""
    assert {"preview", "load_preset", "open_page", "start", "enqueue"} <= set(calls)
    wrong = [
        changed(call, (name,), value)
        for call in calls.values()
        for value in WRONG
        for name in ("data", "fn_index", "session_hash", "trigger_id")
        if value != call[name] and not (name == "trigger_id" and type(value) is int)
    ]
    wrong += [
        changed(call, (name,), remove=True)
        for call in calls.values()
        for name in ("data", "fn_index", "session_hash")
    ]
    answers = ask(
        [
            ("POST", path, content)
            for content in [*RAW, *(json.dumps(call).encode() for call in wrong)]
        ]
    )
    assert {answer.status_code for answer in answers} == {409}
    more = {
        "trigger_id": HUGE,
        "event_id": 5,
        "batched": "x",
        "simple_format": None,
        "oauth_token": [],
    }
    (answer,) = ask([("POST", path, json.dumps(calls["open_page"] | more).encode())])
    assert answer.status_code == 200, "what Gradio might mistake is left out"
    assert {answer.json()["error"].partition(";")[0] for answer in answers} == {
        "The request is not a JSON object of plain texts and numbers.",
        "fn_index is no function of this page",
        "data is not the 51 texts and switches that this function takes",
        "data is not the 1 texts and switches that this function takes",
        "data is not the 0 texts and switches that this function takes",
        "session_hash is no name of a session",
        "trigger_id is no component of this page",
    }


def test_wrong_values_for_the_pages_functions_are_told_in_a_sentence(ask, calls):
    wrong = [
        json.dumps(changed(calls[name], ("data", place), value)).encode()
        for name in ("preview", "load_preset", "enqueue")
        for place in range(len(calls[name]["data"]))
        for value in (True, "", "\x00", "x" * 200_000)
    ]
    assert {
        answer.status_code for answer in ask([("POST", CALLS[1], content) for content in wrong])
    } == {200, 409}


def test_a_fault_in_a_function_of_the_page_is_told_in_a_sentence(app, calls, monkeypatch):
    monkeypatch.setattr("app.pages.train_events.read_config", lambda shown: 1 // 0)

    async def fail():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=ADDRESS
        ) as client:
            return await client.post(CALLS[1], json=calls["enqueue"])

    answer = asyncio.run(fail())
    assert answer.status_code == 500 and answer.json() == {
        "error": (
            "The program failed at this by a fault of its own; the terminal in which it runs says "
            "where."
        )
    }


def test_deleting_takes_an_object_too(ask, folder):
    ask([("POST", f"/api/runs/{RUN}/delete", content) for content in RAW[:-2]])
    assert (folder / "runs" / RUN / "config.yaml").is_file()


# ---------------------------------------------------------------------- paths

ELSEWHERE = [
    "..",
    "../secret",
    "%2e%2e%2fsecret",
    "..%2fsecret",
    "%252e%252e%252fsecret",
    "..%5csecret",
    "%2fetc",
    "%00",
    f"{RUN}%00",
    f"{RUN}%2f..%2f..%2fsecret",
    ".",
    "%2e",
    "x" * 5000,
    "%ff%fe",
    "%0a",
    f"{RUN}%0a",
    "~",
    "-",
    "*",
    "%ed%a0%80",
]
NAMES = [
    name.replace("%2f", "/")
    .replace("%2e", ".")
    .replace("%5c", "\\")
    .replace("%00", "\x00")
    .replace("%0a", "\n")
    for name in ELSEWHERE
]


def before_and_after(folder):
    return sorted(
        (str(path.relative_to(folder)), path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".draft.json"
    )


def test_a_run_is_no_path(ask, folder):
    before = before_and_after(folder)
    reads = [
        "/api/live/{}",
        "/api/runs/{}/details",
        "/api/runs/{}/timeline",
        "/api/runs/{}/trace",
        "/api/runs/{}/timeline?step=1",
        f"/api/compare?runs={{}},{RUN}",
        f"/api/compare?runs={RUN},{{}}",
    ]
    requests = [("GET", path.format(name), None) for path in reads for name in ELSEWHERE]
    requests += [
        ("POST", path.replace("{run_id}", name), json.dumps(body).encode())
        for name in ELSEWHERE
        for path, body in BODIES.items()
        if "{run_id}" in path
    ]
    requests += [
        (
            "POST",
            f"/api/talk/{path}",
            json.dumps(
                BODIES[f"/api/talk/{path}"]
                | {"message": "hello", "choice": {"run_id": run, "weights": weights}}
            ).encode(),
        )
        for path in ("about", "say")
        for run, weights in [
            *((name, "newest") for name in NAMES),
            *((RUN, f"step-{name}") for name in NAMES),
            *((RUN, name) for name in NAMES),
        ]
    ]
    assert not [answer.text for answer in ask(requests) if SECRET in answer.text]
    assert before_and_after(folder) == before


def test_numbers_of_an_address_are_bounded(ask):
    numbers = ["9" * 20_000, "-1", "1e5", "%00", "x", "²", "", "1.0", "١"]
    requests = [
        ("GET", path + number, None)
        for number in numbers
        for path in (
            f"/api/runs/{RUN}/timeline?step=",
            f"/api/runs/{RUN}/trace?step=",
            f"/api/live/{RUN}?since=",
            "/api/talk?since=",
            "/api/jobs/",
        )
    ]
    ask(requests)


def test_files_of_the_page_are_those_in_assets(ask):
    names = [
        *ELSEWHERE,
        "models.json",
        "starter.jsonl",
        "..%2fapp%2fserver.py",
        "page%2flive.html",
        "/etc/passwd",
    ]
    for prefix in (
        "/ramstream/",
        "/assets/",
        "/static/",
        "/static/js/",
        "/gradio_api/file=",
        "/gradio_api/file/",
        "/file=",
        "/gradio_api/proxy=",
        "/gradio_api/custom_component/",
    ):
        # httpx itself makes a path with dots shorter: /assets/../secret is asked for as /secret
        for answer in ask(
            [("GET", prefix + name, None) for name in names if not name.startswith(".")]
        ):
            assert answer.status_code in (403, 404) and len(answer.content) < 100, answer.text[:100]


def test_gradio_takes_no_file(ask, folder):
    """Values of its events may name files, which Gradio would copy to where they can be fetched, or
    addresses to fetch.
    """
    secret = str(folder / "secret" / "secret.txt")
    files = [
        {"path": secret, "meta": {"_type": "gradio.FileData"}},
        {"path": secret, "url": "http://127.0.0.1:9/x", "meta": {"_type": "gradio.FileData"}},
    ]
    body = {"fn_index": 1, "session_hash": "abc"}
    paths = (
        "upload",
        "component_server",
        "call/x",
        "api/predict",
        "process_recording",
        "vibe-edit",
        "stream/x",
    )
    requests = [
        ("POST", f"/gradio_api/{path}", json.dumps(body | {"data": [file] * 70}).encode())
        for file in files
        for path in paths
    ]
    for answer in ask(requests):
        assert answer.status_code == 404


# ---------------------------------------------------------------------- what a person gives as a pa


@pytest.mark.parametrize(
    "given",
    [
        "\x00",
        "a\x00b",
        "x" * 5000,
        "/" + "x" * 300,
        "~nobody-of-this-name/x",
        "..\\..\\x",
        "/dev/null",
        "/proc/self/mem",
        "https://127.0.0.1:9/x",
        "%2e%2e%2f",
    ],
)
def test_a_path_that_cannot_be_one_is_told(ask, folder, given):
    shown = SHOWN | {"train.steps": "10"}
    answers = ask(
        [
            (
                "POST",
                "/api/check",
                json.dumps({"preset": None, "shown": shown | {name: given}}).encode(),
            )
            for name in ("model.source", "data.source")
        ]
        + [
            (
                "POST",
                f"/api/talk/{path}",
                json.dumps(
                    BODIES[f"/api/talk/{path}"] | {"message": "hello", "choice": {"folder": given}}
                ).encode(),
            )
            for path in ("about", "say")
        ]
    )
    assert all(answer.status_code in (200, 409) for answer in answers)
    assert all(answer.status_code == 409 for answer in answers[2:]), (
        "there is no model in any of these"
    )
