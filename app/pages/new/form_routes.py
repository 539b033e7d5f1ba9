"""Routes of the form of a new run. They bypass Gradio's events: their queue, and the
copies that Gradio's page makes of an answer, took longer than the answers themselves.

In each body, `shown` has the value of every component of the form by dotted name.

POST /api/check {tab, preset, shown, keep, timed}
    Answers with the fit panel on the form, which is kept as the draft of `tab` unless `keep` is
    false; without a tab, new tabs begin with it. If
    `timed` is true, the fit panel shows how long a step takes with each suggestion, and what it
    costs that units live where they do; the page asks for that once the fit panel stands.
    `as_preset` is false where the data or the model are not those of the preset. `continues` is
    the name of the run whose weights training starts from; empty where it starts from the model.
POST /api/command {preset, shown}
    Answers with the `command` that trains these settings without a browser.
POST /api/derived {preset, before, after}
    Answers with the changes of other settings that follow from what a person changed. `preset` is
    the one that the form began with, or null.
POST /api/fitting {shown}
    Answers with the changes of settings that fit the data, once these are read.
POST /api/models {preset, shown}
    Answers with models as cards, those that fit first.
POST /api/opening {tab, other}
    Answers with what the form of `tab` begins with: its own draft, that of the tab `other`, which
    may be left out, or the last one. `choices` are the presets, by label and file; `preset` is the
    one that was chosen, null for settings of a run. The form is to take the values `shown` if
    `fills` is true, and else was laid out with them. There is an answer to a `check` of them if
    that takes no time. `about` is left out where what is said stays.
POST /api/rows {shown}
    Counts the rows of the data, and answers when later fit panels show them.
GET /api/presets
    Answers with the component values of each preset.
POST /api/presets {name, shown}
    Keeps the form as a person's own preset, and answers with its `file`.
POST /api/presets/remove {file}
    Deletes one of a person's own presets.
"""

from __future__ import annotations

import asyncio
import contextlib
from datetime import date
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.form.derived_defaults import with_even_rows
from app.form.settings_form import as_labeled, describe_error, read_config, settings, shown_values
from app.pages.new.checker import Checker
from app.pages.new.draft import NO_TAB, continues_from, is_tab
from app.server.requests import Handler, answering_errors, json_body, object_of, switch_of, text_of
from engine.errors import ConfigError, RunError

CHECK_SECONDS = 0.2
"""Time within which a page that is opened gets the fit of its form with the form itself."""


def form_routes(checker: Checker) -> list[Route]:
    """Returns the routes that answer the form, with `checker`, which all pages share."""
    return [*_check_routes(checker), *_preset_routes(checker)]


def _post(path: str, handler: Handler) -> Route:
    return Route(path, answering_errors(handler), methods=["POST"])


