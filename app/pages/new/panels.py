"""The form of a new run and what is beside it, as components of Gradio."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import gradio as gr

from app.form.adapter_labels import method_of
from app.form.presets import Preset
from app.form.settings_form import (
    CHOICE_LABELS,
    FIRST,
    PROMINENT,
    SECTION_TITLES,
    SHORT_HELP,
    Setting,
    settings,
    shown_values,
)
from app.pages.new.known_models import known_models
from app.shared.template import drawn

PLACEHOLDERS = {
    "data.source": "A file, a folder, or a data set on Hugging Face",
    "model.source": "Search the known models, or give a folder or a Hugging Face id",
}

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
            with gr.Column(elem_classes="rs-card rs-slim"):
                with gr.Row():
                    with gr.Column(min_width=220):
                        preset = gr.Dropdown(
                            [(each.label, each.file) for each in presets.values()],
                            label="Start from a preset (type to search)",
                            value=first.file if first is not None else None,
                            elem_id="preset",
                        )
                    form.name()
                about = drawn("about", {"about": first.about if first is not None else ""})
            with gr.Column(elem_classes="rs-card"):
                gr.HTML(_step(1, "What should it learn?"))
                drawn("task", {})
            files, preview = form.data_card(has_folders)
            form.model_card()
            form.run_length_card()
            tools = form.other_settings()
        with (
            gr.Column(scale=4, min_width=320, elem_classes="rs-side"),
            gr.Column(elem_classes="rs-card"),
        ):
            fit = drawn("fit_panel", {"models": known_models()})
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
                drawn("copy_command", {})
    return TrainPanel(
        preset=preset,
        about=about,
        fields=form.fields,
        files=files,
        preview=preview,
        fit=fit,
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

    def data_card(self, has_folders: bool) -> tuple[gr.HTML, gr.HTML]:
        """Lays out the data source, and returns what is below it: the person's files and the
        preview.
        """
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(2, "Your data"))
            with gr.Row():
                self._place("data.source", min_width=220)
            return drawn("files", {"has_folders": has_folders}), drawn("preview", {})

    def model_card(self) -> None:
        """Lays out the model."""
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(3, "Model"))
            with gr.Row():
                self._place("model.source", min_width=220)
            drawn("models", {})

    def run_length_card(self) -> None:
        """Lays out the length of training. One of its two boxes is shown."""
        with gr.Column(elem_classes="rs-card"):
            gr.HTML(_step(4, "How long"))
            with gr.Row(elem_classes="rs-length"):
                for name in ("train.epochs", "train.steps"):
                    self._place(name, min_width=120)
                with gr.Column(min_width=220, scale=4):
                    drawn("run_length", {})

    def other_settings(self) -> gr.HTML:
        """Lays out all other settings, folded away, and each section folded once more; returns what
        finds and keeps settings, above them.
        """
        with gr.Accordion("Advanced settings", open=False, elem_classes="rs-card rs-rest"):
            tools = drawn("settings_tools", "")
            gr.HTML("<h4 class='rs-most-used'>Most used</h4>", apply_default_css=False)
            with gr.Row(elem_classes="rs-settings"):
                for name in FIRST:
                    self._place(name, min_width=160)
            shown_above = PROMINENT + FIRST
            for section, title in SECTION_TITLES.items():
                fold = (
                    f'<button type="button" class="rs-fold" aria-expanded="false">{title}</button>'
                )
                gr.HTML(f"<h4>{fold}</h4>", apply_default_css=False)
                with gr.Row(elem_classes="rs-settings rs-folded"):
                    for name, setting in self._settings.items():
                        if setting.section == section and name not in shown_above:
                            self._place(name, min_width=200)
        return tools

    def _place(self, name: str, min_width: int, scale: int = 1) -> None:
        """Adds the component of a setting in a column of its own."""
        with gr.Column(scale=scale, min_width=min_width):
            self.fields[name] = component(self._settings[name], self._values.get(name))


def component(setting: Setting, shown: Any = None) -> gr.components.Component:
    """Returns a new component for a setting that shows the component value `shown`."""
    common = {"value": shown, "label": setting.label, "elem_id": setting.elem_id}
    method = "preferences" if setting.section == "preference" else method_of(setting.dotted)
    if method:
        common["elem_classes"] = f"rs-with-{method}"
    if setting.kind == "switch":
        return gr.Checkbox(info=setting.help, **common)
    if setting.dotted not in PROMINENT:
        common["info"] = SHORT_HELP.get(setting.dotted, setting.help)
    if setting.kind == "choice":
        labels = CHOICE_LABELS.get(setting.dotted, {})
        return gr.Dropdown(
            [(labels.get(choice, choice), choice) for choice in setting.choices], **common
        )
    if setting.kind == "lines":
        return gr.Textbox(lines=2, max_lines=8, placeholder="none", **common)
    placeholder = PLACEHOLDERS.get(setting.dotted, setting.empty_means)
    return gr.Textbox(max_lines=1, placeholder=placeholder, **common)


def _step(number: int, title: str) -> str:
    """Returns the heading of a card."""
    return f'<h3 class="rs-step"><b>{number}</b>{title}</h3>'
