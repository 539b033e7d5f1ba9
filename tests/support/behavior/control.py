"""Runs that are started from the page and led by requests: paused, changed, saved, resumed,
stopped, queued, detached, exported, chatted with and deleted. How far a run comes in the meantime
varies; what it does at each step, and what it says, does not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.behavior.answers import Asked, body_of
from tests.support.behavior.form import Form, last_output
from tests.support.behavior.plain import (
    digest,
    each_text,
    shape_of,
    uncounted,
    unmeasured,
    without,
)
from tests.support.behavior.sides import Server, Side, wait_for
from tests.support.behavior.small import small_place

ENDLESS = "1000000"
COMPARED_STEPS = 20
"""Of each run, whose figures are compared: every run comes further than that."""
OVER = ("finished", "stopped", "failed", "discarded")
EXACT = ("step", "loss", "grad_norm", "learning_rate", "tokens", "loss_tokens")
COUNTED = {
    "id",
    "created",
    "at_work",
    "version",
    "job_id",
    "rate",
    "seconds",
    "done",
    "total",
    "first",
    "amount",
    "left",
    "steps",
    "loss",
}
"""Names in answers whose values depend on the moment."""


def gather(side: Side) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    place, runs = small_place(side, "control"), side.work / "control-runs"
    with side.serve(runs) as server:
        led = Led(side, server, runs, facts)
        form = led.form.filled(
            name="Led",
            model__source=str(place / "model"),
            model__dtype="float32",
            data__source=str(place / "data.jsonl"),
            data__max_seq_len="32",
            data__eval_fraction="0.1",
            train__batch_size="4",
            train__micro_batch_size="2",
            train__steps=ENDLESS,
            train__schedule="constant",
            train__warmup_steps="0",
            train__learning_rate="0.005",
            output__checkpoint_every="0",
            output__eval_every="0",
            output__exact_match_samples="0",
            output__export=False,
            engine__device="cpu",
        )
        _checked(led, form)
        _paused_and_changed(led, form)
        _stopped_and_resumed(led, form)
        _used(led, place)
        led.ask("GET", "/api/live", unique={"server_id", "active", "run_id"})
        form.filled(name="Left running", train__steps=ENDLESS)
        last = led.start("start")
        led.until_step(last, COMPARED_STEPS)
    facts["exit code, while a run goes on"] = server.code
    facts["printed"] = side.plain(server.printed)
    facts |= led.record(last)
    with side.serve(runs) as server:
        form = Form(server)
        facts["the form after a restart"] = each_text(
            last_output(form.press("", "load")), side.plain
        )
        facts["runs after a restart"] = each_text(
            without(server.json("GET", "/api/runs"), COUNTED), led.plain
        )
    return facts


class Led:
    """A server whose runs are led, and what it answers."""

    def __init__(self, side: Side, server: Server, runs: Path, facts: dict[str, Any]):
        self.side, self.server, self.runs, self.facts = side, server, runs, facts
        self.form = Form(server)
        self.ask = Asked(server, facts, self.plain)
        self._step = 0

    def note(self, name: str, value: Any) -> None:
        """Keep a fact whose order among the others is part of its name."""
        self._step += 1
        self.facts[f"{self._step}. {name}"] = each_text(value, self.plain)

    def plain(self, text: str) -> str:
        """The text without what depends on the moment."""
        return uncounted(unmeasured(self.side.plain(text)))

    def start(self, button: str) -> str:
        """Press a button that starts a run; the run's id."""
        answer = self.form.press(button)
        body = json.loads(answer.body)
        self.note(
            f"press {button}", [answer.status, without(body, {"duration", "average_duration"})]
        )
        return str(body["data"][0]["open"])

    def state(self, run_id: str) -> dict[str, Any]:
        return self.server.json("GET", f"/api/live/{run_id}?since=0")

    def until(self, run_id: str, *states: str) -> None:
        wait_for(
            lambda: self.state(run_id)["bar"]["state"] in states,
            f"{run_id} to be {' or '.join(states)}",
        )
        live = self.state(run_id)
        bar = live["bar"]
        self.note(
            f"{states[0]}, as the page shows it",
            {
                "bar": {
                    name: bar[name]
                    for name in (
                        "name",
                        "state",
                        "word",
                        "tone",
                        "actions",
                        "pending",
                        "waits",
                        "stop_saves",
                    )
                },
                "learning rate": bar["settings"]["learning_rate"],
                "keys": sorted(live),
                "keys of the bar": sorted(bar),
                "parts": sorted(live["parts"]),
                "tiles": [tile["label"] for tile in live["tiles"]],
            },
        )

    def until_step(self, run_id: str, step: int) -> int:
        """Wait until so many steps are done; how many there are."""

        def done() -> int:
            return int((self.state(run_id)["bar"]["settings"] or {}).get("done") or 0)

        return wait_for(lambda: done() if done() >= step else 0, f"step {step} of {run_id}")

    def until_saved(self, run_id: str) -> None:
        """Wait until the record tells of a checkpoint, after which the run goes on as it was."""
        wait_for(
            lambda: b'"checkpoint_written"' in (self.runs / run_id / "events.jsonl").read_bytes(),
            "the checkpoint",
        )

    def command(self, run_id: str, command: str, seen: str = "") -> None:
        answer = self.server.ask(
            "POST", f"/api/runs/{run_id}/control", {"command": command, "seen": seen}
        )
        self.note(f"{command} (seen: {seen})", [answer.status, body_of(self.side, answer)])

    def record(self, run_id: str) -> dict[str, Any]:
        """What the record of a run says that does not depend on the moment."""
        name = self.side.plain(run_id)
        lines = [
            json.loads(line)
            for line in (self.runs / run_id / "events.jsonl")
            .read_text(encoding="utf-8")
            .splitlines()
        ]
        found = [
            {
                key: line[key]
                for key in ("kind", "state", "reason", "command", "values")
                if key in line
            }
            for line in lines
            if line["kind"]
            in (
                "state_changed",
                "control_received",
                "settings_changed",
                "run_started",
                "run_ended",
                "checkpoint_written",
                "log_line",
                "eval_finished",
            )
        ]
        for line in found:
            if line["kind"] in ("settings_changed", "control_received", "log_line"):
                line["values"] = sorted(line.get("values") or {})
        steps = [
            {key: line[key] for key in EXACT} for line in lines if line["kind"] == "step_finished"
        ]
        numbers = [line["step"] for line in steps]
        keys: dict[str, list[str]] = {line["kind"]: list(line) for line in lines}
        return {
            f"record of {name}": each_text(found, self.plain),
            f"first steps of {name}": steps[:COMPARED_STEPS],
            f"keys of {name}": dict(sorted(keys.items())),
            f"steps of {name} without a gap": numbers == list(range(1, len(numbers) + 1)),
            f"files of {name}": sorted(
                {
                    uncounted(str(path.relative_to(self.runs / run_id)))
                    for path in (self.runs / run_id).rglob("*")
                }
            ),
        }


