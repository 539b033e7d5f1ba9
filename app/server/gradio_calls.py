"""Checks of calls of the page's functions before Gradio handles them.

Gradio itself answers an invalid call with a list of validation errors, or fails with an internal
error.
"""

from __future__ import annotations

import json
import re
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.server.guard import replayed
from app.server.requests import LONGEST_SENTENCE, json_object
from engine.errors import RamstreamError, RunError

CALLS = ("/gradio_api/queue/join", "/gradio_api/run/predict")
_NAMES = ("data", "event_data", "fn_index", "trigger_id", "session_hash")
_SESSION = re.compile(r"\w{1,64}", re.ASCII)
_FAULT = (
    "The program failed at this by a fault of its own; the terminal in which it runs says where."
)


class CheckedCalls:
    """ASGI middleware that answers a call that no page of this program makes with status 409 and a
    sentence.

    It passes other calls on to Gradio. Where Gradio answers a call at once, two kinds of failure
    get a sentence as well: a value that a component refuses, such as an unknown choice (409), and
    an exception in a function (500). Calls that Gradio queues report both in their stream.
    """

    def __init__(self, app: ASGIApp, page: gr.Blocks):
        self.app = app
        self.inputs = {
            number: len(function.inputs)
            for number, function in page.fns.items()
            if function.fn is not None
        }
        """Number of values that each function takes, for the functions of the page that run on the
        server.
        """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in CALLS:
            await self.app(scope, receive, send)
            return
        body = await Request(scope, receive).body()
        try:
            call = json_object(body)
            self._check(call)
        except RamstreamError as error:
            await JSONResponse({"error": str(error)}, 409)(scope, receive, send)
            return
        known = json.dumps({name: call[name] for name in _NAMES if name in call}).encode()
        await self.app(scope, replayed(known, receive), _Failure(scope, receive, send))

    def _check(self, call: dict[str, Any]) -> None:
        """Raises RunError unless a page of this program can make `call`."""
        # `type(…) is int` is used because `isinstance` accepts True and False as ints.
        function = call.get("fn_index")
        inputs = self.inputs.get(function) if type(function) is int else None
        if inputs is None:
            raise RunError("fn_index is no function of this page; reload the page.")
        if not _are_plain(call.get("data"), inputs):
            raise RunError(
                f"data is not the {inputs} texts and switches that this function takes; reload the "
                "page."
            )
        session = call.get("session_hash")
        if not isinstance(session, str) or not _SESSION.fullmatch(session):
            raise RunError("session_hash is no name of a session; reload the page.")
        trigger = call.get("trigger_id")
        if trigger is not None and type(trigger) is not int:
            raise RunError("trigger_id is no component of this page; reload the page.")


def _are_plain(values: Any, count: int) -> bool:
    """Returns whether `values` is a list of `count` items, each a str, a bool or None."""
    if not isinstance(values, list) or len(values) != count:
        return False
    return all(value is None or isinstance(value, (str, bool)) for value in values)


class _Failure:
    """Passes an answer on, but replaces one that reports a failure by one with a sentence."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope, self.receive, self.send = scope, receive, send
        self.status = 200
        self.body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.status < 400:
            await self.send(message)
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_error()

    async def _send_error(self) -> None:
        sentence = self._sentence()
        status = self.status
        if sentence is None:
            sentence = _FAULT
        elif status == 500:
            status = 409  # a refusal by a component is not a fault of the program
        answer = JSONResponse({"error": sentence[:LONGEST_SENTENCE]}, status)
        await answer(self.scope, self.receive, self.send)

    def _sentence(self) -> str | None:
        """Returns the problem that Gradio's answer names, or None where it names none."""
        try:
            answer = json.loads(self.body)
        except ValueError:
            return None
        if not isinstance(answer, dict):
            return None
        sentence = answer.get("error") or answer.get("detail")
        return sentence if isinstance(sentence, str) else None
