"""Requests with paths that lead outside the run folders are answered with a sentence, and nothing
outside is read or written.
"""

from __future__ import annotations

import json

import pytest

from tests.support.security import BODIES, RUN, SECRET, SHOWN

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
            f"/api/chat/{path}",
            json.dumps(
                BODIES[f"/api/chat/{path}"]
                | {"message": "hello", "choice": {"run_id": run, "weights": weights}}
            ).encode(),
        )
        for path in ("about", "send")
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
            "/api/chat?since=",
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
        # httpx normalizes paths with dots: /assets/../secret is requested as /secret
        for answer in ask(
            [("GET", prefix + name, None) for name in names if not name.startswith(".")]
        ):
            assert answer.status_code in (403, 404) and len(answer.content) < 100, answer.text[:100]


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
                f"/api/chat/{path}",
                json.dumps(
                    BODIES[f"/api/chat/{path}"] | {"message": "hello", "choice": {"folder": given}}
                ).encode(),
            )
            for path in ("about", "send")
        ]
    )
    assert all(answer.status_code in (200, 409) for answer in answers)
    assert all(answer.status_code == 409 for answer in answers[2:]), (
        "there is no model in any of these"
    )
