"""Calls of the page's functions, which Gradio takes: checked before it sees them, since it answers
a wrong one with a list of validation errors or a fault of its own.
"""

from __future__ import annotations

import json
import re
from typing import Any

import gradio as gr
from starlette.requests import Request
from starlette.responses import JSONResponse

from app.web.guard import App, Message, Receive, Scope, Send, replayed
from app.web.requests import LONGEST_SENTENCE, json_object
from engine.errors import RamstreamError, RunError

CALLS = ("/gradio_api/queue/join", "/gradio_api/run/predict")
_NAMES = ("data", "event_data", "fn_index", "trigger_id", "session_hash")
_SESSION = re.compile(r"\w{1,64}", re.ASCII)
_FAULT = (
    "The program failed at this by a fault of its own; the terminal in which it runs says where."
)


class CheckedCalls:
    """ASGI middleware. A call that no page of this program makes is answered by 409 and a sentence.
    Of those that are answered at once, so is one that a component refuses, such as a choice that is
    none, and what fails in a function by 500; those that are queued tell both in their stream.
    """

    def __init__(self, app: App, page: gr.Blocks):
        self.app = app
        self.inputs = {
            number: len(function.inputs)
            for number, function in page.fns.items()
            if function.fn is not None
        }
        """How many values each function of the page that runs here takes."""

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
        """Raises RunError."""
        inputs = self.inputs.get(call["fn_index"]) if type(call.get("fn_index")) is int else None
        if inputs is None:
            raise RunError("fn_index is no function of this page; reload the page.")
        values = call.get("data")
        if not isinstance(values, list) or len(values) != inputs or not all(map(_is_plain, values)):
            raise RunError(
                f"data is not the {inputs} texts and switches that this function takes; reload the "
                "page."
            )
        if not isinstance(call.get("session_hash"), str) or not _SESSION.fullmatch(
            call["session_hash"]
        ):
            raise RunError("session_hash is no name of a session; reload the page.")
        trigger = call.get("trigger_id")
        if trigger is not None and type(trigger) is not int:
            raise RunError("trigger_id is no component of this page; reload the page.")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (str, bool))


class _Failure:
    """Sends an answer on; one that tells of a failure says it in a sentence."""

    def __init__(self, scope: Scope, receive: Receive, send: Send):
        self.scope, self.receive, self.send = scope, receive, send
        self.status = 200
        self.said = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        if self.status < 400:
            await self.send(message)
        elif message["type"] == "http.response.body":
            self.said += message.get("body", b"")
            if not message.get("more_body", False):
                await self._tell()

    async def _tell(self) -> None:
        try:
            said = json.loads(self.said)
        except ValueError:
            said = None
        sentence = (said.get("error") or said.get("detail")) if isinstance(said, dict) else None
        is_told = isinstance(sentence, str)
        status = (
            409 if is_told and self.status == 500 else self.status
        )  # a component's refusal is no fault of the program
        answer = JSONResponse({"error": sentence[:LONGEST_SENTENCE] if is_told else _FAULT}, status)
        await answer(self.scope, self.receive, self.send)
