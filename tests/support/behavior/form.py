"""The form of the page, filled in and sent as the page does it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.behavior.sides import Answer, Server

SESSION = "behavior"


class Form:
    """The page's components by their ids in the page, and its functions by the component that they
    belong to.
    """

    def __init__(self, server: Server):
        self._server = server
        config = server.json("GET", "/config")
        self._numbers = {
            component["props"].get("elem_id") or "": component["id"]
            for component in config["components"]
        }
        self._names = {number: name for name, number in self._numbers.items() if name}
        self._functions = config["dependencies"]
        values = {
            component["id"]: component["props"].get("value") for component in config["components"]
        }
        self.values = {
            name: values[number]
            for name, number in self._numbers.items()
            if name.startswith("field-") or name == "preset"
        }

    @property
    def shown(self) -> dict[str, Any]:
        """What the form shows, by the dotted names of the settings."""
        return {dotted(name): value for name, value in self.values.items() if name != "preset"}

    def filled(self, **changes: Any) -> Form:
        """Fill in settings by their dotted names, with `__` for the dot."""
        for name, value in changes.items():
            box = "field-" + name.replace("__", "-")
            if box not in self.values:
                raise KeyError(box)
            self.values[box] = value
        return self

    def press(self, element: str, event: str = "click") -> Answer:
        """What the function of a button, or of another component, is answered. Its inputs are what
        the form shows.
        """
        number = self._numbers[element] if element else 0
        function = next(
            each
            for each in self._functions
            if each["backend_fn"]
            and [number, event] in [list(target) for target in each["targets"]]
        )
        data = [self.values.get(self._names.get(place, "")) for place in function["inputs"]]
        call = {
            "fn_index": function["id"],
            "data": data,
            "session_hash": SESSION,
            "trigger_id": number or None,
            "event_data": None,
        }
        if not function["queue"]:
            return self._server.ask("POST", "/gradio_api/run/predict", call)
        self._server.ask("POST", "/gradio_api/queue/join", call)
        return self._server.ask("GET", f"/gradio_api/queue/data?session_hash={SESSION}")


def dotted(element: str) -> str:
    return element.removeprefix("field-").replace("-", ".")


def last_output(answer: Answer) -> Any:
    """The output of the last message of a stream."""
    found = None
    for line in answer.body.decode("utf-8", "replace").splitlines():
        if line.startswith("data:"):
            message = json.loads(line.removeprefix("data:"))
            if message.get("msg") in ("process_completed", "process_generating"):
                found = message.get("output", {}).get("data") or found
    return found
