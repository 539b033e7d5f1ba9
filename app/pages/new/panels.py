"""The form of a new run and what is beside it, as components of Gradio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.form.adapter_labels import method_of
from app.form.presets import Preset
from app.form.settings_form import (
    CHOICE_LABELS,
    PROMINENT,
    SECTION_TITLES,
    SHORT_HELP,
    Setting,
    settings,
    shown_values,
)
from app.pages.new.fit_panel import SUGGESTIONS_SHOWN
from app.pages.new.known_models import known_models
from app.shared.template import drawn

# ------------------------------------------------------------------ the page New


@dataclass(frozen=True)
class TrainPanel:
    """Components of the page New."""

    preset: gr.Dropdown
    about: gr.HTML
    fields: dict[str, Any]
    """Components of the settings by dotted name. They are `Any` because Gradio adds the events of a
    component at run time.
    """
    files: gr.HTML
    """Where a person uploads files, and chooses among those of the server."""
    preview: gr.HTML
    fit: gr.HTML
    suggestions: list[gr.Button]
    start: gr.Button
    queue: gr.Button
    detached: gr.Checkbox
    """Whether the run gets a process of its own, which outlives this program."""
    queued: gr.HTML
    why_not: gr.HTML
    tools: gr.HTML


def train_panel(presets: dict[str, Preset], has_folders: bool = False) -> TrainPanel:
    """Lays out the form, filled with the first preset, on the left, and the fit panel with the
    Start button on the right. has_folders: there are folders of the server to browse for data.
    """
    first = next(iter(presets.values()), None)
    values = shown_values(first.config) if first is not None and first.config is not None else {}
    form = _Form(values)
    with gr.Row(elem_classes="rs-train"):
        with gr.Column(scale=7, min_width=440):
            with gr.Column(elem_classes="rs-card"):
                form.name()
                preset = gr.Dropdown(
                    [(each.label, each.file) for each in presets.values()],
                    label="Start from a preset",
                    value=first.file if first is not None else None,
                    elem_id="preset",
                )
                about = drawn("about", {"about": first.about if first is not None else ""})
            form.model_card()
            files, preview = form.data_card(has_folders)
            form.run_length_card()
            tools = form.other_settings()
        with (
            gr.Column(scale=4, min_width=320, elem_classes="rs-side"),
            gr.Column(elem_classes="rs-card"),
        ):
            fit = drawn("fit_panel", {"models": known_models()})
            suggestions = [
                gr.Button(visible=False, size="sm", elem_classes="rs-suggestion")
                for _ in range(SUGGESTIONS_SHOWN)
            ]
            with gr.Column(elem_classes="rs-go"):
                start = gr.Button(
                    "Start training",
                    variant="primary",
                    size="lg",
                    interactive=False,
                    elem_id="start",
                )
                queue = gr.Button(
                    "Add to queue",
                    variant="primary",
                    size="lg",
                    visible=False,
                    elem_id="add-to-queue",
                )
                why_not = drawn("why_not", {})
                queued = drawn("queued", {})
                detached = gr.Checkbox(
                    label="Keep training if I close Ramstream", elem_id="detached"
                )
    return TrainPanel(
        preset=preset,
        about=about,
        fields=form.fields,
        files=files,
        preview=preview,
        fit=fit,
        suggestions=suggestions,
        start=start,
        queue=queue,
        detached=detached,
        queued=queued,
        why_not=why_not,
        tools=tools,
    )


class _Form:
    """Lays out the settings, card by card; `fields` holds the components made so far."""

    def __init__(self, values: dict[str, Any]):
        self.fields: dict[str, Any] = {}
        self._values = values
        self._settings = {setting.dotted: setting for setting in settings()}

    def name(self) -> None:
        """Lays out the name of the run."""
        self._place("name", min_width=220)

    def model_card(self) -> None:
        """Lays out the settings of the model."""
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(1, "Model", "what to train"))
            with gr.Row():
                self._place("model.source", min_width=220, scale=5)
                self._place("model.dtype", min_width=160, scale=3)

    def data_card(self, has_folders: bool) -> tuple[gr.HTML, gr.HTML]:
        """Lays out the settings of the data, and returns what is below them: the person's files and
        the preview.
        """
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(2, "Data", "what to learn from"))
            with gr.Row():
                self._place("data.source", min_width=220, scale=5)
                self._place("data.max_seq_len", min_width=160, scale=3)
            return drawn("files", {"has_folders": has_folders}), drawn("preview", {})

    def run_length_card(self) -> None:
        """Lays out the settings for the length and the speed of training."""
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(3, "Run length", "how long and how fast to learn"))
            with gr.Row():
                for name in ("steps", "epochs", "batch_size", "learning_rate"):
                    self._place(f"train.{name}", min_width=120)
            drawn("run_length", {})

    def other_settings(self) -> gr.HTML:
        """Lays out all other settings, folded away, section by section; returns what finds and
        keeps settings, above them.
        """
        with gr.Accordion("Advanced settings", open=False, elem_classes="rs-card rs-rest"):
            tools = drawn("settings_tools", "")
            for section, title in SECTION_TITLES.items():
                gr.HTML(f"<h4>{title}</h4>", apply_default_css=False)
                with gr.Row(elem_classes="rs-settings"):
                    for name, setting in self._settings.items():
                        if setting.section == section and name not in PROMINENT:
                            self._place(name, min_width=200)
        return tools

    def _place(self, name: str, min_width: int, scale: int = 1) -> None:
        """Adds the component of a setting in a column of its own."""
        with gr.Column(scale=scale, min_width=min_width):
            self.fields[name] = component(self._settings[name], self._values.get(name))


def component(setting: Setting, shown: Any = None) -> gr.components.Component:
    """Returns a new component for a setting that shows the component value `shown`."""
    common = {"value": shown, "label": setting.label, "elem_id": setting.elem_id}
    method = method_of(setting.dotted)
    if method:
        common["elem_classes"] = f"rs-with-{method}"
    if setting.kind == "switch":
        return gr.Checkbox(info=setting.help, **common)
    common["info"] = SHORT_HELP.get(setting.dotted, setting.help)
    if setting.kind == "choice":
        labels = CHOICE_LABELS.get(setting.dotted, {})
        return gr.Dropdown(
            [(labels.get(choice, choice), choice) for choice in setting.choices], **common
        )
    if setting.kind == "lines":
        return gr.Textbox(lines=2, max_lines=8, placeholder="none", **common)
    return gr.Textbox(max_lines=1, placeholder=setting.empty_means, **common)


def _step(number: int, title: str, what: str) -> str:
    """Returns the heading of a card."""
    return f'<h3 class="rs-step"><b>{number}</b>{title} <span>{what}</span></h3>'
