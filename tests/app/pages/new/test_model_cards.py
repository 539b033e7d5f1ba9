"""Models as cards: those that fit first, as the table of models judges."""

from __future__ import annotations

from app.pages.new.model_cards import FITTING, TOO_LARGE, model_cards
from engine.config.settings import TrainConfig
from engine.machine.known_machines import named_machine, with_figures

MACHINE = with_figures(named_machine("RTX 4090", 52), disk_gib=500)


def cards(chosen="", **train):
    given = {
        "model": {"source": "m"},
        "data": {"source": "d", "max_seq_len": 512},
        "train": {"epochs": 1, "batch_size": 8, **train},
    }
    config = TrainConfig.from_dict(given)
    return model_cards(config, MACHINE, config.with_values({"model.source": chosen or "m"}))


def test_those_that_fit_come_first_and_then_one_that_does_not():
    shown = cards()
    assert [card["fits"] for card in shown] == [True] * FITTING + [False] * TOO_LARGE
    assert shown[0]["text"].startswith("fits · ") and shown[-1]["text"].startswith("lacks ")
    assert all(card["id"] in card["ids"] and card["download"] for card in shown)


def test_the_chosen_model_stays_and_comes_first():
    chosen = cards()[2]["id"]
    for method in ("full", "lora"):
        shown = cards(chosen, method=method)
        assert chosen in shown[0]["ids"]
        assert len({card["id"] for card in shown}) == len(shown) <= FITTING + TOO_LARGE


def test_adapters_fit_larger_models():
    def largest(shown):
        return [card["title"] for card in shown if card["fits"]][-1]

    assert largest(cards(method="lora")) != largest(cards())


def test_settings_that_no_table_is_about_have_no_cards():
    assert cards(method="parts", part_names=("lm_head.weight",)) == []
