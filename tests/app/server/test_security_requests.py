"""The app withstands requests that none of its pages would send: paths that lead outside, and
malformed bodies of every kind. Each is answered with a sentence, nothing outside is read or
written, and the app keeps responding.
"""

from __future__ import annotations

import asyncio
import copy
import json

import httpx
import pytest

from app.server.gradio_calls import CALLS
from tests.support.security import BODIES, RUN, filled
from tests.support.served import ADDRESS

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


def places(value, path=()):
    """Yields the path of keys to every value in a body, except the body itself."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield (*path, name)
            if name != "shown":  # all of its values are read in the same way, so one is enough
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
    # What needs the key of OpenAI's API has its wrong bodies beside its routes.
    posted = {path for path in posted if not path.startswith("/v1/")}
    assert posted == {*BODIES, "/api/{rest:path}", "/ramstream/{rest:path}", "/login"}


@pytest.mark.parametrize("path", [path for path in BODIES if not path.endswith("/delete")])
def test_wrong_bodies_are_told_in_a_sentence(ask, path):
    body, wrong = (
        BODIES[path],
        list(RAW[:-2] if path.endswith("/measure") else RAW),
    )  # the last two are valid
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
    """Returns, by name, a call with an empty form for every page function that runs on the
    server.
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
    """These calls are received by Gradio."""
    assert {"preview", "load_preset", "list_presets", "start", "enqueue"} <= set(calls)
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
    (answer,) = ask([("POST", path, json.dumps(calls["list_presets"] | more).encode())])
    assert answer.status_code == 200, "what Gradio might mistake is left out"
    taken = {len(call["data"]) for call in calls.values()}
    assert min(taken) == 1 and max(taken) > 40, (
        "a list of presets takes one text, the form all its settings"
    )
    assert {answer.json()["error"].partition(";")[0] for answer in answers} == {
        "The request is not a JSON object of plain texts and numbers.",
        "fn_index is no function of this page",
        *(
            f"data is not the {count} texts and switches that this function takes"
            for count in taken
        ),
        "session_hash is no name of a session",
        "trigger_id is no component of this page",
    }


@pytest.mark.slow("it sweeps over many cases")
def test_wrong_values_for_the_pages_functions_are_told_in_a_sentence(ask, calls):
    # All of these functions read the form by the same code, so one gets every value in each field.
    values = (True, "", "\x00", "x" * 200_000)
    wrong = [
        json.dumps(changed(calls[name], ("data", place), value)).encode()
        for name in ("preview", "load_preset", "enqueue")
        for place in range(len(calls[name]["data"]))
        for value in (values if name == "enqueue" else values[place % len(values) :][:1])
    ]
    assert {
        answer.status_code for answer in ask([("POST", CALLS[1], content) for content in wrong])
    } == {200, 409}


def test_a_fault_in_a_function_of_the_page_is_told_in_a_sentence(app, calls, monkeypatch):
    monkeypatch.setattr("app.form.presets.PresetShelf.get", lambda *given: 1 // 0)

    async def fail():
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url=ADDRESS
        ) as client:
            return await client.post(CALLS[1], json=calls["list_presets"])

    answer = asyncio.run(fail())
    assert answer.status_code == 500
    assert answer.json() == {
        "error": (
            "The program failed at this by a fault of its own; the terminal in which it runs says "
            "where."
        )
    }


def test_words_of_an_address_that_only_gradio_reads_change_nothing(ask):
    words = ("page=x", "deep_link=../x", "page=&show=runs", "run=a&page=%00&page=b")
    assert {
        answer.status_code for answer in ask([("GET", f"/?{each}", b"") for each in words])
    } == {200}


def test_deleting_takes_an_object_too(ask, folder):
    ask([("POST", f"/api/runs/{RUN}/delete", content) for content in RAW[:-2]])
    assert (folder / "runs" / RUN / "config.yaml").is_file()
