"""Blocks that are recorded and replayed: every step has the bits that it would have without, and
what cannot be recorded runs as it is. The CPU's recordings run the recorded work again.
"""

from __future__ import annotations

import functools
from itertools import groupby

import pytest

from engine.config.adapters import Adapters
from engine.config.trained_parts import Parts
from engine.planning.schedule.build import build_step_plan
from engine.training.weights.adapter_weights import initialize_adapters
from tests.support.block_graphs import PLAN_FAMILIES, WHOLE
from tests.support.recorders import AgainRecorder, RecordingBackend
from tests.support.same_bits import assert_same_bits
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config

pytestmark = pytest.mark.computing

STEPS = 5


def planes_after(choices, recorder=None, shapes=((2, 12),), tied=False, each=STEPS, parts=None):
    """The planes of weights and moments after some steps, and why blocks are not recorded. shapes:
    rows and tokens of the steps in turn, so many times. parts: what is trained; None for all.
    """
    plain = plain_model(tiny_config("qwen3", tie_word_embeddings=tied))
    backend = None if recorder is None else RecordingBackend(recorder)
    choices = choices.changed(graphs=recorder is not None)
    run = streamed(
        plain, choices, backend=backend, dtype="bfloat16", max_grad_norm=0.5, parts=parts
    )
    if isinstance(parts, Adapters):
        initialize_adapters(run.model, run.host_states, seed=7)
    for step in range(1, each * len(shapes) + 1):
        rows, tokens = shapes[(step - 1) % len(shapes)]
        batches = random_batches(choices.batching.micro_batches, rows, tokens, seed=step)
        run.engine.train_step(step, batches, 1e-2)
    run.engine.drain()
    planes = run.kept_planes()
    problem = run.engine.unrecorded
    run.close()
    return planes, problem


@functools.cache
def unrecorded_planes(plan_family: str, tied: bool = False) -> list:
    """Returns the planes that a plan_family has where nothing is recorded."""
    return planes_after(WHOLE.changed(**PLAN_FAMILIES[plan_family]), tied=tied)[0]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("plan_family", PLAN_FAMILIES)
def test_replayed_blocks_have_the_same_bits(plan_family, tied):
    choices = WHOLE.changed(**PLAN_FAMILIES[plan_family])
    recorder = AgainRecorder()
    planes, problem = planes_after(choices, recorder, tied=tied)
    assert_same_bits(planes, unrecorded_planes(plan_family, tied))
    assert not problem
    of_step = recorder.told.count("rehearse")
    rounds = min(choices.batching.rounds, 2)  # later rounds replay what the second one recorded
    assert recorder.told.count("record") == of_step * rounds // choices.batching.rounds
    assert recorder.told.count("replay") == (STEPS - 1) * of_step


@pytest.mark.parametrize("plan_family", ["plain", "kept", "rounds"])
@pytest.mark.parametrize("parts", [Adapters(rank=4), Parts(("model.layers*",))], ids=repr)
def test_blocks_above_a_frozen_embedding_are_replayed(plan_family, parts):
    """The gradient of the first block's input is not needed, and no copy of it is made."""
    choices = WHOLE.changed(**PLAN_FAMILIES[plan_family])
    recorder = AgainRecorder()
    planes, problem = planes_after(choices, recorder, parts=parts)
    assert_same_bits(planes, planes_after(choices, parts=parts)[0])
    assert not problem and recorder.told.count("replay") > 0


def test_each_shape_has_its_own_recordings():
    shapes = ((2, 12), (1, 12), (2, 9))
    recorder = AgainRecorder()
    planes, _ = planes_after(WHOLE, recorder, shapes)
    assert_same_bits(planes, planes_after(WHOLE, shapes=shapes)[0])
    # A new shape lets go of the recordings of those before, which are made again.
    assert recorder.told.count("rehearse") == 3 * 2 * 6
    assert recorder.told.count("record") == 3 * 2 * 6
    replayed = [recorder.told.count(word) for word in ("replay", "record")]
    assert replayed == [(STEPS - 1) * 3 * 12, 3 * 12]


def test_a_shape_that_comes_late_has_no_recordings_beside_its_rehearsal():
    recorder = AgainRecorder()
    shapes = ((2, 12), (2, 12), (2, 12), (1, 9), (2, 12), (1, 9))
    planes, problem = planes_after(WHOLE, recorder, shapes, each=1)
    assert_same_bits(planes, planes_after(WHOLE, shapes=shapes, each=1)[0])
    assert not problem
    words = [word for word in recorder.told if word in ("rehearse", "record", "replay", "clear")]
    runs = [(word, len(list(same))) for word, same in groupby(words)]
    # The last clear is that of the end.
    first, late = [("clear", 1), ("rehearse", 12)], [("clear", 1), ("rehearse", 12)]
    assert runs[:2] == first
    assert late == runs[runs.index(("clear", 1), 2) :][:2]
    assert recorder.told.count("record") == 12 + 12 + 12


@pytest.mark.slow("a quicker test beside it shows most of what it shows")
def test_too_many_shapes_are_told():
    shapes = [(rows, tokens) for rows in (1, 2) for tokens in range(3, 16)]
    planes, problem = planes_after(WHOLE, AgainRecorder(), shapes, each=1)
    assert "more than 24 shapes" in problem
    assert_same_bits(planes, planes_after(WHOLE, shapes=shapes, each=1)[0])


@pytest.mark.parametrize("number", [1, 4, 7, 12])
@pytest.mark.parametrize("plan_family", ["plain", "kept", "pairs"])
def test_a_block_that_cannot_be_recorded_runs_as_it_is(plan_family, number):
    choices = WHOLE.changed(**PLAN_FAMILIES[plan_family])
    recorder = AgainRecorder(refuses=number)
    planes, problem = planes_after(choices, recorder)
    assert_same_bits(planes, unrecorded_planes(plan_family))
    assert recorder.told.count("record") == number
    assert "operation not permitted when stream is capturing" in problem


def test_blocks_that_draw_random_numbers_are_not_recorded():
    planes, problem = planes_after(WHOLE, AgainRecorder(draws=True))
    assert_same_bits(planes, planes_after(WHOLE)[0])
    assert "random numbers" in problem


def test_a_step_that_is_given_up_leaves_no_recordings():
    """The step in which blocks are recorded ends in the middle: the next one records anew."""
    plain = plain_model(tiny_config("qwen3"))
    recorder = AgainRecorder()
    choices = WHOLE.changed(graphs=True)
    run = streamed(plain, choices, backend=RecordingBackend(recorder), dtype="bfloat16")
    run.engine.train_step(1, random_batches(2, seed=1), 1e-2)

    def stop_after_two() -> None:
        if recorder.told.count("record") == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.engine.train_step(2, random_batches(2, seed=2), 1e-2, check=stop_after_two)
    run.engine.drain()
    run.engine.train_step(2, random_batches(2, seed=2), 1e-2)
    run.engine.drain()
    assert recorder.told.count("record") == 2 + 12
    run.close()


def test_only_models_that_live_on_the_device_are_recorded():
    blocks = ["block 0", "block 1", "block 2"]
    for changes in (dict(gpu_resident_units=3), dict(offloaded_block_inputs=True)):
        choices = WHOLE.changed(graphs=True, **changes)
        with pytest.raises(ValueError, match="only where all of them live on the device"):
            build_step_plan(blocks, False, choices)
