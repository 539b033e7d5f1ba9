"""Tokens are added to a tokenizer, and weights get the rows for them that transformers gives."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config.data_settings import DataConfig
from engine.config.optimizers import OptimizerSettings
from engine.config.settings import TrainConfig
from engine.data.formats.example import Conversation
from engine.data.tokens.encode import Encoder
from engine.errors import ConfigError
from engine.model.build.added_tokens import add_tokens
from engine.model.build.build import build_model
from engine.model.build.read_model import read_model
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.host.host_adamw import HostAdamW
from engine.runtime.host.host_states import HostStates
from engine.runtime.step.engine_settings import EngineSettings
from engine.runtime.step.streaming_engine import StreamingEngine
from engine.training.weights.resize_embeddings import ResizedEmbeddings
from engine.training.weights.weights import load_pretrained
from tests.support import data_tokenizers as made
from tests.support.folders import make_model, make_tokenizer
from tests.support.optimizers import torch_optimizer
from tests.support.plain_steps import step_both
from tests.support.sets import slow_but
from tests.support.tiny import random_batches, tiny_config

pytestmark = pytest.mark.computing

KNOWN = len(make_tokenizer())
TOKENS = ("<tool>", "</tool>", "<end>")
"""The last one is known to the tokenizer."""
MANY = 200
"""With more rows than columns, the covariance of a table is positive definite."""
SEED = 5
SWEEP = "it sweeps over families and heads; a plain run has two of them"


def settings(folder, dtype="float32", **train) -> TrainConfig:
    return TrainConfig.from_dict(
        {
            "model": {"source": str(folder), "dtype": dtype},
            "data": {"source": "none", "add_tokens": TOKENS},
            "train": train,
        }
    )


def with_own_rows(folder, family: str, rows: int, **changes):
    """Makes a model of so many rows, of which the tokenizer uses all."""
    make_model(folder, family, vocab_size=rows, **changes)
    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"more{k}" for k in range(rows - KNOWN)])
    tokenizer.save_pretrained(folder)
    return folder


# ---------------------------------------------------------------------- rows


@pytest.mark.parametrize("rows", [MANY, 20], ids=["drawn", "mean"])
@pytest.mark.parametrize("unit", ["embed", "head"])
def test_rows_are_those_of_transformers_under_the_same_random_state(rows, unit):
    torch.manual_seed(1)
    old = torch.nn.Embedding(rows, 32)
    plain = AutoModelForCausalLM.from_config(tiny_config("llama"))
    new = torch.nn.Embedding(rows + 3, 32)
    torch.manual_seed(SEED + (unit == "head"))
    plain._init_added_embeddings_weights_with_mean(old, new, rows, 3)
    before = torch.random.get_rng_state()
    grown = ResizedEmbeddings(rows, rows + 3, SEED).grown(old.weight.data, unit)
    assert torch.equal(torch.random.get_rng_state(), before), "another run may draw from it"
    assert torch.equal(grown[:rows], old.weight)
    torch.testing.assert_close(grown[rows:], new.weight[rows:].data, rtol=1e-6, atol=1e-7)
    assert (grown[rows] == grown[rows + 1]).all() == (rows == 20)


@pytest.mark.parametrize(
    "tied", [pytest.param(True, marks=pytest.mark.slow(SWEEP)), False], ids=["tied", "untied"]
)
@pytest.mark.parametrize("family", slow_but(("llama", "gpt2", "phi"), ("llama", "phi"), SWEEP))
def test_training_equals_plain_training_with_the_same_new_rows(tmp_path, family, tied):
    """Phi has a bias in its head. Three steps: losses, and every weight after them."""
    folder = with_own_rows(tmp_path / "model", family, MANY, tie_word_embeddings=tied)
    config = settings(folder)
    read = read_model(config)
    model = build_model(read.config, config.model)
    assert model.tied == tied
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain.resize_token_embeddings(MANY + 2)
    backend = CpuBackend()
    states = HostStates(model.layouts, "float32", threads=1)
    states.allocate_weights()
    load_pretrained(model, str(folder), states, seed=SEED)
    places = {s.full_name: (u.name, s) for u in model.units for s in u.layout.parameters}
    tables = 0
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            unit, spec = places[name]
            own = states.parameters.master(unit, spec.name)
            if len(own) == MANY + 2:
                assert torch.equal(own[:MANY], parameter[:MANY]), name
                torch.testing.assert_close(own, parameter, rtol=1e-3, atol=1e-5)
                parameter.copy_(own)
                tables += 1
            assert torch.equal(own, parameter), name
    assert tables == (1 if tied else 2) + (family == "phi")
    states.allocate_states()
    adamw = HostAdamW(states, OptimizerSettings(eps=1e-5, weight_decay=0.1), threads=1)
    engine = StreamingEngine(
        model, states, backend, EngineSettings(PlanChoices().changed(micro_batches=2), 24, 7), adamw
    )
    decay = {name for name, (_, spec) in places.items() if spec.decay}
    optimizer = torch_optimizer(dict(plain.train().named_parameters()), decay)
    for step in range(1, 4):
        batches = random_batches(2, seed=step, vocabulary=MANY + 2)
        batches[0].input_ids[:, 3:5] = MANY, MANY + 1
        batches[0].labels[:, 2:4] = MANY, MANY + 1
        batches[0].loss_tokens = int((batches[0].labels >= 0).sum())
        step_both(engine, plain, optimizer, batches, step)
    for name, parameter in plain.named_parameters():
        unit, spec = places[name]
        mine = states.parameters.master(unit, spec.name)
        torch.testing.assert_close(mine, parameter.detach(), rtol=1e-4, atol=2e-5)
    for part in (engine, adamw, states, backend):
        part.close()


def test_a_bf16_checkpoint_grows_in_bf16_and_spare_rows_stay(tmp_path):
    folder = with_own_rows(tmp_path / "full", "llama", 40)
    spare = make_model(tmp_path / "spare", "llama", vocab_size=40)
    for source, rows in ((folder, 42), (spare, 40)):
        config = settings(source, "bfloat16")
        read = read_model(config)
        assert read.grows == (rows == 42) and f"got {TOKENS[0]}, {TOKENS[1]}" in read.notes[1]
        assert "<end>: the tokenizer has a token of this name" in read.notes[0]
        model = build_model(read.config, config.model)
        states = HostStates(model.layouts, "bfloat16", threads=1)
        states.allocate_weights()
        load_pretrained(model, str(source), states, seed=SEED)
        table = states.parameters.master("embed", model.layouts[0].parameters[0].name)
        assert len(table) == rows
        states.close()


# ---------------------------------------------------------------------- tokens


def test_an_added_token_is_one_wherever_it_stands():
    tokenizer = made.byte_level_tokenizer(made.CHATML)
    added = add_tokens(tokenizer, ("<tool>", "</tool>", "<|im_end|>"))
    assert added.new == ("<tool>", "</tool>") and added.known == ("<|im_end|>",)
    first, second = tokenizer.convert_tokens_to_ids(["<tool>", "</tool>"])
    assert added.vocabulary == second + 1 == len(tokenizer)
    data = DataConfig(source="none", add_tokens=("<tool>", "</tool>"))
    turns = [
        {"role": "user", "content": "use<tool>hello</tool> <|im_end|>"},
        {"role": "assistant", "content": "<tool>hello</tool>"},
    ]
    (found,) = Encoder.of(data, tokenizer).encode([Conversation(turns)])
    ids = found.documents[0].ids.tolist()
    assert ids.count(first) == ids.count(second) == 2
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert ids.count(end) == 3, "what was not added and somebody typed stays text"
    assert add_tokens(tokenizer, data.add_tokens).new == (), "nothing is added twice"


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([""], "'' has no letter or sign"),
        (["<a>", " \n"], r"' \\n' has no letter or sign"),
        (["<a>", "<a>"], "<a> is named twice"),
        (7, "7 is not a list of texts"),
        ({"<a>": 1}, "is not a list of texts"),
        ([1], "is not a list of texts"),
    ],
)
def test_lists_that_mean_nothing_are_refused(tokens, says):
    with pytest.raises(ConfigError, match=rf"^data.add_tokens: .*{says}"):
        TrainConfig.from_dict(
            {"model": {"source": "m"}, "data": {"source": "d", "add_tokens": tokens}}
        )


def test_rows_of_token_ids_take_no_tokens():
    with pytest.raises(ConfigError, match="are token ids .* which no tokenizer reads"):
        TrainConfig.from_dict(
            {
                "model": {"source": "m"},
                "data": {"source": "d", "format": "tokens", "add_tokens": ["<a>"]},
            }
        )


@pytest.mark.parametrize(
    ("train", "tied", "says"),
    [
        ({"method": "lora"}, False, "add embed_tokens and lm_head to train.lora_save_modules"),
        (
            {"method": "lora", "lora_save_modules": ["embed_tokens"]},
            False,
            "add lm_head to train.lora_save_modules",
        ),
        ({"method": "lora"}, True, "set train.method to full or parts"),
        ({"method": "parts", "last_blocks": 1}, False, "in train.part_names"),
        ({"method": "lora", "lora_save_modules": ["embed_tokens", "lm_head"]}, False, ""),
        ({}, False, ""),
    ],
)
def test_rows_that_would_not_be_trained_are_refused(tmp_path, train, tied, says):
    folder = make_model(tmp_path / "m", vocab_size=KNOWN, tie_word_embeddings=tied)
    config = settings(folder, **train)
    read = read_model(config)
    model = build_model(read.config, config.model, config.train.parts)
    if not says:
        read.refuse_untrained(model, config)
        return
    with pytest.raises(ConfigError, match=f"^data.add_tokens: .*{says}"):
        read.refuse_untrained(model, config)