def _checked(led: Led, form: Form) -> None:
    """Verdicts of the form, right and wrong, and the preview of the data."""

    def check(name: str, body: Any) -> None:
        answer = led.server.ask("POST", "/api/check", body)
        found = json.loads(answer.body)
        for bar in found.get("bars", []):
            bar["figure"] = shape_of(bar["figure"])
        led.note(f"check: {name}", [answer.status, found])

    shown = form.shown
    check("the form", {"preset": "starter.yaml", "shown": shown})
    check("not kept", {"preset": None, "shown": shown | {"train.steps": "7"}, "keep": False})
    for name, value in (
        ("train.steps", "0"),
        ("train.steps", "many"),
        ("model.source", ""),
        ("model.source", "/no/such/folder"),
        ("data.source", "[{source: a, weight: 0}]"),
        ("train.micro_batch_size", "3"),
        ("train.epochs", "2"),
        ("data.columns.prompt", "x"),
        ("output.webhook", "nowhere"),
        ("engine.device", "tpu"),
        ("data.max_seq_len", ""),
        ("train.batch_size", "1000000"),
        ("model.source", "Qwen/Qwen2.5-7B"),
    ):
        check(f"{name} is {value}", {"preset": None, "shown": shown | {name: value}, "keep": False})
    check(
        "a setting is missing",
        {"shown": {name: value for name, value in shown.items() if name != "train.seed"}},
    )
    check("a setting that is none", {"shown": shown | {"no.such": "1"}})
    check("a switch that is a text", {"shown": shown | {"data.packing": "yes"}})
    check("a text that is a switch", {"shown": shown | {"train.steps": True}})
    check("no shown", {"preset": "starter.yaml"})
    led.note("preview", last_output(form.press("rs-preview", "submit")))
    led.note("a preset", last_output(form.press("preset", "input")))
    led.note("the page opens", last_output(form.press("", "load")))
    wrong = form.press("add-to-queue")
    led.note(
        "queue, while nothing runs",
        [wrong.status, without(json.loads(wrong.body), {"duration", "average_duration"})],
    )
    first = wait_for(
        lambda: next(iter(led.server.json("GET", "/api/runs")["runs"]), None),
        "the queued run to start",
    )
    led.until(first["id"], "running")
    led.command(first["id"], "discard")
    led.until(first["id"], "discarded")


