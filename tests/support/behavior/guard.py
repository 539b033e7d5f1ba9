"""Who may ask what: hosts, origins, methods, bodies, sizes, paths; and what our routes say to
bodies that are none of theirs.
"""

from __future__ import annotations

import socket
from typing import Any

from tests.support.behavior.answers import UNIQUE, Asked
from tests.support.behavior.sides import Server, Side

ROUTES = (
    "/api/check",
    "/api/hardware/column",
    "/api/hardware/csv",
    "/api/hardware/largest",
    "/api/hardware/offers",
    "/api/chat/about",
    "/api/chat/send",
    "/api/chat/stop",
    "/api/chat/new",
    "/api/chat/unload",
    "/api/queue/continue",
    "/api/jobs/1/cancel",
    "/api/runs/x/control",
    "/api/runs/x/describe",
    "/api/runs/x/change",
    "/api/runs/x/delete",
    "/api/runs/x/export",
    "/api/runs/x/draft",
    "/gradio_api/run/predict",
    "/gradio_api/queue/join",
)
READ = (
    "/",
    "/config",
    "/api/live",
    "/api/live/x",
    "/api/runs",
    "/api/runs/x/details",
    "/api/hardware",
    "/api/hardware/choices",
    "/api/jobs",
    "/api/jobs/1",
    "/api/jobs/x",
    "/api/chat",
    "/api/chat/choices",
    "/api/compare",
    "/api/runs/x/trace",
    "/gradio_api/app_id",
)
NOWHERE = (
    "/api",
    "/api/",
    "/api/nothing",
    "/ramstream/",
    "/ramstream/nothing.js",
    "/ramstream/..%2flaunch.py",
    "/gradio_api/file=/etc/passwd",
    "/gradio_api/upload",
    "/gradio_api/info",
    "/docs",
    "/openapi.json",
    "/login",
    "/logout",
    "/assets/../config",
    "/static/img/nothing.svg",
    "//api/runs",
    "/nothing",
    "/gradio_api/startup-events",
    "/user",
    "/x" * 150,
    "/theme.css/",
    "/gradio_api/queue/data",
    "/monitoring",
    "/robots.txt",
)
BODIES = (
    b"",
    b"{",
    b"[]",
    b"5",
    b"null",
    b'"text"',
    b'{"a": NaN}',
    b'{"a": "\\ud800"}',
    b"\xff",
    b"[" * 40 + b"]" * 40,
    b'{"a":' * 20 + b"1" + b"}" * 20,
    b'{"fn_index": 11, "data": [], "session_hash": "abc"}',
)
JSON = {"Content-Type": "application/json"}
MACHINE = {"rates", "job", "machine", "memory", "why_not_measure", "id", "sentence"}
"""Names in the answers about this machine whose values are measured."""


def gather(side: Side) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    with side.serve(side.work / "guard-runs") as server:
        ask = Asked(server, facts)
        here = f"127.0.0.1:{server.port}"
        _hosts(ask, here, server.port)
        for path in READ[3:]:
            ask("GET", path, unique=UNIQUE | (MACHINE if path == "/api/hardware" else set()))
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
                ask(
                    method,
                    path,
                    headers=JSON,
                    raw=b"{}",
                    name=f"{method} {path} with an empty object",
                )
        for path in NOWHERE:
            ask("GET", path)
            ask("POST", path, {})
        for path in ROUTES:
            unique = UNIQUE | (MACHINE if path == "/api/hardware/largest" else set())
            for body in BODIES:
                ask(
                    "POST",
                    path,
                    raw=body,
                    headers=JSON,
                    name=f"POST {path} {body[:60]!r}",
                    unique=unique,
                )
            ask("POST", path, {}, name=f"POST {path} an empty object", unique=unique)
            ask("GET", path)
            ask(
                "POST",
                path,
                raw=b"{}",
                headers={"Content-Type": "text/plain"},
                name=f"POST {path} as text",
            )
        _hardware(ask)
        _chat(ask)
        _sizes(ask)
        facts["a web socket"] = _raw(
            server,
            f"GET /gradio_api/queue/join HTTP/1.1\r\nHost: {here}\r\nUpgrade: "
            "websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: "
            "dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n",
        )
        facts["two hosts"] = _raw(
            server, f"GET /api/live HTTP/1.1\r\nHost: {here}\r\nHost: {here}\r\n\r\n"
        )
        facts["no host"] = _raw(server, "GET /api/live HTTP/1.1\r\n\r\n")
        facts["no request at all"] = _raw(server, "hello\r\n\r\n")
        facts["a length that is none"] = _raw(
            server,
            f"POST /api/check HTTP/1.1\r\nHost: {here}\r\n"
            "Content-Type: application/json\r\nContent-Length: -4\r\n\r\n",
        )
    facts["printed"] = side.plain(server.printed)
    facts["exit code"] = server.code
    return facts


