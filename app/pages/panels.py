"""What stands where on the page. Everything that moves is drawn by our own scripts into constant
templates; their data never pass through a template, so that no name or text can become markup.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gradio as gr

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
from app.pages.checker import REMEDIES_SHOWN
from app.pages.known_models import known_models

TEMPLATES = Path(__file__).parent.parent / "browser" / "templates"
DETACHED_HINT = (
    '<p class="rs-hint">In a process of its own, which goes on when Ramstream itself is closed.</p>'
)


def drawn(name: str, value: Any = None) -> gr.HTML:
    """A place that `main.js` draws into: the template `app/browser/templates/<name>.html`, with
    `value` as its data.
    """
    template = (TEMPLATES / f"{name}.html").read_text(encoding="utf-8")
    mount = (
        f"(window.ramstreamPlaces ??= []).push({{name: '{name}', element, props, trigger, watch}})"
    )
    return gr.HTML(
        value,
        html_template=template,
        js_on_load=mount,
        apply_default_css=False,
        elem_id=f"rs-{name}",
    )


# ------------------------------------------------------------------ the Train tab


@dataclass(frozen=True)
class TrainPanel:
    """Components of the Train tab; `fields` by dotted name."""

    preset: gr.Dropdown
    about: gr.HTML
    fields: dict[str, gr.components.Component]
    preview: gr.HTML
    verdict: gr.HTML
    remedies: list[gr.Button]
    start: gr.Button
    detached: gr.Button
    queue: gr.Button
    queued: gr.HTML
    why_not: gr.HTML


def train_panel(presets: dict[str, Preset]) -> TrainPanel:
    """Lay out the form, filled with the first preset, on the left and the verdict with Start on the
    right.
    """
    by_name = {setting.dotted: setting for setting in settings()}
    first = next(iter(presets.values()), None)
    values = shown_values(first.config) if first is not None and first.config is not None else {}
    fields: dict[str, gr.components.Component] = {}

    def place(*names: str) -> None:
        for name in names:
            fields[name] = component(by_name[name], values.get(name))

    with gr.Row(elem_classes="rs-train"):
        with gr.Column(scale=7, min_width=440):
            with gr.Column(elem_classes="rs-card"):
                preset = gr.Dropdown(
                    [(p.name, p.file) for p in presets.values()],
                    label="Start from a preset",
                    value=first.file if first is not None else None,
                    elem_id="preset",
                )
                about = drawn("about", {"about": first.about if first is not None else ""})
            with gr.Column(elem_classes="rs-card"):
                gr.HTML(_step(1, "Model", "what to train"))
                with gr.Row():
                    with gr.Column(scale=5, min_width=220):
                        place("model.source")
                    with gr.Column(scale=3, min_width=160):
                        place("model.dtype")
            with gr.Column(elem_classes="rs-card"):
                gr.HTML(_step(2, "Data", "what to learn from"))
                with gr.Row():
                    with gr.Column(scale=5, min_width=220):
                        place("data.source")
                    with gr.Column(scale=3, min_width=160):
                        place("data.max_seq_len")
                preview = drawn("preview", {})
            with gr.Column(elem_classes="rs-card"):
                gr.HTML(_step(3, "Effort", "how long and how fast to learn"))
                with gr.Row():
                    for name in (
                        "train.steps",
                        "train.epochs",
                        "train.batch_size",
                        "train.learning_rate",
                    ):
                        with gr.Column(min_width=120):
                            place(name)
            with gr.Accordion("All other settings", open=False, elem_classes="rs-card rs-rest"):
                _other_settings(place)
        with gr.Column(scale=4, min_width=320, elem_classes="rs-side"):
            with gr.Column(elem_classes="rs-card"):
                verdict = drawn("verdict", {"models": known_models()})
                remedies = [
                    gr.Button(visible=False, size="sm", elem_classes="rs-remedy")
                    for _ in range(REMEDIES_SHOWN)
                ]
                start = gr.Button(
                    "Start", variant="primary", size="lg", interactive=False, elem_id="start"
                )
                why_not = drawn("why_not", {})
                queue = gr.Button("Add to queue", size="lg", visible=False, elem_id="add-to-queue")
                queued = drawn("queued", {})
                detached = gr.Button(
                    "Start detached", size="sm", interactive=False, elem_id="start-detached"
                )
                gr.HTML(DETACHED_HINT, apply_default_css=False, elem_id="rs-detached-hint")
    return TrainPanel(
        preset, about, fields, preview, verdict, remedies, start, detached, queue, queued, why_not
    )


def component(setting: Setting, shown: Any = None) -> gr.components.Component:
    """A new component for a field of the form, showing the component value `shown`."""
    common = {"value": shown, "label": setting.label, "elem_id": setting.elem_id}
    if setting.kind == "switch":
        return gr.Checkbox(info=setting.help, **common)
    common["info"] = SHORT_HELP.get(setting.dotted, setting.help)
    if setting.kind == "choice":
        words = CHOICE_LABELS.get(setting.dotted, {})
        return gr.Dropdown(
            [(words.get(choice, choice), choice) for choice in setting.choices], **common
        )
    if setting.kind == "lines":
        return gr.Textbox(lines=2, max_lines=8, placeholder="none", **common)
    return gr.Textbox(max_lines=1, placeholder=setting.empty_means, **common)


def _other_settings(place: Any) -> None:
    for section, title in SECTION_TITLES.items():
        names = [s.dotted for s in settings() if s.section == section and s.dotted not in PROMINENT]
        gr.HTML(f"<h4>{title}</h4>", apply_default_css=False)
        with gr.Row(elem_classes="rs-settings"):
            for name in names:
                with gr.Column(min_width=200):
                    place(name)


def _step(number: int, title: str, what: str) -> str:
    return f'<h3 class="rs-step"><b>{number}</b>{title} <span>{what}</span></h3>'