def _check_routes(checker: Checker) -> list[Route]:
    async def checked(preset: str | None, shown: dict[str, Any], timed: bool) -> dict[str, Any]:
        found = await asyncio.to_thread(checker.fit_panel, shown, timed, preset)
        beside = {
            "as_preset": checker.trains_as_preset(preset, shown),
            "continues": await asyncio.to_thread(continues_from, shown),
        }
        return found | beside

    async def check(request: Request) -> Response:
        body = await json_body(request)
        preset = _preset_of(body)
        keep = switch_of(body, "keep") if "keep" in body else True
        timed = switch_of(body, "timed") if "timed" in body else False
        shown = _shown(body)
        if keep:
            await asyncio.to_thread(checker.drafts.remember, tab_of(body), preset, shown)
        return JSONResponse(await checked(preset, shown, timed))

    async def command(request: Request) -> Response:
        body = await json_body(request)
        preset = _preset_of(body)
        shown = _shown(body)
        return JSONResponse({"command": await asyncio.to_thread(checker.command, preset, shown)})

    async def derived(request: Request) -> Response:
        body = await json_body(request)
        before, after = _shown(body, "before"), _shown(body, "after")
        found = await asyncio.to_thread(checker.derived, _preset_of(body), before, after)
        return JSONResponse(found)

    async def fitting(request: Request) -> Response:
        shown = _shown(await json_body(request))
        return JSONResponse(await asyncio.to_thread(checker.fitting, shown))

    async def models(request: Request) -> Response:
        body = await json_body(request)
        shown = _shown(body)
        return JSONResponse(await asyncio.to_thread(checker.models, _preset_of(body), shown))

    async def opening(request: Request) -> Response:
        body = await json_body(request)
        tabs = tab_of(body), tab_of(body, "other")
        found = await asyncio.to_thread(checker.opening, *tabs)
        if "shown" in found:
            checking = checked(found["preset"], found["shown"], timed=False)
            with contextlib.suppress(TimeoutError):
                found["check"] = await asyncio.wait_for(checking, CHECK_SECONDS)
        return JSONResponse(found)

    async def rows(request: Request) -> Response:
        shown = _shown(await json_body(request))
        await asyncio.to_thread(checker.count_rows, shown)
        return JSONResponse({})

    return [
        _post("/api/check", check),
        _post("/api/command", command),
        _post("/api/derived", derived),
        _post("/api/fitting", fitting),
        _post("/api/models", models),
        _post("/api/opening", opening),
        _post("/api/rows", rows),
    ]


def _preset_routes(checker: Checker) -> list[Route]:
    shelf = checker.presets

    def listed() -> dict[str, Any]:
        return {
            preset.file: {
                "is_own": preset.is_own,
                "about": preset.about,
                "shown": shown_values(preset.config),
            }
            for preset in shelf.listed().values()
            if preset.config is not None
        }

    def keep(name: str, shown: dict[str, Any]) -> str:
        try:
            config = read_config(with_even_rows(shown)[0])
        except ConfigError as error:
            raise RunError(as_labeled(describe_error(error))) from None
        return shelf.save(name, config, date.today()).file

    async def show_presets(_: Request) -> Response:
        return JSONResponse({"presets": await asyncio.to_thread(listed)})

    async def save(request: Request) -> Response:
        body = await json_body(request)
        name, shown = text_of(body, "name"), _shown(body)
        return JSONResponse({"file": await asyncio.to_thread(keep, name, shown)})

    async def remove(request: Request) -> Response:
        file = text_of(await json_body(request), "file")
        await asyncio.to_thread(shelf.remove, file)
        return JSONResponse({})

    return [
        Route("/api/presets", answering_errors(show_presets), methods=["GET"]),
        _post("/api/presets", save),
        _post("/api/presets/remove", remove),
    ]


def tab_of(body: dict[str, Any], key: str = "tab") -> str:
    """Returns the name of a tab in `body`. Raises RunError for what is no such name."""
    name = text_of(body, key) if body.get(key) else NO_TAB
    if not is_tab(name):
        raise RunError(f"{key} is no name of a tab; reload the page.")
    return name


def _preset_of(body: dict[str, Any]) -> str | None:
    """Returns the key of the preset that the form began with, None for a form without one."""
    return text_of(body, "preset") if body.get("preset") is not None else None


def _shown(body: dict[str, Any], key: str = "shown") -> dict[str, Any]:
    """Returns the value of every component of the form by dotted name.

    Raises RunError if one is missing, unknown, or of the wrong type.
    """
    shown = object_of(body, key)
    known = {setting.dotted: setting for setting in settings()}
    for name in [*known, *shown]:
        if name not in shown:
            raise RunError(f"{key}: {name} is missing.")
        if name not in known:
            raise RunError(f"{key}: {name!r} is not a setting.")
        if not known[name].holds(shown[name]):
            expected = "true or false" if known[name].kind == "switch" else "a text"
            raise RunError(f"{key}: {name} is not {expected}.")
    return shown