def _hosts(ask: Asked, here: str, port: int) -> None:
    for host in (
        "evil.example",
        "",
        "127.0.0.2:1",
        f"localhost:{port}",
        "localhost",
        f"[::1]:{port}",
        "a@127.0.0.1",
        "127.0.0.1/x",
        "127.0.0.1:x",
        "LOCALHOST",
        "0.0.0.0",
        "192.0.2.7",
        "127.0.0.1.",
    ):
        ask("GET", "/api/live", headers={"Host": host}, name=f"Host {host}")
        ask("POST", "/api/check", {}, headers={"Host": host}, name=f"Host {host} of a POST")
    for origin in (
        "http://evil.example",
        f"http://{here}",
        "null",
        "",
        f"https://{here}",
        "http://127.0.0.1:1",
    ):
        ask("GET", "/api/live", headers={"Origin": origin}, name=f"Origin {origin}")
        ask("POST", "/api/check", {}, headers={"Origin": origin}, name=f"Origin {origin} of a POST")
    for site in ("cross-site", "same-site", "same-origin", "none"):
        for mode in ("navigate", "cors", ""):
            headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode}
            ask("GET", "/api/live", headers=headers, name=f"Sec-Fetch {site} {mode}")
            ask(
                "POST", "/api/check", {}, headers=headers, name=f"Sec-Fetch {site} {mode} of a POST"
            )


def _hardware(ask: Asked) -> None:
    """Tables of known machines, which are worked out from figures, and what is asked wrongly."""
    settings = {"rows": 8, "tokens": 512, "dtype": "bfloat16"}
    for name in ("RTX 4090", "H100 SXM"):
        ask("POST", "/api/hardware/column", {"machine": name, "timed": True, "settings": settings})
        ask("POST", "/api/hardware/column", {"machine": name, "timed": False, "settings": {}})
    ask(
        "POST",
        "/api/hardware/csv",
        {
            "machines": ["RTX 4090"],
            "models": ["Qwen/Qwen2.5-7B", "meta-llama/Llama-3.1-8B"],
            "settings": settings,
        },
    )
    for model in (
        "Qwen/Qwen2.5-7B",
        "meta-llama/Llama-3.3-70B-Instruct",
        "OLMo 2 7B",
        "no such model",
    ):
        ask("POST", "/api/hardware/offers", {"model": model, "settings": settings})
    for wrong in (
        {"rows": 0},
        {"rows": "many"},
        {"rows": 10**6},
        {"tokens": 1},
        {"dtype": "int4"},
        {"dtype": None},
        5,
    ):
        ask(
            "POST",
            "/api/hardware/column",
            {"machine": "RTX 4090", "timed": False, "settings": wrong},
        )
        ask("POST", "/api/hardware/largest", {"settings": wrong})
    for body in ({"machine": "nope", "settings": {}}, {"machine": 5, "settings": {}}):
        ask("POST", "/api/hardware/column", body)
    for body in (
        {"machines": [], "models": [], "settings": {}},
        {"machines": ["RTX 4090"], "models": ["x"], "settings": {}},
        {"machines": ["RTX 4090"] * 20, "models": [], "settings": {}},
        {"machines": "RTX 4090", "models": []},
    ):
        ask("POST", "/api/hardware/csv", body)


def _chat(ask: Asked) -> None:
    good = {
        "choice": {"run_id": "x", "weights": "newest"},
        "message": "hello",
        "compare": False,
        "system": "",
    }
    for change in (
        {},
        {"message": 5},
        {"system": None},
        {"message": "x" * 200_001},
        {"temperature": 9},
        {"top_p": 0},
        {"max_new_tokens": 0},
        {"seed": -1},
        {"choice": 5},
        {"choice": {"folder": " "}},
        {"choice": {}},
        {"choice": {"folder": "/no/such/folder"}},
        {"message": " "},
    ):
        ask(
            "POST",
            "/api/chat/send",
            good | change,
            name=f"say {str(change)[:60]}",
            unique={"version", "id"},
        )
    for choice in (
        {"run_id": "../x", "weights": "newest"},
        {"folder": "/no/such/folder"},
        {"folder": ""},
        {"run_id": "x"},
    ):
        ask("POST", "/api/chat/about", {"choice": choice})
    for since in ("", "0", "x", "-1", "9" * 30):
        ask("GET", f"/api/chat?since={since}")


def _sizes(ask: Asked) -> None:
    ask(
        "POST",
        "/api/check",
        raw=b'{"a": "' + b"x" * (1 << 20) + b'"}',
        headers=JSON,
        name="a body above a MiB",
    )
    ask("GET", "/api/live", headers={"X-Long": "x" * (40 << 10)}, name="a head above 32 KiB")
    ask(
        "GET",
        "/api/live",
        headers={f"X-{number}": "x" for number in range(120)},
        name="120 headers",
    )
    ask(
        "POST",
        "/api/check",
        raw=b"{}",
        headers=JSON | {"Content-Length": "9" * 25},
        name="a length of 25 digits",
    )


def _raw(server: Server, text: str) -> list[str]:
    """What a request is answered that no library would send: the status line, and what is said."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        connection.sendall(text.encode())
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
    head, _, body = answer.decode("utf-8", "replace").partition("\r\n\r\n")
    return [
        line if not line.lower().startswith("date") else "date"
        for line in server.side.plain(head).split("\r\n")
    ] + [body]