def _paused_and_changed(led: Led, form: Form) -> None:
    run_id = led.start("start")
    led.until(run_id, "running")
    led.until_step(run_id, COMPARED_STEPS)
    again = form.press("start")
    led.note("start while one runs", [again.status, json.loads(again.body)["data"]])
    led.command(run_id, "pause")
    led.until(run_id, "paused")
    led.command(run_id, "save", "paused")
    led.until_saved(run_id)
    led.until(run_id, "paused")
    led.command(run_id, "fly")
    _queue(led, form)
    done = led.until_step(run_id, 1)
    for values in ({"train.steps": 1}, {"train.steps": done + 30}, {"train.learning_rate": -1}):
        answer = led.server.ask("POST", f"/api/runs/{run_id}/change", {"values": values})
        led.note(f"change {sorted(values)}", [answer.status, body_of(led.side, answer)])
    led.ask("POST", f"/api/runs/{run_id}/delete", {}, name="delete a run that goes on")
    led.ask("GET", "/api/runs", name="runs while one is paused", unique=COUNTED)
    led.command(run_id, "resume", "paused")
    led.until(run_id, "finished")
    led.facts |= led.record(run_id)
    led.side.kept["finished"] = run_id
    _queue_runs(led)


def _queue(led: Led, form: Form) -> None:
    """Three runs are queued behind the one that is paused, and moved about."""
    for number in (1, 2, 3):
        form.filled(name=f"Queued {number}", train__steps=str(COMPARED_STEPS + number))
        answer = form.press("add-to-queue")
        led.note(f"queue {number}", [answer.status, json.loads(answer.body)["data"]])

    def rows() -> list[dict[str, Any]]:
        return led.server.json("GET", "/api/runs")["queue"]["rows"]

    ids = [row["id"] for row in rows()]
    for path, body in (
        (f"{ids[2]}/up", {}),
        (f"{ids[0]}/up", {}),
        (f"{ids[1]}/remove", {}),
        (f"{ids[1]}/remove", {}),
        (f"{ids[0]}/detached", {"detached": True}),
        (f"{ids[0]}/detached", {"detached": 5}),
    ):
        answer = led.server.ask("POST", f"/api/queue/{path}", body)
        led.note(
            f"queue: {path.partition('/')[2]}",
            [answer.status, without(json.loads(answer.body), {"id"})],
        )
    kept = json.loads((led.runs / "queue.json").read_text(encoding="utf-8"))
    led.note("the file of the queue", without(kept, {"id", "added"}))


