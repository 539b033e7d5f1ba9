"""Pairs of answers, prepared as a run prepares them."""

from __future__ import annotations

from engine.config.data_settings import DataConfig
from engine.config.preference_settings import Objective, read_as
from engine.data.batches.loader import prepare_data
from tests.support.folders import make_tokenizer


def prepared(path, reads="pairs", **values):
    data = read_as(DataConfig(source=str(path), **{"eval_fraction": 0.0} | values), reads)
    found = prepare_data(data, make_tokenizer(), 1)
    found.learn(Objective(name="kto" if reads == "labels" else "dpo"))
    return found
