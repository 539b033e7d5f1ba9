"""A run that trains adapters, from the form to both ways in which it is exported."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from playwright.sync_api import expect
from transformers import AutoModelForCausalLM

from engine.paths import PROGRAM_ROOT
from tests.browser.screen import (
    OPENED_RUN,
    box,
    expect_finished,
    fill,
    open_other_settings,
    open_view,
    run_of,
)
from tests.support.browser import WAIT_MILLISECONDS, answer
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)

IDS = torch.tensor([[5, 17, 3, 41, 8, 22, 9]])


def export(page, folder, form: str) -> None:
    """Exports in one of the two forms, and waits until it is done."""
    page.locator("[data-part=export] input[name=folder]").fill(str(folder))
    page.locator("[data-part=export] select[name=form]").select_option(form)
    page.locator("[data-part=export] form button").click()
    expect(page.locator("[data-field=export-caption]")).to_contain_text(f"to {folder}.")


def test_adapters_from_the_form_to_both_exports(page, server, tmp_path):
    open_other_settings(page)
    rank, blocks = box(page, "train.lora_rank"), box(page, "train.last_blocks")
    expect(box(page, "train.warmup_steps")).to_be_visible()
    expect(rank).to_be_hidden()
    expect(blocks).to_be_hidden()
    box(page, "train.method").click()
    page.get_by_role("option", name="adapters (LoRA)").click()
    expect(rank).to_be_visible()
    expect(blocks).to_be_hidden()
    fill(page, "train.lora_rank", "8")
    fill(page, "train.steps", "12")
    expect(page.locator(".rs-fit-panel")).to_contain_text("trained")
    page.locator("#start:not([disabled])").click()
    expect(page).to_have_url(OPENED_RUN)
    expect_finished(page)
    run_id = run_of(page)
    details = answer(server, f"/api/runs/{run_id}/details")
    assert "lora_rank: 8" in details["config"] and "method: lora" in details["config"]

    open_view(page, "export")
    adapter, whole = tmp_path / "adapter", tmp_path / "whole"
    export(page, adapter, "adapter")
    export(page, whole, "model")
    base = AutoModelForCausalLM.from_pretrained(PROGRAM_ROOT / "assets" / "starter-model")
    merged = AutoModelForCausalLM.from_pretrained(whole)
    with torch.no_grad():
        before = base(input_ids=IDS).logits
        apart = PeftModel.from_pretrained(base, adapter).eval()(input_ids=IDS).logits
        together = merged(input_ids=IDS).logits
    torch.testing.assert_close(apart, together, rtol=1e-4, atol=1e-4)
    assert (together - before).abs().max() > 1e-3