def _queue_runs(led: Led) -> None:
    """The queue goes on by itself, with one run here and one in a process of its own."""

    def ended() -> list[dict[str, Any]]:
        rows = [
            row
            for row in led.server.json("GET", "/api/runs")["runs"]
            if row["name"].startswith("Queued")
        ]
        return rows if len(rows) == 2 and all(row["state"] in OVER for row in rows) else []

    for row in sorted(wait_for(ended, "the queue to end"), key=lambda row: row["name"]):
        led.facts |= led.record(row["id"])
        led.ask("GET", f"/api/runs/{row['id']}/details", name=f"details of {row['name']}")
        led.facts[f"printed by {row['name']}"] = [
            led.plain(line)
            for name in ("stdout.txt", "stderr.txt")
            for line in _lines(led.runs / row["id"] / name)
        ]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _stopped_and_resumed(led: Led, form: Form) -> None:
    form.filled(name="Stopped", train__steps=ENDLESS)
    run_id = led.start("start-detached")
    led.until(run_id, "running")
    led.until_step(run_id, COMPARED_STEPS)
    led.command(run_id, "save")
    led.until_saved(run_id)
    led.until(run_id, "running")
    led.command(run_id, "stop")
    led.until(run_id, "stopped")
    led.command(run_id, "stop")
    led.command(run_id, "pause")
    before = led.state(run_id)["bar"]["settings"]["done"]
    led.command(run_id, "resume", "stopped")
    led.until(run_id, "running")
    led.until_step(run_id, before + 5)
    led.command(run_id, "discard")
    led.until(run_id, "discarded")
    led.facts |= led.record(run_id)
    led.ask("POST", f"/api/runs/{run_id}/delete", {}, name="delete")
    led.facts["deleted"] = (led.runs / run_id).exists()


def _used(led: Led, place: Path) -> None:
    """A finished run is exported and chatted with."""
    run_id = led.side.kept["finished"]
    job = led.server.json("POST", f"/api/runs/{run_id}/export", {"folder": str(place / "exported")})
    led.note("export begins", without(job, COUNTED | {"text", "state"}))
    led.note("export ends", without(_ended(led, job["id"]), COUNTED))
    led.facts["exported"] = {
        path.name: digest(path.read_bytes())
        for path in sorted((place / "exported").iterdir())
        if path.name != "model.safetensors"
    }
    led.ask("POST", f"/api/jobs/{job['id']}/cancel", {}, unique=COUNTED, name="cancel what is over")
    again = led.server.json(
        "POST", f"/api/runs/{run_id}/export", {"folder": str(place / "exported")}
    )
    led.note("export to a folder that is full", without(_ended(led, again["id"]), COUNTED))
    choice = {"folder": str(place / "model")}
    led.ask("POST", "/api/chat/about", {"choice": choice}, name="chat: about")
    led.ask(
        "POST",
        "/api/chat/about",
        {"choice": {"run_id": run_id, "weights": "newest"}},
        name="chat: about a run",
    )
    for message, more in (
        ("say after two", {}),
        ("say after five", {"system": "say one", "temperature": 0.8, "seed": 3}),
    ):
        text = {
            "choice": choice,
            "message": message,
            "compare": False,
            "system": "",
            "max_new_tokens": 6,
        } | more
        answer = led.server.ask("POST", "/api/chat/send", text)
        led.note(f"say {message}", [answer.status, json.loads(answer.body)])
        wait_for(lambda: not led.server.json("GET", "/api/chat")["working"], "the answer")
        led.note(
            f"answer to {message}",
            without(led.server.json("GET", "/api/chat"), {"version", "job_id", "rate"}),
        )
    for path in ("new", "unload", "stop"):
        led.ask("POST", f"/api/chat/{path}", {}, name=f"chat: {path}", unique=COUNTED)
    led.ask("GET", "/api/chat", name="chat, at last", unique=COUNTED)


def _ended(led: Led, number: int) -> Any:
    """The job once it is over."""
    path = f"/api/jobs/{number}"
    wait_for(lambda: led.server.json("GET", path)["state"] != "working", f"job {number}")
    return led.server.json("GET", path)
