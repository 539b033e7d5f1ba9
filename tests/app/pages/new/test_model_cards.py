"""Models as cards: those that fit first, judged as the Summary judges them."""

from __future__ import annotations

import re
from dataclasses import replace

from app.pages.new.known_models import card_id, model_title
from app.pages.new.model_cards import FITTING, TOO_LARGE, model_cards
from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures
from engine.planning.shape.catalog import entry_of

MACHINE = with_figures(named_machine("RTX 4090", 52), disk_gib=500)
STARTER = "assets/starter-model"


def cards(chosen="", machine=MACHINE, downloads=lambda config: True, **train):
    given = {
        "model": {"source": "m"},
        "data": {"source": "d", "max_seq_len": 512},
        "train": {"epochs": 1, "batch_size": 8, **train},
    }
    config = TrainConfig.from_dict(given)
    chosen = config.with_values({"model.source": chosen or "m"})
    example = config.with_values({"model.source": STARTER})
    return model_cards(config, machine, chosen, example, downloads)


def test_those_that_fit_come_first_and_then_one_that_does_not():
    shown = cards()
    assert [card["fits"] for card in shown] == [True] * FITTING + [False] * TOO_LARGE
    assert shown[0]["text"].startswith("fits · ")
    assert re.fullmatch(r"needs [\d.]+ GiB more RAM, .* more GPU memory", shown[-1]["text"])
    assert all(card["id"] in card["ids"] for card in shown)
    assert all(("download" in card["note"]) != card["is_example"] for card in shown)


def test_the_chosen_model_stays_and_comes_first():
    chosen = cards()[2]["id"]
    for method in ("full", "lora"):
        shown = cards(chosen, method=method)
        assert chosen in shown[0]["ids"]
        assert len({card["id"] for card in shown}) == len(shown) <= FITTING + TOO_LARGE


def test_a_disk_that_is_too_small_for_the_download_or_the_checkpoints_counts():
    second = "Qwen/Qwen3-1.7B"
    room = replace(MACHINE, disk_free=23 << 30)
    for small, downloads in ((replace(MACHINE, disk_free=16 << 30), False), (room, True)):
        shown = cards(second, small, lambda config, now=downloads: now)
        own = next(card for card in shown if card["id"] == second)
        assert not own["fits"] and re.fullmatch(r"needs [\d.]+ [GM]iB more disk", own["text"])
        assert shown[0]["fits"] and shown[0] is not own
    assert cards(second, room, lambda config: False)[0]["id"] == second


def test_models_on_this_machine_come_first_those_of_the_same_shape_too():
    here = ["Qwen/Qwen3-0.6B-Base", "HuggingFaceTB/SmolLM2-135M"]
    shown = cards(downloads=lambda config: config.model.source not in here)
    assert {card["id"] for card in shown[:2]} == set(here)
    assert all(card["note"] == "on this machine" and card["fits"] for card in shown[:2])
    assert all(card["is_download"] for card in shown[2:] if not card["is_example"])
    assert [card["fits"] for card in shown] == [True] * FITTING + [False] * TOO_LARGE


def test_the_model_of_the_example_has_a_card_of_its_own():
    own, *others = cards(STARTER)
    assert own["id"] == STARTER and own["fits"] and own["title"] == "Starter model"
    assert own["note"] == "638k parameters · for the example only"
    assert [card["is_example"] for card in (own, *others)] == [True, *[False] * len(others)]
    # It is on this machine, so one click leads back to it from another model.
    fitting = [card for card in cards("Qwen/Qwen2.5-0.5B") if card["fits"]]
    assert len(fitting) == FITTING and fitting[-1] == own


def test_a_model_and_its_tuned_one_have_one_name_and_others_of_its_shape_their_own():
    for source in ("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-0.5B-Instruct"):
        assert model_title(source) == "Qwen2.5 0.5B"
        assert cards(source)[0]["title"] == "Qwen2.5 0.5B"
    assert model_title("deepseek-ai/DeepSeek-R1-Distill-Llama-8B") == "DeepSeek-R1-Distill-Llama-8B"
    assert model_title("/models/mine") == "mine"


def test_models_that_look_at_pictures_or_do_something_else_are_not_offered_for_texts():
    def offered(machine):
        return [each["id"] for each in cards(machine=machine, method="lora")]

    sizes = [named_machine("RTX 4090", gib) for gib in (8, 16, 24, 32, 48, 64, 96, 128)]
    ids = {each for machine in sizes for each in offered(with_figures(machine, disk_gib=900))}
    assert len(ids) > 10 and not any("VL" in each or "medgemma" in each for each in ids)
    assert card_id(entry_of("google/gemma-3-4b-pt")) == "google/gemma-3-4b-it"


def test_adapters_fit_larger_models():
    def largest(shown):
        return [card["title"] for card in shown if card["fits"] and not card["is_example"]][-1]

    assert largest(cards(method="lora")) != largest(cards())


def test_settings_that_no_table_is_about_have_no_cards():
    assert cards(method="parts", part_names=("lm_head.weight",)) == []
