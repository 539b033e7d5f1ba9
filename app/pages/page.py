"""The page is built here, tab by tab."""

from __future__ import annotations

import os

import gradio as gr

from app.form.presets import FIRST_PRESET, read_presets
from app.pages.checker import Checker
from app.pages.known_models import machine_words
from app.pages.panels import drawn, train_panel
from app.pages.train_events import PageParts, TrainEvents
from app.session.session import Session
from engine.machine.read_machine import read_machine


def build_page(session: Session, checker: Checker, has_login: bool = False) -> gr.Blocks:
    """Builds the page and returns it. With a login, its header shows who is logged in.

    Gradio provides the form. `app/browser/main.js` draws the changing content, using our own
    routes.
    """
    presets = read_presets()
    # Each component reads this variable when it is made.
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with gr.Blocks(title="Ramstream", analytics_enabled=False, fill_width=True) as page:
        machine = machine_words(read_machine(session.runs_dir))
        drawn("header", {"machine": machine, "has_login": has_login})
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
        TrainEvents(session, checker, presets, PageParts(panel, bar, tabs)).connect(page)
    return page
