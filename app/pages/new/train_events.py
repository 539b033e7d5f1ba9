"""The events of the page for a new run, and their answers.

Some events never reach the server: a script in the page handles them. Names in capitals are
placeholders in such a script, which `_filled_in` replaces by values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any

import gradio as gr

from app.form.settings_form import as_labeled, shown_values
from app.pages.new.checker import Checker
from app.pages.new.faults import unforeseen
from app.pages.new.panels import TrainPanel
from app.pages.new.receipt import ordinal
from app.session.session import Session

# Fills the form with the draft of this tab, which `asked_first.js` has asked for.
OPEN = """async () => {
  const {choices, preset, about, shown, fills} = await window.ramstreamOpening;
  const update = (props) => ({__type__: 'update', ...props});
  return [...FIELDS.map((name) => update(fills && {value: shown[name]})), \
update({...(choices && {choices}), ...(fills && {value: preset})}), \
update(about !== undefined && {value: {about}})];
}"""
# Marks that the form holds the draft from now on; what it held before does not count.
OPENED = "() => { window.ramstreamOpened = true; }"
# Passes the form to `train.js`, with the values that Gradio would send, including those of boxes
# that it has not made yet. A backslash at the end of a line joins it to the next one.
ASK = """(preset, ...values) => {
  if (!window.ramstreamOpened) return;
  (window.ramstreamForms ??= []).push({preset, settled: SETTLED, \
shown: Object.fromEntries(FIELDS.map((name, index) => [name, values[index]]))});
}"""
# Tells `train.js` that a preset was chosen, whose settings will follow.
CHOOSING = "() => { window.ramstreamForms?.choosing?.(); }"
# Fills the form with a whole draft: the one that was replaced, or the one it has at first.
DRAFT = """() => {
  const {preset, about, shown} = window.ramstreamDraft;
  return [{__type__: 'update', value: preset}, {about}, ...FIELDS.map((name) => shown[name])];
}"""
# Shows what a fit panel allows: Start, or in its place Add to queue while another run trains.
OFFER = """({can_start, can_queue, queue_text}) => [
  {__type__: 'update', interactive: can_start, visible: !can_queue},
  {__type__: 'update', value: queue_text, visible: Boolean(can_queue)}]"""
# Fills the form with what a person chose in a place of ours, such as columns, files or a model.
MAP = """() => {
  const changes = window.ramstreamChanges ?? {};
  window.ramstreamChanges = {};
  return FIELDS.map((name) => changes[name]);
}"""

QUIET: dict[str, Any] = {
    "show_progress": "hidden",
    "show_progress_on": [],
    "api_visibility": "private",
}
AT_ONCE: dict[str, Any] = {"queue": False, "concurrency_limit": None, **QUIET}


def in_page(script: str, inputs: Any, outputs: Any = None) -> dict[str, Any]:
    """Returns the arguments of an event that `script` handles in the page, without the server."""
    return {"fn": None, "inputs": inputs, "outputs": outputs, "js": script, **QUIET}


def _filled_in(script: str, values: Mapping[str, Any]) -> str:
    """Returns `script` with its placeholders replaced by these values."""
    for name, value in values.items():
        script = script.replace(name, json.dumps(value))
    return script


@dataclass(frozen=True)
class PageParts:
    """Parts of the page that the events of a new run connect."""

    panel: TrainPanel
    bar: gr.HTML


class TrainEvents:
    """Connects the form to its checker, and Start to the session."""

    def __init__(self, session: Session, checker: Checker, parts: PageParts):
        self._session = session
        self._checker = checker
        self._presets = checker.presets
        self._panel = parts.panel
        self._bar = parts.bar
        self._names = list(parts.panel.fields)
        self._fields = list(parts.panel.fields.values())
        form = [parts.panel.preset, *self._fields]
        ask = _filled_in(ASK, {"FIELDS": self._names})
        self._ask = in_page(_filled_in(ask, {"SETTLED": False}), form)
        self._ask_settled = in_page(_filled_in(ask, {"SETTLED": True}), form)
        """The same behind what was filled into the form, which then has it."""
        self._inputs: set[Any] = {*self._fields, parts.panel.preset}
        self._numbers = count()
        self._newest: dict[str | None, int] = {}  # of the previews under way, by page
        self._previewed: dict[str, Any] = {
            "inputs": self._inputs,
            "outputs": parts.panel.preview,
            "trigger_mode": "always_last",
            **QUIET,
        }

    def connect(self, page: gr.Blocks) -> None:
        """Connects all events. It is called once, inside the page's context."""
        self._ask_for_checks()
        self._show_data()
        self._take_presets()
        self._take_choices()
        self._open_with_the_draft(page)
        self._start_and_queue()
        self._offer_start()

    # ------------------------------------------------------------------ which event asks for what

    def _ask_for_checks(self) -> None:
        # `train.js` handles text boxes: it triggers `fit.input` when typing in one pauses.
        # Gradio's own events of a text box are not suitable: `.change` fires once per box while a
        # preset fills the form, and `.input` misses pasted text.
        chosen = [field.input for field in self._fields if not isinstance(field, gr.Textbox)]
        gr.on([self._panel.fit.input, self._bar.change, *chosen], **self._ask)

    def _show_data(self) -> None:
        fields = self._panel.fields
        columns = [field.blur for name, field in fields.items() if name.startswith("data.columns.")]
        shows_data = [
            # `train.js` triggers this when the form is first shown: who opens another page needs
            # no preview.
            self._panel.preview.submit,
            fields["data.format"].input,
            fields["data.train_on"].input,
            fields["train.objective"].input,
            fields["data.split"].blur,
            fields["data.max_seq_len"].blur,
            fields["data.roles"].blur,
            fields["data.unused_flags"].blur,
            # A name on the hub is looked up when it is complete, not at each letter.
            fields["model.source"].submit,
            fields["model.source"].blur,
            fields["data.source"].submit,
            fields["data.source"].blur,
            *columns,
        ]
        gr.on(shows_data, self.preview, **self._previewed)

    def _take_presets(self) -> None:
        panel = self._panel
        # Not `.input`: Gradio sends that too when the list loses the focus, and the preset would
        # take the place of what a person has typed.
        panel.preset.select(**in_page(CHOOSING, None))
        loaded = panel.preset.select(
            self.load_preset, panel.preset, [*self._fields, panel.about], **QUIET
        )
        loaded.then(**self._ask_settled).then(self.preview, **self._previewed)
        # `replaced.js` triggers this.
        draft = _filled_in(DRAFT, {"FIELDS": self._names})
        filled = panel.about.input(
            **in_page(draft, None, [panel.preset, panel.about, *self._fields])
        )
        filled.then(**self._ask_settled).then(self.preview, **self._previewed)
        # `settings_tools.js` triggers this when a preset was saved or deleted.
        panel.tools.submit(
            self.list_presets, panel.tools, [panel.preset, panel.about], **QUIET
        ).then(**self._ask)

    def _take_choices(self) -> None:
        """Turns the columns and the files that a person chose into settings."""
        fill = in_page(_filled_in(MAP, {"FIELDS": self._names}), None, [*self._fields])
        for place in (self._panel.preview, self._panel.files):
            filled = place.input(**fill, trigger_mode="multiple")
            filled.then(**self._ask_settled).then(self.preview, **self._previewed)

    def _open_with_the_draft(self, page: gr.Blocks) -> None:
        panel = self._panel
        outputs = [*self._fields, panel.preset, panel.about]
        script = _filled_in(OPEN, {"FIELDS": self._names})
        opened = page.load(**in_page(script, None, outputs))
        opened.then(**in_page(OPENED, None)).then(**self._ask)

    def _start_and_queue(self) -> None:
        panel = self._panel
        outputs = [self._bar, panel.why_not]
        given = {*self._inputs, panel.detached}
        panel.start.click(self.start, given, outputs, **AT_ONCE)
        panel.queue.click(self.enqueue, given, panel.queued, **AT_ONCE)

    def _offer_start(self) -> None:
        """Shows the button that the fit panel allows."""
        panel = self._panel
        panel.fit.change(**in_page(OFFER, panel.fit, [panel.start, panel.queue]))

    # ------------------------------------------------------------------ what an event answers

    def preview(self, values: dict[Any, Any], request: gr.Request) -> Iterator[dict[str, Any]]:
        """Reads the first rows of the data. Previews of one page are computed at the same time, and
        only the answer to its newest request is shown.
        """
        number = next(self._numbers)
        self._newest[request.session_hash] = number
        try:
            yield {"pending": True}
            answer = self._checker.preview(self._shown_in(values))
            is_newest = self._newest.get(request.session_hash) == number
            yield answer if is_newest else gr.skip()
        finally:
            if self._newest.get(request.session_hash) == number:
                del self._newest[request.session_hash]

    def load_preset(self, file: str | None) -> dict[Any, Any]:
        about = self._panel.about
        if file is None:
            return {about: gr.skip()}
        preset = self._presets.get(file)
        if preset is None:
            return {about: {"about": "This preset was deleted."}}
        shown = self._filled(shown_values(preset.config)) if preset.config is not None else {}
        return shown | {about: {"about": preset.about}}

    def list_presets(self, file: str) -> dict[Any, Any]:
        """Lists the presets anew, and chooses the one whose settings the form shows already."""
        panel, chosen = self._panel, self._presets.get(file)
        choices = [(each.label, each.file) for each in self._presets.listed().values()]
        about = chosen.about if chosen is not None else ""
        return {
            panel.preset: gr.update(choices=choices, value=file if chosen is not None else None),
            panel.about: {"about": about},
        }

    def start(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Starts the form's run, in a process of its own where that was chosen."""
        session, panel = self._session, self._panel
        begin = session.start_detached if values[panel.detached] else session.start
        try:
            run_id = begin(self._checker.read_trainable(self._shown_in(values)))
        except Exception as error:  # noqa: BLE001  the page shows any fault of the program
            return {panel.why_not: {"why_not": as_labeled(unforeseen(error))}}
        return {self._bar: {"open": run_id}}

    def enqueue(self, values: dict[Any, Any]) -> dict[Any, Any]:
        """Puts the form's run into the queue."""
        queue, panel = self._session.queue, self._panel
        try:
            config = self._checker.read_trainable(self._shown_in(values))
            place = queue.add(config, detached=bool(values[panel.detached]))
        except Exception as error:  # noqa: BLE001  the page shows any fault of the program
            return {panel.queued: {"queued": as_labeled(unforeseen(error))}}
        held = " The queue is held until you continue it." if queue.is_held else ""
        text = f"Queued, {ordinal(place)} in line.{held}"
        return {panel.queued: {"queued": text, "is_queued": True}}

    def _shown_in(self, values: dict[Any, Any]) -> dict[str, Any]:
        """Converts component values from Gradio, by component, to values by dotted name."""
        return {name: values[component] for name, component in self._panel.fields.items()}

    def _filled(self, shown: dict[str, Any]) -> dict[Any, Any]:
        """Converts component values by dotted name to values by component, as Gradio takes them."""
        return {component: shown[name] for name, component in self._panel.fields.items()}
