"""What the Train tab does: what each of its events answers, and which event asks for what."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import gradio as gr

from app.form.presets import Preset
from app.form.settings_form import as_labelled, read_config, shown_values
from app.pages.checker import REMEDIES_SHOWN, Checker
from app.pages.panels import TrainPanel
from app.session.session import Session
from engine.config.settings import TrainConfig
from engine.errors import RamstreamError

# the draft is in the form: what was there before is nobody's
OPENED = "() => { window.ramstreamOpened = true; }"
# What the page does by itself, with the values that Gradio would send: those of boxes that it has
# not made yet too.
ASK = """(preset, ...values) => {
  if (!window.ramstreamOpened) return;
  (window.ramstreamForms ??= []).push({preset, shown: Object.fromEntries(FIELDS.map((name, index) => [name, values[index]]))});
}"""
OFFER = """({can_start, can_queue, remedies}) => [...[1, 2].map(() => ({__type__: 'update', interactive: can_start})),
  {__type__: 'update', visible: Boolean(can_queue)}, ...SLOTS.map((number) => (
  {__type__: 'update', value: remedies[number]?.text ?? '', visible: number in remedies}))]"""
# of the columns that were chosen in the preview
MAP = "({changes}) => FIELDS.map((name) => changes[name])"
# what is undefined stays as it is
APPLY = "({remedies}) => FIELDS.map((name) => remedies[NUMBER]?.changes[name])"

QUIET = {"show_progress": "hidden", "api_visibility": "private"}
AT_ONCE = {"queue": False, "concurrency_limit": None, **QUIET}


def in_page(js: str, inputs: Any, outputs: Any = None, **names: Any) -> dict[str, Any]:
    """An event that never reaches the server; `names` stand in its script for their values."""
    for name, value in names.items():
        js = js.replace(name, json.dumps(value))
    return {"fn": None, "inputs": inputs, "outputs": outputs, "js": js, **QUIET}


class TrainEvents:
    """Connects the form to its checker, and Start to the session."""

    def __init__(
        self,
        session: Session,
        checker: Checker,
        presets: dict[str, Preset],
        panel: TrainPanel,
        bar: gr.HTML,
        tabs: gr.Tabs,
    ):
        self._session, self._checker, self._presets = session, checker, presets
        self._panel, self._bar, self._tabs = panel, bar, tabs
        self._ask = in_page(ASK, [panel.preset, *panel.fields.values()], FIELDS=list(panel.fields))
        self._inputs = {*panel.fields.values(), panel.preset}
        self._previewed = {
            "inputs": self._inputs,
            "outputs": panel.preview,
            "trigger_mode": "always_last",
            **QUIET,
        }

    def connect(self, page: gr.Blocks) -> None:
        """Inside of the page's context, once."""
        self._ask_for_verdicts()
        self._show_data()
        self._take_presets()
        self._take_columns()
        self._open_with_the_draft(page)
        self._start_and_queue()
        self._offer_remedies()

    # ------------------------------------------------------------------ which event asks for what

    def _ask_for_verdicts(self) -> None:
        panel = self._panel
        chosen = [
            component.input
            for component in panel.fields.values()
            if not isinstance(component, gr.Textbox)
        ]
        # `verdict.input` is triggered by train.js when typing in a box pauses. Gradio's own events
        # would not do: `.change` fires once a box while a preset fills the form, `.input` misses
        # what is pasted.
        gr.on([panel.verdict.input, self._bar.change, *chosen], **self._ask)

    def _show_data(self) -> None:
        fields = self._panel.fields
        # A name of the hub is looked up when it is complete, not at each letter.
        entered = [
            event
            for dotted in ("model.source", "data.source")
            for event in (fields[dotted].submit, fields[dotted].blur)
        ]
        columns = [
            component.blur
            for dotted, component in fields.items()
            if dotted.startswith("data.columns.")
        ]
        # `preview.submit` is triggered by train.js when the form is looked at first: a page on
        # another tab needs no preview.
        shows_data = [
            self._panel.preview.submit,
            fields["data.format"].input,
            fields["data.train_on"].input,
            fields["data.split"].blur,
            fields["data.max_seq_len"].blur,
            *entered,
            *columns,
        ]
        gr.on(shows_data, self.preview, **self._previewed)

    def _take_presets(self) -> None:
        panel = self._panel
        panel.preset.input(
            self.load_preset, panel.preset, [*panel.fields.values(), panel.about], **QUIET
        ).then(**self._ask).then(self.preview, **self._previewed)

    def _take_columns(self) -> None:
        """Those that a person has chosen in the preview become settings."""
        panel = self._panel
        panel.preview.input(
            **in_page(MAP, panel.preview, [*panel.fields.values()], FIELDS=list(panel.fields))
        ).then(**self._ask).then(self.preview, **self._previewed)

    def _open_with_the_draft(self, page: gr.Blocks) -> None:
        panel = self._panel
        page.load(
            self.open_page, None, [*panel.fields.values(), panel.preset, panel.about], **QUIET
        ).then(**in_page(OPENED, None)).then(**self._ask)

    def _start_and_queue(self) -> None:
        panel, said = self._panel, [self._bar, self._tabs, self._panel.why_not]
        panel.start.click(self._starting(self._session.start), self._inputs, said, **AT_ONCE)
        panel.detached.click(
            self._starting(self._session.start_detached), self._inputs, said, **AT_ONCE
        )
        panel.queue.click(self.enqueue, self._inputs, panel.queued, **AT_ONCE)

    def _offer_remedies(self) -> None:
        """What the verdict allows can be pressed, and each remedy changes the form."""
        panel = self._panel
        offered = [panel.start, panel.detached, panel.queue, *panel.remedies]
        panel.verdict.change(
            **in_page(OFFER, panel.verdict, offered, SLOTS=list(range(REMEDIES_SHOWN)))
        )
        for number, button in enumerate(panel.remedies):
            button.click(
                **in_page(
                    APPLY,
                    panel.verdict,
                    [*panel.fields.values()],
                    FIELDS=list(panel.fields),
                    NUMBER=number,
                )
            ).then(**self._ask)

    # ------------------------------------------------------------------ what an event answers

    def preview(self, values: dict[Any, Any]) -> Iterator[dict[str, Any]]:
        yield {"pending": True}
        yield self._checker.preview(self._shown_in(values))

    def load_preset(self, file: str | None) -> dict[Any, Any]:
        about = self._panel.about
        if file is None:
            return {about: gr.skip()}
        preset = self._presets[file]
        shown = self._filled(shown_values(preset.config)) if preset.config is not None else {}
        return shown | {about: {"about": preset.about}}

    def open_page(self) -> dict[Any, Any]:
        panel = self._panel
        updates: dict[Any, Any] = {panel.about: gr.skip()}  # Gradio takes no empty answer
        file, shown = self._checker.draft.recall() or (None, None)
        if file in self._presets:
            updates = {panel.preset: file, panel.about: {"about": self._presets[file].about}}
        elif shown is not None:  # the settings of a run: no preset's
            updates = {panel.preset: None, panel.about: {"about": ""}}
        return updates | (self._filled(shown) if shown is not None else {})

    def _starting(
        self, begin: Callable[[TrainConfig], str]
    ) -> Callable[[dict[Any, Any]], dict[Any, Any]]:
        def start(values: dict[Any, Any]) -> dict[Any, Any]:
            try:
                run_id = begin(read_config(self._shown_in(values)))
            except RamstreamError as error:
                return {self._panel.why_not: {"why_not": as_labelled(str(error))}}
            return {self._bar: {"open": run_id}, self._tabs: gr.Tabs(selected="live")}

        return start

    def enqueue(self, values: dict[Any, Any]) -> dict[Any, Any]:
        queue, queued = self._session.queue, self._panel.queued
        try:
            place = queue.add(read_config(self._shown_in(values)))
        except RamstreamError as error:
            return {queued: {"queued": as_labelled(str(error))}}
        then = "it is held until you continue it in Runs" if queue.is_held else "Runs shows it"
        return {queued: {"queued": f"Number {place} in the queue now; {then}."}}

    def _shown_in(self, values: dict[Any, Any]) -> dict[str, Any]:
        return {dotted: values[component] for dotted, component in self._panel.fields.items()}

    def _filled(self, shown: dict[str, Any]) -> dict[Any, Any]:
        return {component: shown[dotted] for dotted, component in self._panel.fields.items()}
