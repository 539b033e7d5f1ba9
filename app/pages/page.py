"""The page: its tabs and what its components do."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from app.form.presets import FIRST_PRESET, read_presets
from app.form.settings_form import as_labelled, read_config, shown_values
from app.pages.checker import REMEDIES_SHOWN, Checker
from app.pages.known_models import machine_words
from app.pages.panels import TrainPanel, drawn, train_panel
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError
from engine.machine.read_machine import read_machine


def build_page(session: Session, checker: Checker) -> gr.Blocks:
    """The page. Gradio carries the form; what moves is drawn by `app/browser/main.js` from our own routes."""
    presets = read_presets()
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # each component looks at it when it is made
    with gr.Blocks(title="Ramstream", analytics_enabled=False, fill_width=True) as page:
        machine = machine_words(read_machine(session.runs_dir))
        drawn("header", {"machine": machine})
        bar = drawn("run_bar", {})
        drawn("jobs", {})
        with gr.Tabs(elem_id="rs-tabs") as tabs:
            with gr.Tab("Train", id="train", elem_id="rs-tab-train"):
                drawn("intro", {"machine": machine, "starter": FIRST_PRESET})
                panel = train_panel(presets)
            with gr.Tab("Live", id="live", elem_id="rs-tab-live"):
                drawn("live")
            with gr.Tab("Runs", id="runs", elem_id="rs-tab-runs"):
                drawn("runs")
            with gr.Tab("Talk", id="talk", elem_id="rs-tab-talk"):
                drawn("talk")
            with gr.Tab("Hardware", id="hardware", elem_id="rs-tab-hardware"):
                drawn("hardware")
        _wire(page, session, checker, presets, panel, bar, tabs)
    return page


OPENED = "() => { window.ramstreamOpened = true; }"  # the draft is in the form: what was there before is nobody's
# What the page does by itself, with the values that Gradio would send: those of boxes that it has not made yet too.
ASK = """(preset, ...values) => {
  if (!window.ramstreamOpened) return;
  (window.ramstreamForms ??= []).push({preset, shown: Object.fromEntries(FIELDS.map((name, index) => [name, values[index]]))});
}"""
OFFER = """({can_start, can_queue, remedies}) => [...[1, 2].map(() => ({__type__: 'update', interactive: can_start})),
  {__type__: 'update', visible: Boolean(can_queue)}, ...SLOTS.map((number) => (
  {__type__: 'update', value: remedies[number]?.text ?? '', visible: number in remedies}))]"""
MAP = "({changes}) => FIELDS.map((name) => changes[name])"  # of the columns that were chosen in the preview
APPLY = "({remedies}) => FIELDS.map((name) => remedies[NUMBER]?.changes[name])"  # what is undefined stays as it is


def _wire(page: gr.Blocks, session: Session, checker: Checker, presets: dict[str, Any], panel: TrainPanel, bar: gr.HTML,
          tabs: gr.Tabs) -> None:
    """Connect the form to its checker and Start to the session."""
    fields = panel.fields
    inputs = {*fields.values(), panel.preset}
    quiet = {"show_progress": "hidden", "api_visibility": "private"}

    def shown_in(values: dict[Any, Any]) -> dict[str, Any]:
        return {dotted: values[component] for dotted, component in fields.items()}

    def filled(shown: dict[str, Any]) -> dict[Any, Any]:
        return {component: shown[dotted] for dotted, component in fields.items()}

    def preview(values: dict[Any, Any]) -> Iterator[dict[str, Any]]:
        yield {"pending": True}
        yield checker.preview(shown_in(values))

    def load_preset(file: str | None) -> dict[Any, Any]:
        if file is None:
            return {panel.about: gr.skip()}
        preset = presets[file]
        shown = filled(shown_values(preset.config)) if preset.config is not None else {}
        return shown | {panel.about: {"about": preset.about}}

    def open_page() -> dict[Any, Any]:
        updates: dict[Any, Any] = {panel.about: gr.skip()}  # Gradio takes no empty answer
        file, shown = checker.draft.recall() or (None, None)
        if file in presets:
            updates = {panel.preset: file, panel.about: {"about": presets[file].about}}
        elif shown is not None:  # the settings of a run: no preset's
            updates = {panel.preset: None, panel.about: {"about": ""}}
        return updates | (filled(shown) if shown is not None else {})

    def starting(begin: Callable[[TrainConfig], str]) -> Callable[[dict[Any, Any]], dict[Any, Any]]:
        def start(values: dict[Any, Any]) -> dict[Any, Any]:
            try:
                run_id = begin(read_config(shown_in(values)))
            except RamstreamError as error:
                return {panel.why_not: {"why_not": as_labelled(str(error))}}
            return {bar: {"open": run_id}, tabs: gr.Tabs(selected="live")}

        return start

    def enqueue(values: dict[Any, Any]) -> dict[Any, Any]:
        try:
            place = session.queue.add(read_config(shown_in(values)))
        except RamstreamError as error:
            return {panel.queued: {"queued": as_labelled(str(error))}}
        then = "it is held until you continue it in Runs" if session.queue.is_held else "Runs shows it"
        return {panel.queued: {"queued": f"Number {place} in the queue now; {then}."}}

    def in_page(js: str, inputs: Any, outputs: Any = None, **names: Any) -> dict[str, Any]:
        """An event that never reaches the server; `names` stand in its script for their values."""
        for name, value in names.items():
            js = js.replace(name, json.dumps(value))
        return {"fn": None, "inputs": inputs, "outputs": outputs, "js": js, **quiet}

    ask = in_page(ASK, [panel.preset, *fields.values()], FIELDS=list(fields))
    previewed = {"inputs": inputs, "outputs": panel.preview, "trigger_mode": "always_last", **quiet}
    chosen = [component.input for component in fields.values() if not isinstance(component, gr.Textbox)]
    # `verdict.input` is triggered by train.js when typing in a box pauses. Gradio's own events would not do: `.change` fires
    # once a box while a preset fills the form, `.input` misses what is pasted.
    gr.on([panel.verdict.input, bar.change, *chosen], **ask)
    # A name of the hub is looked up when it is complete, not at each letter.
    entered = [event for dotted in ("model.source", "data.source") for event in (fields[dotted].submit, fields[dotted].blur)]
    columns = [component.blur for dotted, component in fields.items() if dotted.startswith("data.columns.")]
    # `preview.submit` is triggered by train.js when the form is looked at first: a page on another tab needs no preview.
    shows_data = [panel.preview.submit, fields["data.format"].input, fields["data.train_on"].input, fields["data.split"].blur,
                  fields["data.max_seq_len"].blur, *entered, *columns]
    gr.on(shows_data, preview, **previewed)
    panel.preset.input(load_preset, panel.preset, [*fields.values(), panel.about], **quiet).then(
        **ask).then(preview, **previewed)
    panel.preview.input(**in_page(MAP, panel.preview, [*fields.values()], FIELDS=list(fields))).then(
        **ask).then(preview, **previewed)
    page.load(open_page, None, [*fields.values(), panel.preset, panel.about], **quiet).then(
        **in_page(OPENED, None)).then(**ask)
    at_once = {"queue": False, "concurrency_limit": None, **quiet}
    panel.start.click(starting(session.start), inputs, [bar, tabs, panel.why_not], **at_once)
    panel.detached.click(starting(session.start_detached), inputs, [bar, tabs, panel.why_not], **at_once)
    panel.queue.click(enqueue, inputs, panel.queued, **at_once)
    offered = [panel.start, panel.detached, panel.queue, *panel.remedies]
    panel.verdict.change(**in_page(OFFER, panel.verdict, offered, SLOTS=list(range(REMEDIES_SHOWN))))
    for number, button in enumerate(panel.remedies):
        button.click(**in_page(APPLY, panel.verdict, [*fields.values()], FIELDS=list(fields), NUMBER=number)).then(**ask)
