"""What torch cannot compile, or may not compile for further shapes, runs as it is: the results are
those of eager kernels, and the run tells it, once for each part.
"""

from __future__ import annotations

import functools
import json
import threading

import pytest
import torch
from torch import nn

from engine.runs.record.events import LogLine
from engine.runtime.device import compiled
from engine.training.loop.run import start_run
from tests.support.folders import WORDS, make_config
from tests.support.same_bits import BASE
from tests.support.tiny import plain_model, random_batches, streamed, tiny_config
from tests.support.trained_runs import events_of, execute

pytestmark = pytest.mark.slow("torch compiles several blocks, for five seconds or more")

COMPILED = BASE.changed(compiled=True)
LIMIT = 2
LENGTHS = (6, 8, 10, 12)
"""These are more lengths of rows than LIMIT."""


@pytest.fixture
def compiler(monkeypatch):
    """Returns a function that makes torch compile with a limit of graphs, and without a C compiler.
    `broken` says what cannot be compiled at all: modules, or functions such as the loss.
    """
    real = torch.compile

    def set_up(limit: int, broken: type | None = None) -> None:
        def compile_(target, dynamic=False):
            is_module = isinstance(target, nn.Module)
            if broken is not None and is_module == (broken is nn.Module):
                return refuse
            return real(target, backend="eager", dynamic=False)

        monkeypatch.setattr(compiled.torch, "compile", compile_)
        monkeypatch.setattr(compiled, "RECOMPILE_LIMIT", limit)
        monkeypatch.setattr(compiled, "_this_thread", threading.local())
        monkeypatch.setattr(compiled, "_functions", [])
        monkeypatch.setattr(
            "engine.runtime.step.cross_entropy.compiled_function",
            functools.cache(compiled.compiled_function.__wrapped__),
        )
        torch._dynamo.reset()

    def refuse(*_, **__):
        torch.rand(1)  # part of a block may have run by then
        raise RuntimeError("no such kernel\nand a long story")

    yield set_up
    monkeypatch.undo()
    torch._dynamo.reset()
    compiled._this_thread.set_up = False
    compiled.set_up_compiler()


def trained(choices, family: str = "llama", lengths=LENGTHS, **changes):
    """Returns all planes after a step with rows of each length, and what ran uncompiled."""
    run = streamed(plain_model(tiny_config(family, **changes)), choices)
    for step, length in enumerate(lengths):
        batches = random_batches(
            choices.batching.micro_batches, length=length, seed=step, masked=0.0
        )
        run.engine.train_step(step + 1, batches, 1e-3)
        run.engine.drain()
    planes = [
        run.host_states.tensor(unit.name, plane).clone()
        for unit in run.model.units
        for plane in run.host_states.planes
    ]
    found = run.engine.uncompiled
    run.close()
    return planes, found


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("kept", [0, 3], ids=["recomputed", "kept"])
def test_more_shapes_than_may_be_compiled_run_as_they_are_and_that_is_known(compiler, kept):
    choices = COMPILED.changed(blocks_without_recompute=kept)
    expected, nothing = trained(BASE.changed(blocks_without_recompute=kept))
    compiler(limit=64)
    found, reported = trained(choices)
    assert reported == nothing == []
    assert_close(found, expected)
    compiler(limit=LIMIT)
    found, reported = trained(choices)
    assert_close(found, expected)
    reason = "it has more shapes than the 2 for which it may be compiled"
    assert set(reported) == {("A block", reason), ("The loss", reason)}


def test_a_block_that_fails_after_it_drew_numbers_drops_what_its_recompute_drops(compiler):
    values = dict(family="gpt2", resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2)
    expected, _ = trained(BASE, **values)
    compiler(limit=64, broken=nn.Module)
    found, reported = trained(COMPILED, **values)
    assert ("A block", "no such kernel") in reported
    assert_close(found, expected)


@pytest.fixture
def lengths_config(tmp_path):
    """Returns the settings of a run on rows of many lengths, one a micro-batch."""
    rows = []
    for row in range(40):
        text = " ".join(WORDS[word % 8] for word in range(1 + row % 8))
        turns = [{"role": "user", "content": text}, {"role": "assistant", "content": "two"}]
        rows.append(json.dumps({"messages": turns}) + "\n")
    (tmp_path / "data.jsonl").write_text("".join(rows), encoding="utf-8")
    values = {
        "data.packing": False,
        "data.train_on": "all",
        "train.micro_batch_size": 1,
        "engine.kernels": "compiled",
        "output.eval_every": 4,
        "output.checkpoint_every": 0,
    }
    return make_config(tmp_path, **values)


def told_by(run) -> list[str]:
    lines = [line for line in events_of(run, LogLine) if "could not be compiled" in line.text]
    assert all(line.level == "warning" for line in lines)
    return [line.text for line in lines]


def test_a_run_tells_where_it_met_the_limit_of_graphs(tmp_path, compiler, lengths_config):
    """Rows are padded where kernels are compiled, so the blocks of training have one graph, and
    those of a pass without gradients another one.
    """
    compiler(limit=1)
    run = start_run(lengths_config, tmp_path / "runs")
    assert execute(run).state == "finished", run.recorder.snapshot.reason
    found = told_by(run)
    assert [text.partition(". ")[0] for text in found] == [
        "The loss of an evaluation could not be compiled in the evaluation before the first step",
        "A block could not be compiled in the first step",
        "The loss could not be compiled in a shape of step 2",
    ]
    assert all("(it has more shapes than the 1 for which" in text for text in found)


def test_every_run_tells_that_its_loss_cannot_be_compiled(tmp_path, compiler, lengths_config):
    """A second run in the same process, as in the app, uses the functions of the first."""
    compiler(limit=64, broken=object)
    for _ in range(2):
        run = start_run(lengths_config, tmp_path / "runs")
        assert execute(run).state == "finished", run.recorder.snapshot.reason
        found = told_by(run)
        assert [text.partition(" could not")[0] for text in found] == [
            "The loss of an evaluation",
            "The loss",
        ]
        assert all("(no such kernel)" in text for text in found)
        assert "in the evaluation before the first step." in found[0]
    eager = start_run(lengths_config.with_values({"engine.kernels": "eager"}), tmp_path / "runs")
    assert execute(eager).state == "finished" and told_by(eager) == []
