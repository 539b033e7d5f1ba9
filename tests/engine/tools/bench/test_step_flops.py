"""The FLOPs that `launch.py bench` reports are those that torch counts while a step runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from engine.config.adapters import Adapters
from engine.config.preference_settings import Objective
from engine.config.settings import ModelConfig
from engine.config.trained_parts import Parts
from engine.model.build.measure_shape import shape_of
from engine.planning.fit.cost_model import MicroBatch
from engine.planning.schedule.choices import PlanChoices
from engine.runtime.device.cpu_backend import CpuBackend
from engine.runtime.step.engine_settings import EngineSettings
from engine.tools.bench.random_pairs import AnswersOfSteps, random_answers
from engine.tools.bench.step_flops import step_flops
from engine.tools.bench.steps import Planes, Trained, random_rows
from tests.support.tiny import VOCAB, tiny_config

pytestmark = pytest.mark.computing
ROWS, LENGTH, BLOCKS = 4, 64, 3
HOW = ModelConfig(source="random", init="random", dtype="float32")


def of_layer(x, weight, _, first, *rest, out_val) -> int:
    taken, returned, rank = weight.shape[1], weight.shape[0], len(first)
    return 2 * len(x) * (taken * returned + rank * (taken + returned))


def of_layer_backward(gradient, saved, _, for_input, *, out_val) -> int:
    x, weight, first, *_ = saved
    taken, returned, rank = weight.shape[1], weight.shape[0], len(first)
    of_input = taken * returned + rank * taken if for_input else 0
    return 2 * len(x) * (rank * (2 * returned + taken) + of_input)


class Counter(TorchDispatchMode):
    """Adds up the FLOPs of products of matrices, as torch counts them."""

    def __init__(self):
        super().__init__()
        ours, aten = torch.ops.ramstream, torch.ops.aten
        self.formulas = {each: flop_registry[each] for each in (aten.mm, aten.addmm)}
        self.formulas |= {
            ours.adapted_linear: of_layer,
            ours.adapted_linear_backward: of_layer_backward,
        }
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        formula = self.formulas.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


def counted(parts, tied: bool, kept: int, form=None, chunk: int = 1024):
    """What torch counts in the matrix products of a step, and the shape of the model."""
    config = tiny_config("llama", tie_word_embeddings=tied)
    planes = Planes.open(config, CpuBackend(), HOW, trained=Trained(parts))
    answers = None
    batches = random_rows([ROWS], LENGTH, VOCAB)
    if form is not None:
        found = random_answers(form, ROWS // form.sequences, LENGTH, VOCAB)
        answers = AnswersOfSteps(found, len(found))
        batches = answers.batches()
    choices = PlanChoices().changed(blocks_without_recompute=kept)
    engine = planes.engine(EngineSettings(choices, ROWS * LENGTH, chunk, 1.0))
    try:
        if answers is not None:
            answers.compare(engine)
            batches = answers.batches()
        with Counter() as counter:
            own = batches if answers is None else answers.of_step(engine, batches)
            engine.train_step(1, own, 0.0)
            engine.drain()
        return counter.total, shape_of(planes.model)
    finally:
        engine.close()
        planes.close()


ADAPTERS = Adapters(rank=4)
ATTENTION = 32 * (32 + 16 + 16) + 3 * 4 * 32
"""The layers with queries, keys and values have so many parameters, with what multiplies their
input of adapters.
"""
CASES = {
    "adapters": (ADAPTERS, False, BLOCKS, ATTENTION),
    "last block, tied": (Parts(last_blocks=1), True, 1, 0),
    "adapters, tied, recomputed": (ADAPTERS, True, 0, ATTENTION),
    "whole": (None, False, 0, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_those_of_the_products_that_run(case):
    """The first layers of the lowest block give no gradient of their input, and are counted with
    one. Norms and positions without a label are the rest of the difference.
    """
    parts, tied, kept, lowest = CASES[case]
    total, shape = counted(parts, tied, kept)
    recomputed = BLOCKS - shape.forward_blocks - kept
    found = step_flops(
        replace(shape, attention=replace(shape.attention, width=0)), ROWS, LENGTH, recomputed
    )["hardware"]
    assert found == pytest.approx(total + 2 * ROWS * LENGTH * lowest, rel=0.012)
    assert found > total


@pytest.mark.parametrize("objective, chunk", [("dpo", 1024), ("dpo", 100), ("kto", 1024)])
def test_answers_are_counted_with_the_passes_that_compare_them(objective, chunk):
    form = Objective(name=objective)
    total, shape = counted(None, False, BLOCKS, form, chunk)
    learned = MicroBatch(ROWS // form.sequences, form.sequences * LENGTH).learning(form, chunk)
    without = replace(shape, attention=replace(shape.attention, width=0))
    found = step_flops(without, ROWS, LENGTH, 0, learned)["hardware"]
    assert found == pytest.approx(total, rel=0.012)
    usual = step_flops(without, ROWS, LENGTH, 0)["hardware"]
    extra = {"dpo": 2 * VOCAB * 32 * (chunk < 2 * LENGTH - 2), "kto": usual / ROWS / LENGTH / 3}
    assert found - usual == pytest.approx(ROWS * LENGTH * extra[objective], rel=0.02)
