"""The page: its components, functions and layout, and every file that it asks for."""

from __future__ import annotations

import gzip
import json
import posixpath
import re
from typing import Any

from tests.support.behavior.answers import NOT_COMPARED
from tests.support.behavior.plain import digest, each_text, unmeasured
from tests.support.behavior.sides import Server, Side

_CONFIG = re.compile(r"window\.gradio_config = (\{.*?\});?</script>", re.DOTALL)
_FILE = re.compile(
    r"""(?:src|href|content|from|import)[=\s(]*["']"""
    r"""(\.{0,2}/?[\w./@-]+\.(?:js|css|svg|png|woff2|ico|json))["']"""
)
_LINKED = re.compile(r"<([^>]+)>;")
_FOLDER = re.compile(r"""(["'(<])(?:\.{0,2}/)?(?:[\w@-]+/)*([\w.-]+\.(?:js|css))""")
MOST_FILES = 150


def gather(side: Side) -> dict[str, Any]:
    runs = side.work / "page-runs"
    facts: dict[str, Any] = {}
    with side.serve(runs) as server:
        page = server.ask("GET", "/")
        text = page.body.decode()
        found = _CONFIG.search(text)
        config = json.loads(found[1] if found else server.ask("GET", "/config").body)
        facts["config in the page"] = found is not None
        facts |= _config(side, config)
        facts["the same as /config"] = _config(side, server.json("GET", "/config"))
        facts["page around its config"] = [
            side.plain(line) for line in _FOLDER.sub(r"\1\2", _CONFIG.sub("", text)).splitlines()
        ]
        facts["headers of the page"] = {
            name: "..." if name in NOT_COMPARED else _FOLDER.sub(r"\1\2", side.plain(value))
            for name, value in page.headers
        }
        linked = _LINKED.findall(page.header("link"))
        facts |= _files(side, server, [*_FILE.findall(text), *linked])
        for path in ("/theme.css", "/manifest.json", "/favicon.ico"):
            answer = server.ask("GET", path)
            content = side.plain(answer.body.decode())
            facts[path] = [answer.status, answer.header("content-type"), digest(content.encode())]
    facts["printed"] = side.plain(server.printed)
    facts["exit code"] = server.code
    facts["left in the folder of runs"] = (
        sorted(path.name for path in runs.iterdir()) if runs.exists() else None
    )
    return facts


def _config(side: Side, config: dict[str, Any]) -> dict[str, Any]:
    """Components, functions and layout, with the components numbered in the order in which they are
    laid out.
    """
    numbers: dict[int, int] = {}

    def number(node: dict[str, Any]) -> None:
        numbers.setdefault(node["id"], len(numbers))
        for child in node.get("children") or []:
            number(child)

    number(config["layout"])
    for component in config["components"]:
        numbers.setdefault(component["id"], len(numbers))

    def renumbered(value: Any) -> Any:
        if isinstance(value, list):
            return [
                numbers.get(item, item) if type(item) is int else renumbered(item) for item in value
            ]
        if isinstance(value, dict):
            return {key: renumbered(item) for key, item in value.items()}
        return value

    def laid_out(node: dict[str, Any]) -> list[Any]:
        return [numbers[node["id"]], *map(laid_out, node.get("children") or [])]

    components = sorted(config["components"], key=lambda component: numbers[component["id"]])
    facts: dict[str, Any] = {
        "number of components": len(components),
        "layout": laid_out(config["layout"]),
    }
    kinds: dict[str, int] = {}
    for component in components:
        kinds[component["type"]] = kinds.get(component["type"], 0) + 1
        shown = {key: value for key, value in component.items() if key != "id"}
        facts[f"component {numbers[component['id']]}"] = each_text(
            shown, lambda text: unmeasured(side.plain(text))
        )
    facts["kinds of components"] = kinds
    for function in config["dependencies"]:
        facts[f"function {function['id']}"] = {
            key: value if key in ("id", "js") else renumbered(value)
            for key, value in function.items()
        }
    others = {
        key: value
        for key, value in config.items()
        if key not in ("components", "dependencies", "layout", "page", "app_id", "root")
    }
    facts["what else is configured"] = each_text(
        others, lambda text: _FOLDER.sub(r"\1\2", side.plain(text))
    )
    return facts


def _files(side: Side, server: Server, paths: list[str]) -> dict[str, Any]:
    """What each file answers that the page asks for, and those that it imports. A file is known by
    its name: in which folder it lies is not compared, nor from where it imports.
    """
    waiting, seen, facts = list(dict.fromkeys(paths)), set(), {}
    while waiting and len(seen) < MOST_FILES:
        path = waiting.pop(0)
        path = "/" + path.removeprefix("./").lstrip("/")
        if path in seen:
            continue
        seen.add(path)
        answer = server.ask("GET", path)
        name = path.rpartition("/")[2]
        # A packed file also says when it was packed.
        packed = answer.header("content-encoding")
        content = gzip.decompress(answer.body) if packed == "gzip" else answer.body
        if (
            path.startswith("/ramstream/")
            and name.endswith((".js", ".css"))
            and not name.startswith("plotly-")
        ):
            text = content.decode()
            base = path.rpartition("/")[0]
            waiting += [
                posixpath.normpath(posixpath.join(base, found)) for found in _FILE.findall(text)
            ]
            content = _FOLDER.sub(r"\1\2", text).encode()
        facts[f"file {name}"] = {
            "status": answer.status,
            "kind": answer.header("content-type"),
            "kept": answer.header("cache-control"),
            "packed": packed,
            "content": digest(content),
        }
    facts["files that the page asks for"] = sorted(path.rpartition("/")[2] for path in seen)
    return facts
