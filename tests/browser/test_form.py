"""The form of a new run, as a person fills it in: what follows from what, and what is kept."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.browser.screen import box, fill, open_other_settings
from tests.support.browser import WAIT_MILLISECONDS
from tests.support.sets import BROWSER_FLOWS

pytestmark = pytest.mark.slow(BROWSER_FLOWS)

expect.set_options(timeout=WAIT_MILLISECONDS)


def run_length(page, name="length"):
    return page.locator(f".rs-run-length [data-field={name}]")


def test_own_data_and_another_batch_are_taken_as_they_are(page, server):
    rows = server.folder / "questions.csv"
    rows.write_text(
        "prompt,completion\n" + "\n".join(f"{one} plus 1?,{one + 1}" for one in range(1200)),
        encoding="utf-8",
    )
    page.wait_for_selector(".rs-preview mark")
    expect(run_length(page)).to_contain_text("450 steps ≈ ")
    fill(page, "train.batch_size", "4")
    expect(run_length(page, "derived")).to_contain_text("Micro-batch size 8 does not divide")
    expect(page.locator("#start")).to_be_enabled()
    fill(page, "data.source", str(rows))
    expect(run_length(page)).to_have_text(re.compile(r"^3 passes over your 1,152 rows ≈ \d+ steps"))
    expect(box(page, "name")).to_have_value("Questions")
    fill(page, "train.learning_rate", "1000")
    expect(page.locator(".rs-fit-panel")).to_contain_text("the loss would diverge")
    fill(page, "train.learning_rate", "fast")
    wrong = page.locator("#field-train-learning_rate .rs-field-error")
    expect(wrong).to_have_text("Learning rate: 'fast' is not a number.")
    expect(page.locator("#start")).to_be_disabled()
    fill(page, "train.learning_rate", "0.001")
    expect(wrong).to_have_count(0)


def test_words_find_a_model_and_a_smaller_one_that_fits(page):
    page.wait_for_selector(".rs-preview mark")
    model = box(page, "model.source")
    model.fill("")
    model.press_sequentially("7b")
    expect(page.locator("#rs-models b").first).to_have_text(re.compile(r" 7B\b"))
    model.fill("")
    model.press_sequentially("qwen3 32b")
    expect(page.locator("#rs-models li").first).to_be_visible()
    model.press("Enter")
    expect(model).to_have_value("Qwen/Qwen3-32B")
    open_other_settings(page)
    expect(box(page, "model.dtype")).to_have_value("bfloat16, fp32 masters")
    verdict = page.locator(".rs-fit-panel")
    expect(verdict).to_have_attribute("data-tone", "bad")
    expect(verdict.locator("[data-need=host]")).to_contain_text("· only ")
    # Machines are looked for with the settings of the form.
    page.locator(".rs-method input[value=lora]").check()
    expect(verdict.locator(".rs-job")).to_contain_text("LoRA")
    verdict.get_by_role("button", name="Machines that would train this model").click()
    table = page.locator(".rs-hardware [data-part=settings]")
    expect(table.locator("[name=method]")).to_have_value("lora")
    length = box(page, "data.max_seq_len").input_value()
    expect(table.locator("[name=tokens]")).to_have_value(length)
    expect(page.locator("[data-field=offered]")).to_contain_text("Qwen3 32B, ")
    page.go_back()
    smaller = verdict.locator("[data-part=smaller] button").first
    name = smaller.inner_text()
    assert name.startswith("Qwen3 ")
    smaller.click()
    expect(model).to_have_value(f"Qwen/{name.replace(' ', '-')}")
    expect(verdict.locator("[data-need=host]")).not_to_contain_text("only")


def test_settings_are_found_taken_back_and_kept_as_a_preset(page, server):
    page.wait_for_selector(".rs-preview mark")
    fill(page, "train.learning_rate", "0.002")
    expect(box(page, "output.export")).to_be_attached()
    find = page.locator(".rs-tools [data-part=find]")
    find.fill("weight decay")
    expect(box(page, "train.weight_decay")).to_be_visible()
    expect(box(page, "output.checkpoint_every")).to_be_hidden()
    fill(page, "train.weight_decay", "0.2")
    find.fill("")
    # Each section folds, and says how much of it differs.
    title = page.get_by_role("button", name="Training 1 changed")
    for is_open in (False, True):
        title.click()
        expect(title).to_have_attribute("aria-expanded", str(is_open).lower())
        expect(box(page, "train.weight_decay")).to_be_visible(visible=is_open)
    page.locator("[data-part=differs]").check()
    expect(page.locator(".rs-settings .rs-differs:visible")).to_have_count(2)
    expect(page.get_by_role("button", name="Undo 2 changes")).to_be_visible()
    expect(page.locator(".rs-most-used")).to_have_text("Most used 1 changed")
    page.locator("#field-train-weight_decay .rs-back").click()
    expect(box(page, "train.weight_decay")).to_have_value("0.01")

    page.locator(".rs-tools [data-part=save]").click()
    page.locator(".rs-tools dialog [data-part=name]").fill("Slower starter")
    page.locator(".rs-tools dialog [data-part=keep]").click()
    preset = page.locator("#preset input")
    expect(preset).to_have_value("Slower starter (yours)")
    assert (server.runs / ".presets" / "slower-starter.yaml").is_file()
    expect(page.locator("[data-field=differs]")).to_have_text(re.compile(r"\(0\)$"))
    page.reload()
    expect(preset).to_have_value("Slower starter (yours)")
    open_other_settings(page)
    expect(box(page, "train.learning_rate")).to_have_value("0.002")
    page.locator(".rs-tools [data-part=remove-preset]").click()
    expect(preset).to_have_value("")
    assert not (server.runs / ".presets" / "slower-starter.yaml").exists()

    preset.click()
    page.get_by_role("option", name="Starter").first.click()
    expect(page.get_by_text("Preset Starter replaced your settings.")).to_be_visible()
    expect(box(page, "train.learning_rate")).not_to_have_value("0.002")
    page.get_by_role("button", name="Undo", exact=True).click()
    expect(box(page, "train.learning_rate")).to_have_value("0.002")
    expect(preset).to_have_value("")
    expect(page.get_by_text("Preset Starter replaced your settings.")).to_be_hidden()
